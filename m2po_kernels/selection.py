"""select(): one optimizer batch in, the tokens that Algorithm 1 keeps out."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops  # noqa: F401  (registers torch.ops.m2po_kernels)
from .inputs import check_batch
from .results import Metrics, Selection
from .rule import Rule


@torch.no_grad()
def select(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    m2_threshold: float = 0.04,
    scope: str = "quadrants",
    nonfinite: str = "propagate",
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Selection:
    """Select the tokens that M2PO keeps (Algorithm 1 of arXiv 2510.01161). Never tracks gradients.

    log_probs, behavior_log_probs: [B, T], or packed [N]; natural-log probabilities of the sampled tokens under the current
        policy and as the rollout engine gave them. float32, bfloat16, float16 or float64, any strides.
    advantages: [B], [B, 1] or as log_probs; packed: [N], or [S] with cu_seqlens [S + 1].
    mask: as log_probs, bool or 0/1 of any dtype (nonzero is valid).
    m2_threshold: tau >= 0, a double; inf drops nothing, 0 drops every token of T that moved.
    scope: "quadrants" (the paper: A > 0 and d > 0, or A < 0 and d < 0) or "all" (AReaL: every valid token).
    nonfinite: "propagate", "drop" or "error"; see docs/semantics.md.
    backend: "eager", "native", "cuda", "triton", or None for the first that serves the call.

    The tokens given are taken for the whole optimizer batch: the mean that must not exceed m2_threshold is over all of them.
    Raises InvalidArgument, InvalidType, MissingBehaviorLogProbs, NonFiniteError, BackendUnavailable (all in m2po_kernels.errors).
    """
    rule = Rule(m2_threshold=m2_threshold, scope=scope, nonfinite=nonfinite, backend=backend)
    batch, _ = check_batch(log_probs, behavior_log_probs, advantages, mask, cu_seqlens=cu_seqlens)
    keep, counts, floats = torch.ops.m2po_kernels.select(*batch, *rule.args())
    return Selection(keep, Metrics(counts, floats), m2_threshold, scope)
