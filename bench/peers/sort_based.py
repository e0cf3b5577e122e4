"""The sort-based PyTorch way: take T out by boolean indexing, sort it, suffix sums, compare, mask, exp, masked mean, autograd.

Who selects like this (reference/variants.py says how each differs from Algorithm 1): AReaL 1.0.4, `get_m2po_loss_mask` in
areal/trainer/ppo/actor.py (sort, suffix means, and a second argsort to undo the first); the paper's repository,
Infini-AI-Lab/M2PO af54a3e, core_algos.py (sort, cumulative sum, compare). The loss around it is the masked token mean that
GRPO trainers write. This is our own code, and kinder than those: one sort, no second argsort, no `.item()` inside a loop.

Two choices are there for the sake of a right answer, and cost little (measured at 7.5 million tokens of T: stable sort
829 ms, unstable 758 ms; cumulative sum in fp64 19 ms, in fp32 15 ms): the first among equals must go, so the sort is stable;
and a sum of millions of fp32 values misses the cut by some tokens, so the sums are fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def select(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04) -> Tensor:
    """M of Algorithm 1 as bool, False where `mask` (bool) is. All arguments have one shape."""
    d = log_probs - behavior_log_probs
    region = mask & (advantages * d > 0)
    values = d.square()[region]
    n = values.numel()
    if n == 0:
        return mask.clone()
    values, order = torch.sort(values, descending=True, stable=True)
    remaining = values.flip(0).cumsum(0, dtype=torch.float64).flip(0)
    counts = torch.arange(n, 0, -1, dtype=torch.float64, device=values.device)
    # The mean of what remains falls as the largest go, so the dropped ones are those where it is still too large.
    n_dropped = (remaining / counts > m2_threshold).sum()
    region_keep = torch.ones(n, dtype=torch.bool, device=values.device)
    region_keep[order[:n_dropped]] = False
    keep = mask.clone()
    keep[region] = region_keep
    return keep


@torch.no_grad()
def select_static(
    log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04
) -> Tensor:
    """`select` with sizes known beforehand, as a CUDA graph asks for: all tokens are sorted, those outside T to the end."""
    d = log_probs - behavior_log_probs
    region = mask & (advantages * d > 0)
    values, order = torch.sort(torch.where(region, d.square(), -1.0).flatten(), descending=True, stable=True)
    inside = values >= 0
    remaining = torch.where(inside, values, 0.0).flip(0).cumsum(0, dtype=torch.float64).flip(0)
    affordable = remaining <= m2_threshold * inside.flip(0).cumsum(0).flip(0)
    return mask & torch.empty_like(inside).scatter_(0, order, affordable | ~inside).view(mask.shape)


def loss_static(
    log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04
) -> Tensor:
    """`loss` around `select_static`."""
    keep = select_static(log_probs, behavior_log_probs, advantages, mask, m2_threshold)
    return _masked_mean(log_probs, behavior_log_probs, advantages, mask, keep)


def loss(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, m2_threshold: float = 0.04) -> Tensor:
    """The M2PO loss: mean over the valid tokens of -M exp(d) A. Autograd makes the backward."""
    keep = select(log_probs, behavior_log_probs, advantages, mask, m2_threshold)
    return _masked_mean(log_probs, behavior_log_probs, advantages, mask, keep)


def _masked_mean(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, mask: Tensor, keep: Tensor) -> Tensor:
    ratio = torch.exp(log_probs - behavior_log_probs)
    per_token = torch.where(keep, -ratio * advantages, 0.0)
    return per_token.sum() / mask.sum().clamp(min=1)
