"""The cut from histograms: what lets ranks decide together without sending a token.

The bits of a candidate's v are read digit by digit, the highest first. Each rank counts its candidates by the digit, and sums
the mantissa bits below it. Summed over the ranks that tells in which bin the slack of the low tokens runs out; only candidates
of that bin are counted by the next digit. After the last one value is left, and a search says how many of its equals can stay.
All of it runs on the device, without a host sync, in the integers of exact.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .exact import INFINITE, LIMB, MASK, Limbs, Unit, from_key, limbs_of, pay, pay_equals, to_key

MANTISSA = {torch.float32: 23, torch.float64: 52}
# The first digit holds the whole exponent, so that all values of a bin share it and their sum is a sum of integers.
WIDTHS = {torch.float32: (11, 10, 10), torch.float64: (11, 9, 9, 9, 9, 8, 8)}
# Candidates counted at a time, each with some 50 bytes of temporaries. On a CPU those of 512 KB stay in its cache.
TILE_CPU, TILE = 1 << 16, 1 << 22
_COUNT_BITS = 31  # fewer than 2^31 tokens
_SEARCH_BITS = 11  # of a count that one step of the search for it settles


@dataclass(frozen=True)
class Digit:
    """Some bits of a v: `width` of them, with `below` bits under them."""

    width: int
    below: int
    rows: int  # of its histogram: the count, and one or two limbs of the sum of the bits below

    @property
    def size(self) -> int:
        """Number of bins."""
        return 1 << self.width


class Search(NamedTuple):
    """What is known of the cut after some digits. 0-d tensors; the same on all ranks."""

    left: Limbs  # slack that is left after the candidates below `prefix`
    prefix: Tensor  # the digits of the smallest dropped v so far; -1: none is dropped
    equal: Tensor  # candidates that start with `prefix`
    kept: Tensor  # candidates below it, and the sum of their v
    kept_sum: Tensor
    counted: Tensor  # sum of v over all candidates that the last digit counted


def digits_of(dtype: torch.dtype) -> list[Digit]:
    """The digits of a v of this type, the highest first; the sign is left out. The first has one layout for both types."""
    below = 31 if dtype == torch.float32 else 63
    digits: list[Digit] = []
    for width in WIDTHS[dtype]:
        below -= width
        digits.append(Digit(width, below, 3 if not digits or below > LIMB else 2))
    return digits


def start(left: Limbs, wide: torch.dtype) -> Search:
    """Before the first digit. left: the slack of all low tokens.

    It is below 0 where fp64 v just under tau were rounded up to it. Then no candidate can stay, as with a slack of 0.
    """
    none = torch.zeros_like(left[0])
    low, middle, high = (torch.where(left[2] < 0, 0, limb) for limb in left)
    return Search((low, middle, high), none, none, none, none.to(wide), none.to(wide))


def histogram(v: Tensor, prefix: Tensor | None, digit: Digit) -> Tensor:
    """int64 [rows, size]: of the candidates that start with `prefix` (None: of all) the counts and sums by `digit`."""
    table = torch.zeros(digit.rows, digit.size, dtype=torch.int64, device=v.device)
    on_cpu = v.device.type == "cpu"
    for tile in v.split(TILE_CPU if on_cpu else TILE):
        keys = to_key(tile)
        weights = None
        if prefix is not None:
            here = (keys >> (digit.width + digit.below)) == prefix
            if on_cpu:
                keys = keys[here]
            else:  # without waiting for their number
                weights = here.to(torch.int64)
        place = (keys >> digit.below) & (digit.size - 1)
        rest = keys & ((1 << digit.below) - 1)
        columns = [torch.ones_like(keys), rest & MASK, rest >> LIMB] if digit.below > LIMB else [torch.ones_like(keys), rest]
        for row, column in zip(table, columns, strict=False):
            row.index_add_(0, place, column if weights is None else column * weights)
    return table


def narrow(search: Search, table: Tensor, digit: Digit, dtype: torch.dtype, unit: Unit, tau: float) -> Search:
    """The search after one more digit. table: `histogram`, summed over the ranks."""
    bins = _bins(search.prefix, table, digit, dtype)
    counts = table[0].cumsum(0)
    left = pay(search.left, counts, bins.limbs(unit), unit)
    paid = left[2] >= 0 if tau != 0 else counts == 0  # at tau = 0 no candidate can stay
    at = paid.sum()
    found = (at < digit.size) & (search.prefix >= 0)
    before = [torch.take(torch.cat([x[None], y]), at) for x, y in zip(search.left, left, strict=True)]
    sums = bins.sums(search.kept_sum.dtype)
    return Search(
        left=(before[0], before[1], before[2]),
        prefix=torch.where(found, (search.prefix << digit.width) | at, -1),
        equal=torch.where(found, torch.take(table[0], at.clamp(max=digit.size - 1)), 0),
        kept=search.kept + torch.where(paid, table[0], 0).sum(),
        kept_sum=search.kept_sum + torch.where(paid, sums, 0.0).sum(),
        counted=sums.sum(),
    )


def keep_equals(search: Search, dtype: torch.dtype, unit: Unit, tau: float) -> Search:
    """After the last digit: how many of the `equal` the slack still pays for join the kept ones; the rest of them is dropped."""
    one = torch.ones_like(search.prefix)
    table = torch.stack([one, one - 1, one - 1])[:, None]
    value = _bins(search.prefix, table, Digit(0, 0, 3), dtype)
    limbs = value.limbs(unit)
    steps = torch.arange(1 << _SEARCH_BITS, device=one.device)
    n = torch.zeros_like(one)
    for below in range(_COUNT_BITS // _SEARCH_BITS * _SEARCH_BITS, -1, -_SEARCH_BITS):
        trial = n + (steps << below)
        left = pay_equals(search.left, torch.minimum(trial, search.equal), limbs, unit)
        paid = (left[2] >= 0) & (trial <= search.equal)
        n = n + ((paid.sum() - 1) << below)
    if tau == 0:
        n = torch.zeros_like(n)
    sums = torch.where(n > 0, n * value.sums(search.kept_sum.dtype)[0], 0.0)
    return search._replace(equal=search.equal - n, kept=search.kept + n, kept_sum=search.kept_sum + sums)


def cut_value(search: Search, dtype: torch.dtype) -> Tensor:
    """The smallest dropped v; infinity for none. Of the type of kept_sum."""
    wide = search.kept_sum.dtype
    return torch.where(search.prefix >= 0, from_key(search.prefix, dtype).to(wide), math.inf)


class _Bins(NamedTuple):
    """The sum of v in each bin, as (low + high * 2^LIMB) * 2^exponent."""

    low: Tensor
    high: Tensor
    exponent: Tensor
    infinite: Tensor

    def limbs(self, unit: Unit) -> Limbs:
        shift = torch.where(self.infinite, INFINITE, (self.exponent - unit.exponent).clamp(min=0))
        low, high = limbs_of(self.low, shift), limbs_of(self.high, shift + LIMB)
        return low[0] + high[0], low[1] + high[1], low[2] + high[2]

    def sums(self, wide: torch.dtype) -> Tensor:
        mantissas = self.low.to(wide) + self.high.to(wide) * 2.0**LIMB
        sums = mantissas * torch.pow(2.0, self.exponent.to(wide))
        return torch.where(self.infinite & (self.low + self.high > 0), math.inf, torch.where(self.infinite, 0.0, sums))


def _bins(prefix: Tensor, table: Tensor, digit: Digit, dtype: torch.dtype) -> _Bins:
    mantissa_bits = MANTISSA[dtype]
    lowest = ((prefix << digit.width) | torch.arange(digit.size, device=table.device)) << digit.below  # key of each bin
    field = lowest >> mantissa_bits
    base = (lowest & ((1 << mantissa_bits) - 1)) | ((field > 0).to(torch.int64) << mantissa_bits)
    top, bias = (255, 150) if dtype == torch.float32 else (2047, 1075)
    high = table[0] * (base >> LIMB)
    return _Bins(
        low=table[0] * (base & MASK) + table[1],
        high=high + table[2] if digit.rows == 3 else high,
        exponent=field.clamp(min=1) - bias,
        infinite=field == top,
    )
