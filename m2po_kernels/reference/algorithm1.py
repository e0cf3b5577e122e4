"""Algorithm 1 of M2PO (arXiv 2510.01161): which tokens are masked. Literal, and a vectorised twin for large batches."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor


def log_ratio(log_probs: Tensor, behavior_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """d and v = d * d, each rounded once: to fp32, or to fp64 when log_probs is fp64."""
    dtype = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    d = log_probs.detach().to(dtype) - behavior_log_probs.detach().to(dtype)
    return d, d * d


def trust_region(d: Tensor, advantages: Tensor, valid: Tensor, scope: str = "quadrants") -> Tensor:
    """T: the valid tokens in PPO's two clipping quadrants, or every valid token for scope="all"; never one whose v is NaN."""
    if scope == "all":
        return valid & ~torch.isnan(d)
    return valid & (((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0)))


def select_literal(v: Tensor, in_region: Tensor, valid: Tensor, m2_threshold: float) -> Tensor:
    """M, by the loop of Algorithm 1: while mean(v over T) > tau, drop the argmax of v over T (the first among equals).

    v, in_region, valid: one shape, taken in row-major order. Exact: sums and the mean are rational numbers. O(n^2); for small n.
    """
    values = v.detach().flatten().double().tolist()
    region = [i for i, inside in enumerate(in_region.flatten().tolist()) if inside]
    keep = valid.flatten().tolist()

    def mean_exceeds() -> bool:
        if any(values[i] == float("inf") for i in region):
            return m2_threshold < float("inf")
        if m2_threshold == float("inf"):
            return False
        return sum((Fraction(values[i]) for i in region), Fraction(0)) > Fraction(m2_threshold) * len(region)

    while region and mean_exceeds():
        largest = max(region, key=lambda i: (values[i], -i))
        region.remove(largest)
        keep[largest] = False
    return torch.tensor(keep, dtype=torch.bool, device=v.device).reshape(v.shape)


def select_sorted(v: Tensor, in_region: Tensor, valid: Tensor, m2_threshold: float) -> Tensor:
    """The same M from one sort: keep the longest ascending run whose mean is at most tau. fp64 sums (relative error below 1e-12).

    Ascending by (v, latest position first), so that the first among equals is the first to go. Any n.
    """
    flat, region = v.detach().flatten().double(), in_region.flatten()
    positions = region.nonzero().flatten().flip(0)
    values, order = torch.sort(flat[positions], stable=True)
    counts = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=v.device)
    affordable = torch.cumsum(values, 0) <= m2_threshold * counts
    if m2_threshold == float("inf"):
        affordable = torch.ones_like(affordable)
    keep = valid.flatten().clone()
    keep[positions[order[int(affordable.sum()) :]]] = False
    return keep.reshape(v.shape)
