"""The decision in torch, exact: from the candidates and the sum of the low tokens to the cut. Any device, no host sync.

Every sum is an integer, so the cut has no order of summation in it: the bits of every other backend (docs/architecture.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIMB = 28  # bits in a limb of the exact sums; three hold 2^31 tokens times a 53-bit threshold
SLACK_BITS = 22  # the decision's unit is 2^-SLACK_BITS of the unit in which low tokens are rounded


class Unit(NamedTuple):
    """The threshold as an integer: tau = mantissa * 2^exponent, and the scale that makes a low v an integer below 2^31."""

    mantissa: int
    exponent: int
    scale: tuple[float, float]  # two factors, as their product may leave the range of fp32
    candidate_above: float  # the largest value of the compute type that is <= tau

    @classmethod
    def of(cls, tau: float, dtype: torch.dtype) -> Unit:
        rounded = torch.tensor(tau, dtype=torch.float64).to(dtype)
        if float(rounded) > tau:
            rounded = torch.nextafter(rounded, rounded.new_zeros(()))
        if tau == 0 or math.isinf(tau):
            return cls(0, 0, (0.0, 0.0), float(rounded))
        fraction, exponent = math.frexp(tau)
        # Beyond 2^250 a low fp32 v is 0, and the product of two larger factors would not be.
        k = 31 - exponent if dtype == torch.float64 else max(min(31 - exponent, 250), -250)
        return cls(int(math.ldexp(fraction, 53)), exponent - 53, (2.0 ** (k // 2), 2.0 ** (k - k // 2)), float(rounded))


def find_cut(v: Tensor, positions: Tensor, low_count: Tensor, low_sum: Tensor, unit: Unit, tau: float) -> Tensor:
    """int64 [2]: the bits of the smallest dropped v, and the last position dropped among its equals; (inf, -1) for none."""
    device = v.device
    n = v.numel()
    if n == 0:
        return torch.stack([to_key(v.new_full((), math.inf)), torch.tensor(-1, device=device)])
    # Ascending, the latest of equals first: what is kept is a run from the start.
    values, order = torch.sort(v.flip(0), stable=True)
    if tau == 0:
        n_kept = torch.zeros((), dtype=torch.int64, device=device)
    else:
        n_kept = (_remaining_slack(values, low_count, low_sum, unit) >= 0).sum()
    at = n_kept.clamp(max=n - 1)
    some = n_kept < n
    smallest = torch.where(some, values[at], math.inf)
    return torch.stack([to_key(smallest), torch.where(some, positions.flip(0)[order[at]], -1)])


def _remaining_slack(values: Tensor, low_count: Tensor, low_sum: Tensor, unit: Unit) -> Tensor:
    """tau * (low + run) - sum(low) - sum(run) for each run of `values` from the start: the top limb, whose sign is the sign."""
    mask = (1 << LIMB) - 1
    fraction, exponent = torch.frexp(values)
    digits = 24 if values.dtype == torch.float32 else 53
    mantissa = torch.ldexp(fraction, torch.tensor(digits, device=values.device)).to(torch.int64)
    shift = exponent.to(torch.int64) - digits - unit.exponent
    # From 2^85 on a value exceeds any slack of 2^31 tokens: counted as exactly that.
    huge = values.isinf() | (shift > 3 * LIMB + 1 - digits)
    low_limbs = (
        (low_sum << SLACK_BITS) & mask,
        (low_sum >> (LIMB - SLACK_BITS)) & mask,
        low_sum >> (2 * LIMB - SLACK_BITS),
    )
    run = torch.arange(1, values.numel() + 1, device=values.device)
    carry: Tensor | int = 0
    for limb in range(3):
        left = (shift - LIMB * limb).clamp(-62, LIMB)
        piece = torch.where(left >= 0, mantissa << left.clamp(min=0), mantissa >> (-left).clamp(min=0))
        piece = torch.where(left >= LIMB, 0, piece) if limb < 2 else piece
        piece = torch.where(huge, (1 << (LIMB + 1)) if limb == 2 else 0, piece if limb == 2 else piece & mask)
        tau_limb = (unit.mantissa >> (LIMB * limb)) & mask
        total = (low_count + run) * tau_limb - low_limbs[limb] - piece.cumsum(0) + carry
        carry = total >> LIMB
    return total


def is_dropped(v: Tensor, positions: Tensor, cut: Tensor) -> Tensor:
    cut_v = from_key(cut[0], v.dtype)
    return (v > cut_v) | ((v == cut_v) & (positions <= cut[1]))


def to_key(v: Tensor) -> Tensor:
    return v.view(torch.int32 if v.dtype == torch.float32 else torch.int64).to(torch.int64)


def from_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    return key.to(torch.int32).view(dtype) if dtype == torch.float32 else key.view(dtype)
