"""What test_triton.py runs under TRITON_INTERPRET=1, one function in one process: `python triton_cases.py NAME`."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from helpers import Tokens, assert_matches_oracle, random_tokens, run, same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from m2po_kernels import grpo_loss, m2po_loss, select
from m2po_kernels.backends import eager
from m2po_kernels.backends import triton as backend
from m2po_kernels.backends.triton import cut, forward, policy, tuning
from m2po_kernels.errors import BackendUnavailable
from m2po_kernels.exact import Unit
from m2po_kernels.inputs import check_batch
from m2po_kernels.rule import Rule


def small_blocks(size: int = 64) -> None:
    tuning.INTERPRETER = dataclasses.replace(tuning.INTERPRETER, block=size, backward_block=size)


def same_as_eager(tokens: Tokens, **rule) -> list:
    """Masks, counts, cut, scales and the metrics that are no sums: bit by bit."""
    batch, _ = check_batch(*tokens)
    keep, counts, floats = backend.select(batch, Rule(**rule))
    keep_e, counts_e, _ = eager.select(batch, Rule(**rule))
    assert torch.equal(keep, keep_e), rule
    assert torch.equal(counts, counts_e), (rule, counts, counts_e)
    _, scales, at, counts, more = backend.policy_loss(batch, Rule(**rule))
    _, scales_e, at_e, counts_e, more_e = eager.policy_loss(batch, Rule(**rule))
    assert torch.equal(at, at_e), (rule, at, at_e)
    assert torch.equal(counts, counts_e)
    assert same_bits(scales, scales_e)
    assert same_bits(more, floats)
    for i in (2, 3, 4, 8):
        assert same_bits(more[i], more_e[i])
    torch.testing.assert_close(more[:2], more_e[:2], rtol=1e-12, atol=0)
    return [keep, at]


def masks_and_cuts() -> None:
    small_blocks()
    for seed, spread in enumerate([0.05, 0.3, 0.4, 2.0, 20.0]):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tokens = random_tokens((7, 91), seed=seed, spread=spread, dtype=dtype)
            for tau in (0.0, 5e-324, 1e-6, 0.04, 0.5, 1e30, math.inf) if dtype == torch.float32 else (0.01, 0.04):
                same_as_eager(tokens, m2_threshold=tau, scope="all" if seed == 1 else "quadrants")
    # Another block size decides the same.
    tokens = random_tokens((5, 150), seed=9)
    first = same_as_eager(tokens)
    small_blocks(256)
    for a, b in zip(first, same_as_eager(tokens), strict=True):
        assert torch.equal(a, b)


def equal_values() -> None:
    """All candidates, all equal, and few values: more than CROWD in one bin of a block; the cut in the middle of a block."""
    small_blocks(256)
    n = 900
    for d in (0.5, 0.2000001, 30.0, 1e20, math.inf):
        for n_low in (0, 1, 500, 890):
            values = torch.full((n,), d)
            values[torch.randperm(n, generator=torch.Generator().manual_seed(1))[:n_low]] = 0.01
            tokens = Tokens(values, torch.zeros(n), torch.ones(n), torch.ones(n, dtype=torch.bool))
            keep, _ = same_as_eager(tokens)
            assert bool(keep[values < 0.1].all())
    few = torch.tensor([0.21, 0.25, 0.3, 0.75])[torch.arange(n) % 4]
    same_as_eager(Tokens(few, torch.zeros(n), torch.ones(n), torch.ones(n)), m2_threshold=0.06)


def options() -> None:
    small_blocks()
    tokens = random_tokens((6, 50), seed=3)
    g = torch.Generator().manual_seed(5)
    ref = tokens.log_probs + torch.randn(6, 50, generator=g) * 0.3
    for loss_fn in (m2po_loss, grpo_loss):
        for extra in (
            {},
            {"kl_coef": 0.1, "ref_log_probs": ref},
            {"ratio_cap": 1.3, "reduction": "sequence-mean"},
            {"reduction": "none", "kl_coef": 0.1, "ref_log_probs": ref.t().contiguous().t()},
            {"reduction": "sum", "nonfinite": "drop"},
            {"denominator": torch.tensor(37.0)},
        ):
            assert_matches_oracle(run(loss_fn, tokens, **extra, backend="triton"), loss_fn, tokens, **extra)
    for layout in (lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(3, 1)[:, ::3]):
        strided = tokens.map(layout)
        sel = select(*strided, backend="triton")
        assert torch.equal(sel.keep, select(*tokens, backend="eager").keep)
        assert_matches_oracle(run(m2po_loss, strided, backend="triton"), m2po_loss, tokens)
        given = run(m2po_loss, strided, selection=sel, backend="triton")
        assert same_bits(given.grad, run(m2po_loss, tokens, backend="triton").grad)


def rows_with_a_stride() -> None:
    """Whole runs of 16 elements, which take the way of wide loads in whole blocks, and shapes that just miss it."""
    small_blocks()
    for columns, stride, first in ((64, 96, 16), (48, 64, 0), (64, 96, 1), (64, 100, 0), (40, 64, 0)):
        tokens = random_tokens((6, columns), seed=columns)

        def wide(t, columns=columns, stride=stride, first=first):
            store = torch.zeros((6, stride), dtype=t.dtype)
            store[:, first : first + columns] = t
            return store[:, first : first + columns]

        strided = tokens.map(wide)
        for a, b in zip(same_as_eager(strided), same_as_eager(tokens), strict=True):
            assert torch.equal(a, b)
        assert same_bits(run(m2po_loss, strided, backend="triton").grad, run(m2po_loss, tokens, backend="triton").grad)


@triton.jit
def _slack_kernel(histogram, out, low_count, low_sum, tau0, tau1, exponent, members, BINS: tl.constexpr, SHIFT: tl.constexpr):
    zero = tl.load(histogram) * 0
    s0, s1, s2 = cut.slack_of(tl.load(low_count), tl.load(low_sum), tl.load(tau0), tl.load(tau1))
    n, s0, s1, s2 = cut.first_unpaid(
        histogram, zero, zero, tl.load(members), s0, s1, s2, tl.load(tau0), tl.load(tau1), tl.load(exponent), BINS, SHIFT
    )
    tl.store(out, n)
    tl.store(out + 1, s0)
    tl.store(out + 2, s1)
    tl.store(out + 3, s2)


def slack() -> None:
    """The rule of csrc/core/cut.h against rational numbers, also where sums need more than 64 bits."""
    g = torch.Generator().manual_seed(0)
    for trial in range(60):
        tau = float(torch.rand((), generator=g, dtype=torch.float64)) * 10.0 ** int(torch.randint(-12, 12, (), generator=g))
        unit = Unit.of(tau, torch.float32)
        low_count = int(torch.randint(0, 1 << 31, (), generator=g))
        low_mean = Fraction(tau) * int(torch.randint(0, 1000, (), generator=g)) / 1000
        unit_low = Fraction(2) ** (unit.exponent + 22)
        low_sum = int(low_mean / unit_low) * low_count
        left = Fraction(tau) * low_count - low_sum * unit_low
        lowest = (int(torch.tensor(unit.candidate_above).view(torch.int32)) >> 20) + 1
        histogram, total = torch.zeros(4096, dtype=torch.int64), 0
        want, paying = 2048, True
        for b in sorted(set(torch.randint(lowest, min(lowest + 200, 2047), (12,), generator=g).tolist())):
            count = int(torch.randint(1, 1 << (1 + trial % 28), (), generator=g))
            field, low_bits = b >> 3, (b & 7) << 20
            mean_mantissa = (1 << 23 if field else 0) + low_bits + int(torch.randint(0, 1 << 20, (), generator=g))
            histogram[b], histogram[2048 + b] = count, count * mean_mantissa
            total += count
            cost = Fraction(count * mean_mantissa) * Fraction(2) ** (max(field, 1) - 150) - count * Fraction(tau)
            if paying and (field == 255 or cost > left):
                want, paying = b, False
            elif paying:
                left -= cost
        words = [low_count, low_sum, unit.mantissa & ((1 << 28) - 1), unit.mantissa >> 28, unit.exponent, total]
        out = torch.zeros(4, dtype=torch.int64)
        _slack_kernel[(1,)](histogram, out, *(torch.tensor([w]) for w in words), 2048, 20)
        got, s0, s1, s2 = out.tolist()
        assert got == want, (trial, got, want)
        assert Fraction(s0 + (s1 << 28) + (s2 << 56)) * Fraction(2) ** unit.exponent == left


def bytes_per_token() -> None:
    """What is read and written in the interpreter, against the least there is: 2^18 tokens, 0.5 % of T candidates at most."""
    moved = Counter()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self, ptrs, mask, *rest):
        moved["bytes"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        moved["bytes"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
    n = 1 << 18
    tuning.INTERPRETER = dataclasses.replace(tuning.INTERPRETER, block=1024, backward_block=2048)  # as shipped for GPUs
    g = torch.Generator().manual_seed(0)
    d = torch.randn(n, generator=g) * 0.05
    d[torch.randperm(n, generator=g)[: n // 500]] *= 20
    batch, _ = check_batch(d, torch.zeros(n), torch.ones(n), torch.ones(n, dtype=torch.bool))
    for tau in (0.04, 0.002):  # nothing is dropped; something is
        tokens_above = int(((d > 0) & (d * d > tau)).sum())
        if tau == 0.002:
            batch = batch._replace(advantages=torch.where(d.abs() > 0.3, 1.0, torch.where(d * d > tau, 0.0, 1.0)))
            tokens_above = int(((d > 0) & (d * d > tau) & (batch.advantages > 0)).sum())
        assert tokens_above <= 0.005 * n
        moved.clear()
        _, scales, at, counts, _ = backend.policy_loss(batch, Rule(m2_threshold=tau))
        assert (int(counts[3]) > 0) == (tau == 0.002)
        allowed = 1.02 * 13 * n + 24 * tokens_above
        print("forward", moved["bytes"] / n, "B a token; allowed", allowed / n)
        assert moved["bytes"] <= allowed
        moved.clear()
        backend.policy_loss_backward(torch.ones(()), scales, at, batch, Rule(m2_threshold=tau), torch.empty(n))
        print("backward", moved["bytes"] / n)
        assert moved["bytes"] <= 1.02 * 17 * n


class _Ops(TorchDispatchMode):
    """The names of the torch operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def launches() -> None:
    """One kernel and one memset forward, one kernel backward; nothing else but allocations and the rule's constants."""
    ran = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: ran.append((self.name, grid))

    forward.forward_kernel, policy.backward_kernel = Recorded("forward"), Recorded("backward")
    batch, _ = check_batch(*random_tokens((30, 50)))
    for rule in (Rule(), Rule(per_token=True), Rule(rule="clip")):
        ran.clear()
        with _Ops() as ops:
            loss, scales, at, _, _ = backend.policy_loss(batch, rule)
            backend.policy_loss_backward(loss, scales, at, batch, rule, torch.empty(30, 50))
        assert ran == [("forward", (1,)), ("backward", (-(-1500 // 256),))]
        # The constants are CPU tensors of a few numbers, on any device.
        constants = {"_to_copy", "lift_fresh", "detach", "nextafter", "new_zeros", "_local_scalar_dense", "zeros"}
        assert ops.names["zeros"] <= 2, ops.names
        assert set(ops.names) <= {"empty", "slice", "view", "detach_"} | constants, ops.names


def fp64_is_declined() -> None:
    tokens = random_tokens((3, 9), dtype=torch.float64)
    with pytest.raises(BackendUnavailable, match="log_probs is float64"):
        select(*tokens, backend="triton")
    low = Tokens(tokens.log_probs.float(), *list(tokens)[1:])
    assert torch.equal(select(*low, backend="triton").keep, select(*low, backend="eager").keep)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
