"""The search for the cut by digits: against Python's integers, and against the sort of the eager backend."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from m2po_kernels import digits
from m2po_kernels.exact import Unit, find_cut, from_key, slack_of, to_key

DTYPES = (torch.float32, torch.float64)


def search(v: torch.Tensor, low_count: int, low_sum: int, tau: float) -> digits.Search:
    """All digits over the candidates `v` of one rank."""
    unit = Unit.of(tau, v.dtype)
    state = digits.start(slack_of(torch.tensor(low_count), torch.tensor(low_sum), unit), torch.float64)
    for i, digit in enumerate(digits.digits_of(v.dtype)):
        table = digits.histogram(v, state.prefix if i else None, digit)
        state = digits.narrow(state, table, digit, v.dtype, unit, tau)
    return digits.keep_equals(state, v.dtype, unit, tau)


def dropped(v: torch.Tensor, state: digits.Search) -> torch.Tensor:
    key = to_key(v)
    if int(state.prefix) < 0:
        return torch.zeros_like(v, dtype=torch.bool)
    equal = key == state.prefix
    return (key > state.prefix) | (equal & (equal.cumsum(0) <= state.equal))


def candidates(dtype: torch.dtype, tau: float, n: int, seed: int) -> torch.Tensor:
    """Above tau, many equals among them, over many exponents, one infinity now and then."""
    g = torch.Generator().manual_seed(seed)
    v = tau * (1 + torch.rand(n, generator=g, dtype=torch.float64)) * 2.0 ** torch.randint(0, 3 + seed % 60, (n,), generator=g)
    v = torch.where(torch.rand(n, generator=g) < 0.5, v[torch.randint(0, n, (n,), generator=g)], v).to(dtype)
    if seed % 5 == 0:
        v[seed % n] = math.inf
    above = Unit.of(tau, dtype).candidate_above
    return v[v > above]


@pytest.mark.parametrize("tau", [1e-42, 1e-30, 0.003, 0.04, 0.1, 7.0, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cut_is_that_of_the_sort(dtype, tau):
    partial = 0
    for seed in range(20):
        v = candidates(dtype, tau, 200, seed)
        low_count = (0, 1, 40, 3000, 10**6, 2**31 - 300)[seed % 6]
        low_sum = low_count * 2**29 // (1 + seed % 3)
        state = search(v, low_count, low_sum, tau)
        positions = torch.arange(v.numel())
        cut = find_cut(v, positions, torch.tensor(low_count), torch.tensor(low_sum), Unit.of(tau, dtype), tau)
        value = from_key(cut[0], dtype)
        want = (v > value) | ((v == value) & (positions <= cut[1]))
        assert torch.equal(dropped(v, state), want), seed
        partial += 0 < int(want.sum()) < v.numel()
        assert int(state.kept) == v.numel() - int(want.sum())
        assert float(digits.cut_value(state, dtype)) == float(value)
        # Each of at most 200 bins with a candidate is rounded three times and joins two sums.
        assert float(state.kept_sum) == pytest.approx(math.fsum(v[~want].tolist()), rel=5 * 200 * 2.0**-53)
    assert partial > 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_drops_every_candidate_and_infinity_none(dtype):
    v = torch.tensor([0.5, 2.0, math.inf], dtype=dtype)
    assert dropped(v, search(v, 5, 0, 0.0)).all()
    assert int(search(v, 5, 0, 0.0).kept) == 0
    none = search(v[:0], 5, 0, math.inf)
    assert int(none.prefix) == -1
    assert float(digits.cut_value(none, dtype)) == math.inf
    assert float(none.kept_sum) == 0


def exact_run(counts: list[int], sums: list[Fraction], slack: Fraction, tau: float) -> tuple[int, Fraction]:
    """(bins that can be paid for, what is left), by the book."""
    for n, (count, total) in enumerate(zip(counts, sums, strict=True)):
        after = slack + count * Fraction(tau) - total
        if after < 0:
            return n, slack
        slack = after
    return len(counts), slack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_of_two_billion_tokens_do_not_overflow(dtype):
    """Histograms that no test could fill token by token, against rational numbers; the slack ends anywhere in them."""
    first, *_ = digits.digits_of(dtype)
    mantissa, bias = (23, 150) if dtype == torch.float32 else (52, 1075)
    ends = set()
    for seed in range(60):
        rng = random.Random(seed)
        tau = rng.choice([0.04, 1.0, 3e-5])
        unit = Unit.of(tau, dtype)
        table, counts, sums = torch.zeros(3, first.size, dtype=torch.int64), [0] * first.size, [Fraction(0)] * first.size
        lowest = (int(to_key(torch.tensor(tau, dtype=dtype))) >> first.below) + 1
        budget = 2**30
        for b in sorted(
            rng.sample(range(lowest, lowest + 20 * (1 << (first.width - (31 - mantissa if mantissa == 23 else 11)))), 6)
        ):
            count = rng.randrange(1, budget // 8)
            rest = rng.randrange(0, count * ((1 << first.below) - 1))
            low = min(rest & ((1 << 28) - 1), rest) if first.below > 28 else rest
            table[0, b], table[1, b], table[2, b] = count, low, (rest - low) >> 28
            key = b << first.below
            field = key >> mantissa
            base = (key & ((1 << mantissa) - 1)) | (1 << mantissa)
            counts[b], sums[b] = count, (count * base + rest) * Fraction(2) ** (field - bias)
        low_count, k = 2**30, 31 - math.frexp(tau)[1]
        low_sum = rng.randrange(0, low_count * 2**30)
        slack = low_count * Fraction(tau) - low_sum * Fraction(2) ** -k
        start = digits.start(slack_of(torch.tensor(low_count), torch.tensor(low_sum), unit), torch.float64)
        state = digits.narrow(start, table, first, dtype, unit, tau)
        n, left = exact_run(counts, sums, slack, tau)
        ends.add(sum(c > 0 for c in counts[:n]))
        assert int(state.prefix) == (n if n < first.size else -1), seed
        got = sum(int(limb) << (28 * i) for i, limb in enumerate(state.left))
        assert got * Fraction(2) ** unit.exponent == left, seed
        assert int(state.kept) == sum(counts[:n])
        # Six bins hold any.
        assert float(state.kept_sum) == pytest.approx(float(sum(sums[:n])), rel=5 * 6 * 2.0**-53)
        assert float(state.counted) == pytest.approx(float(sum(sums)), rel=5 * 6 * 2.0**-53)
    assert len(ends) >= 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_billion_equals_are_counted_exactly(dtype):
    tau = 0.04
    unit = Unit.of(tau, dtype)
    for seed in range(40):
        rng = random.Random(seed)
        v = torch.tensor(rng.choice([0.05, 0.0401, 3.0, 1e20, math.inf]), dtype=dtype)
        low_count, equal = rng.randrange(0, 2**30), rng.randrange(1, 2**30)
        low_sum = rng.randrange(0, low_count * 2**30 + 1)
        left = slack_of(torch.tensor(low_count), torch.tensor(low_sum), unit)
        none = torch.tensor(0)
        state = digits.Search(left, to_key(v), torch.tensor(equal), none, none.double(), none.double())
        done = digits.keep_equals(state, dtype, unit, tau)
        slack = low_count * Fraction(tau) - low_sum * Fraction(2) ** -(31 - math.frexp(tau)[1])
        each = None if math.isinf(v) else Fraction(float(v)) - Fraction(tau)
        stay = 0 if each is None else min(equal, slack // each)
        assert (int(done.kept), int(done.equal)) == (stay, equal - stay), seed
