"""What upstream projects ship under the name M2PO, as far as it differs from Algorithm 1. For comparison only.

Described from the projects' behaviour, in code of our own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def areal_mask(v: Tensor, valid: Tensor, m2_threshold: float) -> Tensor:
    """The mask of AReaL 1.0.4 (areal/trainer/ppo/actor.py, `get_m2po_loss_mask`; added by areal-project/AReaL pull request 480).

    Differs from Algorithm 1: T is every valid token whatever the sign of A and d; the mean must fall strictly BELOW the
    threshold; when no run does, all but the smallest token go. AReaL applies it to each micro-batch on its own (issue
    1730), to behaviour minus proximal log-probs, and divides the loss by the tokens kept.

    v, valid: one shape. Returns bool, False where not valid. fp64 sums.
    """
    keep = valid.flatten().clone()
    positions = keep.nonzero().flatten()
    values, order = torch.sort(v.detach().flatten().double()[positions], descending=True, stable=True)
    n = values.numel()
    if n == 0:
        return keep.reshape(v.shape)
    remaining = values.flip(0).cumsum(0).flip(0) / torch.arange(n, 0, -1, dtype=torch.float64, device=v.device)
    below = (remaining < m2_threshold).nonzero().flatten()
    n_masked = int(below[0]) if below.numel() else n - 1
    keep[positions[order[:n_masked]]] = False
    return keep.reshape(v.shape)


def repository_clip_bounds(
    v: Tensor, in_region: Tensor, m2_threshold: float, floor_low: float = 0.3, floor_high: float = 0.5
) -> tuple[float, float]:
    """PPO clip bounds (clip_low, clip_high) as the paper's repository solves them (Infini-AI-Lab/M2PO af54a3e, core_algos.py).

    Differs from Algorithm 1: instead of dropping tokens it looks for the bound b at which mean(min(v, b^2) over T) reaches the
    threshold, takes b = the largest sorted |d| before that point, and clips the ratio to [exp(-b), exp(b)], never tighter than
    [1 - floor_low, 1 + floor_high]; per micro-batch. (The repository itself raises at a threshold of 0 and on v near 1e-14,
    and reads only the first column of the advantages; that is not imitated.) inf as clip_high: nothing is clipped above.
    """
    values, _ = torch.sort(v.detach()[in_region].double())
    n = values.numel()
    if n == 0 or float(values.sum()) <= m2_threshold * n:
        return 1.0, float("inf")
    rest = torch.arange(n - 1, -1, -1, dtype=torch.float64, device=v.device)
    capped_sum = torch.cumsum(values, 0) + values * rest
    first = int((capped_sum >= m2_threshold * n).nonzero()[0])
    bound = float(values[first - 1]) ** 0.5 if first else 0.0
    low, high = 1.0 - float(torch.tensor(-bound).double().exp()), float(torch.tensor(bound).double().exp()) - 1.0
    return max(low, floor_low), max(high, floor_high)
