"""The arithmetic of sort_based.py in plain torch code for torch.compile: one graph each for select and for the loss, no break.

Inductor fuses what is pointwise and calls ATen for sort, nonzero and scatter. `nonzero` in place of boolean indexing keeps the
graph whole (its size is not known to the compiler) and sorts T alone: sorting all tokens with a filler outside T, which has
a known size, took 1,511 ms at 2^24 tokens where T alone took 829 ms. The shapes of the batch are static: one compilation for
each, outside of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor


@torch.no_grad()
def select(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04) -> Tensor:
    """M of Algorithm 1 as bool, False where `mask` (bool) is. All arguments have one shape."""
    d = log_probs - behavior_log_probs
    positions = (mask & (advantages * d > 0)).flatten().nonzero().flatten()
    values, order = torch.sort(d.square().flatten()[positions], descending=True, stable=True)
    remaining = values.flip(0).cumsum(0, dtype=torch.float64).flip(0)
    counts = values.numel() - torch.arange(values.numel(), device=values.device)
    affordable = remaining <= m2_threshold * counts
    return mask.flatten().scatter(0, positions[order], affordable).view(mask.shape)


def loss(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04) -> Tensor:
    """The M2PO loss: mean over the valid tokens of -M exp(d) A."""
    keep = select(log_probs, behavior_log_probs, advantages, mask, m2_threshold)
    ratio = torch.exp(log_probs - behavior_log_probs)
    per_token = torch.where(keep, -ratio * advantages, 0.0)
    return per_token.sum() / mask.sum().clamp(min=1)


def compile_for(function: Callable[..., Tensor], *batch: Tensor) -> Callable[..., Tensor]:
    """`function` compiled for the shapes of `batch`, by one call with it; a graph break is an error."""
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(*batch)
    return compiled
