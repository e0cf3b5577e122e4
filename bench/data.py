"""Batches whose share of candidates (tokens of T with v > tau) is set: staleness decides how much work selecting is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

M2_THRESHOLD = 0.04
TOKENS = (1 << 16, 1 << 20, 1 << 24)
ROW_LENGTH = 4096
PADDING = 0.1

# Share of candidates in T -> mean v over T before dropping. 13 % and 75 % are two of the stale sets of the bundled real
# rollouts with their means (.0551 and 3.45). In a healthy batch the mean is under tau and nothing is dropped, the easiest case;
# here it is set a little above tau, so that every case has tokens to drop.
SHARES = {0.005: 0.05, 0.13: 0.0551, 0.75: 3.45}
# Kinds of make_full_batch -> share of candidates in T.
FULL_KINDS = {"all": 1.0, "equal": 1.0, "tied": 0.5}


@dataclass(frozen=True)
class TokenBatch:
    """[B, T] tensors: fp32 log-probs and advantages (one a token, contiguous), bool mask; the share of candidates as measured."""

    log_probs: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    share: float
    measured_share: float
    candidates: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which m2po_loss and the peers take them."""
        return self.log_probs, self.behavior_log_probs, self.advantages, self.mask

    @property
    def tokens(self) -> int:
        """Tokens in the batch, padding included."""
        return self.log_probs.numel()


def make_batch(tokens: int, share: float, *, device: str = "cpu", seed: int = 0) -> TokenBatch:
    """A batch of `tokens` tokens with about `share` of T above the threshold, half of the valid tokens in T, 10 % padding.

    |d| is uniform in [0, sqrt(tau)] for low tokens and in [sqrt(tau), b] for candidates, b such that the mean v is that of
    SHARES; both signs are equally likely for d and for the advantage of each token. So a branch on either cannot be
    predicted, which is the hard case for a kernel that branches.
    """
    if share not in SHARES:
        raise ValueError(f"share must be one of {', '.join(map(str, SHARES))}; got {share!r}")
    width = min(ROW_LENGTH, tokens)
    if tokens < 1 or tokens % width:
        raise ValueError(f"tokens must be at least 1 and, above {ROW_LENGTH}, a multiple of it; got {tokens!r}")
    random = torch.Generator().manual_seed(seed)
    shape = (tokens // width, width)
    edge = math.sqrt(M2_THRESHOLD)
    size = torch.rand(shape, generator=random)
    high = torch.rand(shape, generator=random) < share
    size = torch.where(high, edge + size * (_upper_edge(share) - edge), size * edge)
    sign = torch.randint(0, 2, shape, generator=random, dtype=torch.int8).mul_(2).sub_(1)
    # Whichever of the two is larger lies `base` below 0, so that both are log-probs.
    base = torch.empty(shape).exponential_(generator=random)
    log_probs = -(base + torch.where(sign < 0, size, 0.0))
    behavior = -(base + torch.where(sign > 0, size, 0.0))
    advantages = torch.randn(shape, generator=random)
    lengths = (width * (1 - 2 * PADDING * torch.rand(shape[0], 1, generator=random))).ceil()
    mask = torch.arange(width) < lengths
    for tensor in (log_probs, behavior, advantages):
        tensor.masked_fill_(~mask, 0.0)
    d = log_probs - behavior
    region = mask & (d * advantages.sign() > 0)
    n_region, n_valid = int(region.sum()), int(mask.sum())
    candidates = int((region & (d.double().square() > M2_THRESHOLD)).sum())
    measured = candidates / max(n_region, 1)
    _check_share("share of candidates in T", measured, share, n_region)
    _check_share("share of T in the valid tokens", n_region / max(n_valid, 1), 0.5, n_valid)
    if abs(n_valid / tokens - (1 - PADDING)) > 2 * PADDING / math.sqrt(12 * shape[0]) * 5 + 1 / width:
        raise AssertionError(f"padding is {1 - n_valid / tokens:.4f} of the tokens; expected about {PADDING}")
    log_probs, behavior, advantages, mask = (t.to(device) for t in (log_probs, behavior, advantages, mask))
    return TokenBatch(log_probs.requires_grad_(), behavior, advantages, mask, share, measured, candidates)


def make_full_batch(tokens: int, kind: str, *, device: str = "cpu", seed: int = 0) -> TokenBatch:
    """Every valid token is in T, 10 % padding. kind is one of FULL_KINDS:

    "all": all are candidates, |d| uniform in [0.3, 1.3]. "equal": all are candidates and equal, |d| = 0.5. In both nothing is
    low, so nothing pays for a candidate and all go. "tied": half have |d| = 0.1, the others 0.3, so that 3 in 5 of these equals
    stay and the cut is a position.
    """
    if kind not in FULL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(FULL_KINDS)}; got {kind!r}")
    width = min(ROW_LENGTH, tokens)
    random = torch.Generator().manual_seed(seed)
    shape = (tokens // width, width)
    size = torch.full(shape, 0.5)
    if kind == "all":
        size = 0.3 + torch.rand(shape, generator=random)
    elif kind == "tied":
        size = torch.where(torch.rand(shape, generator=random) < 0.5, 0.1, 0.3)
    up = torch.rand(shape, generator=random) < 0.5
    # d is one of the two log-probs with a sign, the other being 0, so that equals stay equal.
    log_probs, behavior = torch.where(up, 0.0, -size), torch.where(up, -size, 0.0)
    advantages = torch.where(up, 1.0, -1.0) * (0.5 + torch.rand(shape, generator=random))
    lengths = (width * (1 - 2 * PADDING * torch.rand(shape[0], 1, generator=random))).ceil()
    mask = torch.arange(width) < lengths
    v = (log_probs - behavior).double().square()
    candidates = int((mask & (v > M2_THRESHOLD)).sum())
    measured = candidates / int(mask.sum())
    log_probs, behavior, advantages, mask = (t.to(device) for t in (log_probs, behavior, advantages, mask))
    return TokenBatch(log_probs.requires_grad_(), behavior, advantages, mask, FULL_KINDS[kind], measured, candidates)


def _upper_edge(share: float) -> float:
    """b for which share * E[v in the upper part] + (1 - share) * tau / 3 is the mean of SHARES; E = (b^2 + b e + e^2) / 3."""
    edge = math.sqrt(M2_THRESHOLD)
    mean = (SHARES[share] - (1 - share) * M2_THRESHOLD / 3) / share
    return (-edge + math.sqrt(edge * edge - 4 * (edge * edge - 3 * mean))) / 2


def _check_share(name: str, measured: float, wanted: float, n: int) -> None:
    """Five standard deviations of a draw of `n`: what a right generator exceeds once in two million batches."""
    tolerance = 5 * math.sqrt(wanted * (1 - wanted) / max(n, 1)) + 1e-4
    if abs(measured - wanted) > tolerance:
        raise AssertionError(f"{name} is {measured:.5f}; expected {wanted} within {tolerance:.5f}")
