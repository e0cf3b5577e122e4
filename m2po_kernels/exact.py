"""The decision in torch, exact: from the candidates and the sum of the low tokens to the cut. Any device, no host sync.

Every sum is an integer, so the cut has no order of summation in it: the bits of every other backend (docs/architecture.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

LIMB = 28  # bits in a limb of the exact sums; three hold 2^31 tokens times a 53-bit threshold
MASK = (1 << LIMB) - 1
SLACK_BITS = 22  # the decision's unit is 2^-SLACK_BITS of the unit in which low tokens are rounded
INFINITE = 128  # a shift that makes any mantissa exceed every slack

Limbs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # int64, in units of the decision, the lowest first


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
    fraction, exponent = torch.frexp(values)
    digits = 24 if values.dtype == torch.float32 else 53
    mantissa = torch.ldexp(fraction, torch.tensor(digits, device=values.device)).to(torch.int64)
    shift = torch.where(values.isinf(), INFINITE, exponent.to(torch.int64) - digits - unit.exponent)
    run = torch.arange(1, values.numel() + 1, device=values.device)
    return pay(slack_of(low_count, low_sum, unit), run, limbs_of(mantissa.where(values.isfinite(), 1), shift), unit)[2]


def slack_of(low_count: Tensor, low_sum: Tensor, unit: Unit) -> Limbs:
    """tau * low - sum(low): what the low tokens leave for candidates."""
    low = limbs_of(low_sum, torch.full_like(low_sum, SLACK_BITS))
    return _carried([low_count * t - x for t, x in zip(_tau_limbs(unit), low, strict=True)])


def pay_equals(left: Limbs, counts: Tensor, value: Limbs, unit: Unit) -> Limbs:
    """What is left of the slack after `counts` candidates (below 2^32) of one value: tau - v more for each."""
    return _carried([x + counts * (t - v) for x, t, v in zip(left, _tau_limbs(unit), value, strict=True)])


def pay(left: Limbs, counts: Tensor, values: Limbs, unit: Unit) -> Limbs:
    """What is left of the slack after the run that ends at each element: + tau a candidate, - its v.

    counts: int64 [n], candidates in the run up to and with each element; values: the limbs of each element's v or sum of v.
    """
    return _carried([x + counts * t - v.cumsum(0) for x, t, v in zip(left, _tau_limbs(unit), values, strict=True)])


def limbs_of(mantissa: Tensor, shift: Tensor) -> Limbs:
    """mantissa * 2^shift for 0 <= mantissa < 2^62. From 2^84 on, more than the slack of 2^31 tokens, it counts as 2^85."""
    huge = (mantissa >> (3 * LIMB - shift).clamp(0, 62)) > 0
    pieces = []
    for limb in range(3):
        left = (shift - LIMB * limb).clamp(-62, LIMB)
        piece = torch.where(left >= 0, mantissa << left.clamp(min=0), mantissa >> (-left).clamp(min=0)) & MASK
        pieces.append(torch.where(huge, 1 << (LIMB + 1) if limb == 2 else 0, piece))
    return pieces[0], pieces[1], pieces[2]


def _tau_limbs(unit: Unit) -> tuple[int, ...]:
    return tuple((unit.mantissa >> (LIMB * limb)) & MASK for limb in range(3))


def _carried(limbs: list[Tensor]) -> Limbs:
    """The same number with the two lower limbs in [0, 2^LIMB): the sign is that of the top one."""
    middle = limbs[1] + (limbs[0] >> LIMB)
    return limbs[0] & MASK, middle & MASK, limbs[2] + (middle >> LIMB)


def is_dropped(v: Tensor, positions: Tensor, cut: Tensor) -> Tensor:
    cut_v = from_key(cut[0], v.dtype)
    return (v > cut_v) | ((v == cut_v) & (positions <= cut[1]))


def to_key(v: Tensor) -> Tensor:
    return v.view(torch.int32 if v.dtype == torch.float32 else torch.int64).to(torch.int64)


def from_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    return key.to(torch.int32).view(dtype) if dtype == torch.float32 else key.view(dtype)
