"""select(): results that do not depend on strides, dtypes of the mask, threads, repeats or fresh memory."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import DTYPES, Tokens, assert_mask, decision, random_tokens, same_bits

from m2po_kernels import Selection, m2po_loss, select
from m2po_kernels.reference import select_literal, select_sorted

MASK_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float64,
)


def check(tokens: Tokens, backend: str, tau: float = 0.04, scope: str = "quadrants") -> Selection:
    sel = select(*tokens, m2_threshold=tau, scope=scope, backend=backend)
    v, region, valid = decision(tokens, scope)
    assert sel.keep.dtype == torch.bool
    assert sel.keep.shape == tokens.log_probs.shape
    assert not sel.keep.requires_grad
    assert_mask(sel.keep, select_literal(v, region, valid, tau), v, region, tau)
    return sel


@pytest.mark.parametrize("scope", ["quadrants", "all"])
@pytest.mark.parametrize("tau", [0.0, 1e-30, 0.003, 0.04, 0.5, 1e30, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_is_that_of_algorithm_1(dtype, tau, scope, device, backend):
    for seed in range(4):
        check(random_tokens((5, 37), seed=seed, dtype=dtype, device=device), backend, tau, scope)


def test_scope_all_drops_outside_the_quadrants(device, backend):
    tokens = Tokens(torch.tensor([-1.0, 0.1]), torch.zeros(2), torch.tensor([1.0, 0.0]), torch.ones(2)).to(device)
    assert select(*tokens, backend=backend).keep.tolist() == [True, True]
    assert select(*tokens, scope="all", backend=backend).keep.tolist() == [False, True]


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_mask_of_every_dtype_and_any_stride(dtype, device, backend):
    tokens = random_tokens((6, 40), device=device)
    want = check(tokens, backend)
    wide = torch.zeros(6, 80, dtype=dtype, device=device)
    wide[:, 1::2] = tokens.mask.to(dtype)
    for mask in (tokens.mask.to(dtype), wide[:, 1::2], tokens.mask.to(dtype).t().contiguous().t()):
        got = select(*list(tokens)[:3], mask, backend=backend)
        assert torch.equal(got.keep, want.keep)
        assert same_bits(got.metrics.floats, want.metrics.floats)
    negative = tokens.mask.to(dtype) * (1 if dtype in (torch.bool, torch.uint8) else -3)
    assert torch.equal(select(*list(tokens)[:3], negative, backend=backend).keep, want.keep)  # nonzero is valid


def views(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in memory laid out otherwise."""
    rows, columns = t.shape
    every_third = t.new_zeros(rows, columns * 3)
    every_third[:, ::3] = t
    framed = t.new_zeros(rows + 2, columns + 3)
    framed[1:-1, 1:-2] = t
    return {"every third": every_third[:, ::3], "transposed": t.t().contiguous().t(), "framed": framed[1:-1, 1:-2]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["every third", "transposed", "framed"])
def test_any_stride_gives_the_same_bits(layout, dtype, device, backend):
    tokens = random_tokens((7, 33), dtype=dtype, device=device)
    want = check(tokens, backend)
    for which in range(4):
        parts = list(tokens)
        parts[which] = views(parts[which])[layout]
        assert torch.equal(select(*parts, backend=backend).keep, want.keep), which
    got = select(*tokens.map(lambda t: views(t)[layout]), backend=backend)
    assert torch.equal(got.keep, want.keep)
    assert same_bits(got.metrics.floats, want.metrics.floats)
    assert torch.equal(got.metrics.counts, want.metrics.counts)
    # The order of equals is that of the positions, not of the memory.
    assert got.keep.shape == tokens.log_probs.shape


def test_equals_go_in_the_order_of_positions_whatever_the_strides(device, backend):
    d = torch.full((3, 4), 0.3, device=device)
    d[0] = 0.01
    tokens = Tokens(d.t().contiguous().t(), torch.zeros_like(d), torch.ones(3, device=device), torch.ones_like(d))
    keep = check(tokens, backend).keep
    n = int((~keep).sum())
    assert 0 < n < 8
    assert (~keep).flatten().nonzero().flatten().tolist() == list(range(4, 4 + n))


def test_expanded_inputs(device, backend):
    """Stride 0 in rows and in columns."""
    column = torch.tensor([[0.1], [0.3], [-0.2], [0.7]], device=device)
    row = torch.linspace(-0.4, 0.4, 9, device=device)
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
    for lp, blp in [(column.expand(4, 9), row.expand(4, 9)), (row.expand(4, 9), column.expand(4, 9)), (column.expand(4, 9),) * 2]:
        tokens = Tokens(lp, blp, adv, torch.ones(1, 1, device=device).expand(4, 9))
        got = check(tokens, backend)
        assert torch.equal(
            got.keep, select(*tokens.map(lambda t: t.clone(memory_format=torch.contiguous_format)), backend=backend).keep
        )


def test_advantages_of_every_shape_agree(device, backend):
    tokens = random_tokens((6, 20), device=device)
    adv = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0, 0.25], device=device)
    shapes = [adv, adv[:, None], adv[:, None].expand(6, 20), adv[:, None].expand(6, 20).contiguous()]
    keeps = [check(Tokens(tokens.log_probs, tokens.behavior_log_probs, a, tokens.mask), backend).keep for a in shapes]
    assert all(torch.equal(k, keeps[0]) for k in keeps)


@pytest.mark.parametrize("lp_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_mixed_dtypes(lp_dtype, other, device, backend):
    tokens = random_tokens((4, 30), device=device)
    check(
        Tokens(tokens.log_probs.to(lp_dtype), tokens.behavior_log_probs.to(other), tokens.advantages.to(other), tokens.mask),
        backend,
    )
    check(Tokens(tokens.log_probs.to(lp_dtype), tokens.behavior_log_probs.to(other), tokens.advantages, tokens.mask), backend)


def test_infinite_v_is_the_largest_candidate(device, backend):
    d = torch.tensor([0.1, 1e20, 0.1, math.inf, 0.5, 1e20], device=device)
    tokens = Tokens(d, torch.zeros_like(d), torch.ones_like(d), torch.ones_like(d))
    assert check(tokens, backend).keep.tolist() == [True, False, True, False, False, False]
    assert check(tokens, backend, tau=math.inf).keep.all()
    sel = check(tokens, backend, tau=0.1)
    assert sel.keep.tolist() == [True, False, True, False, True, False]
    assert float(sel.metrics.m2_cut) == math.inf
    assert int(sel.metrics.dropped_tokens) == 3
    assert float(sel.metrics.m2_before) == math.inf
    assert float(sel.metrics.m2_after) < 0.1
    all_infinite = tokens.map(lambda t: t[[1, 3, 5]])
    assert not check(all_infinite, backend).keep.any()
    assert check(all_infinite, backend, tau=math.inf).keep.all()


def test_nan_is_in_no_region(device, backend):
    d = torch.tensor([math.nan, 0.1, 1.0], device=device)
    tokens = Tokens(d, torch.zeros_like(d), torch.ones_like(d), torch.ones_like(d))
    for scope in ("quadrants", "all"):
        sel = check(tokens, backend, scope=scope)
        assert sel.keep.tolist() == [True, True, False]
        assert int(sel.metrics.trust_region_tokens) == 2
        assert int(sel.metrics.nonfinite_tokens) == 1


@pytest.mark.parametrize("exponent", [-140, -100, 100, 200])
def test_thresholds_and_ratios_far_from_one(exponent, device, backend):
    """The sums are integers in a unit that follows tau: nothing overflows or is lost at either end. fp64 goes further."""
    for dtype, limit in ((torch.float32, 60), (torch.float64, 200)):
        scale = 2.0 ** max(-limit, min(limit, exponent))
        d = torch.tensor([1.0, 1.5, 2.0, 3.0, 0.5, 1.0, 4.0, 1.0], dtype=dtype) * scale
        tokens = Tokens(d, torch.zeros_like(d), torch.ones_like(d), torch.ones_like(d)).to(device)
        for tau in (2.0, 1.0, 0.3, 10.0):
            check(tokens, backend, tau=tau * scale * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tau", [5e-324, 1e-300, 1e-70, 1e70, 1e300, 1.7e308])
def test_thresholds_at_the_ends_of_the_double_range(tau, dtype, device, backend):
    root = math.sqrt(tau)
    d = torch.tensor([root, root / 2, root / 4, 2 * root, 1.25 * root, 0.0], dtype=torch.float64)
    d = torch.where(d.to(dtype).isfinite(), d, 1e19).to(dtype)
    check(Tokens(d, torch.zeros_like(d), torch.ones_like(d), torch.ones_like(d)).to(device), backend, tau=tau)


def test_packed_is_the_same_as_padded(device, backend):
    tokens = random_tokens((5, 24), device=device)
    packed = tokens.map(lambda t: t.reshape(-1))
    assert torch.equal(check(packed, backend).keep, check(tokens, backend).keep.reshape(-1))
    cu_seqlens = torch.tensor([0, 7, 7, 31, 120], dtype=torch.int32, device=device)
    per_sequence = torch.tensor([1.0, 5.0, -1.0, 0.5], device=device)
    per_token = per_sequence[torch.repeat_interleave(torch.arange(4, device=device), cu_seqlens.diff().long())]
    lp, blp, _, mask = packed
    got = select(lp, blp, per_sequence, mask, cu_seqlens=cu_seqlens, backend=backend)
    assert torch.equal(got.keep, check(Tokens(lp, blp, per_token, mask), backend).keep)


@pytest.mark.parametrize("spread", [0.1, 0.4, 2.0])
def test_threads_and_repeats_give_the_same_bits(spread, threads, device, backend):
    """Enough tokens for several blocks and threads; a third of them equal to others."""
    tokens = random_tokens((30, 7001), spread=spread, device=device)
    v, region, valid = decision(tokens)
    results = []
    for n in (1, 2, 1, 2):
        threads(n)
        results.append(select(*tokens, backend=backend))
    assert_mask(results[0].keep, select_sorted(v, region, valid, 0.04), v[:0], region[:0], 0.04)
    for r in results[1:]:
        assert torch.equal(r.keep, results[0].keep)
        assert torch.equal(r.metrics.counts, results[0].metrics.counts)
        assert same_bits(r.metrics.floats, results[0].metrics.floats)


def test_select_and_loss_report_the_same_metrics(device, backend):
    tokens = random_tokens((9, 50), device=device)
    sel, out = select(*tokens, backend=backend), m2po_loss(*tokens, backend=backend)
    assert torch.equal(sel.metrics.counts, out.metrics.counts)
    assert same_bits(sel.metrics.floats, out.metrics.floats)


def test_select_never_tracks_gradients(device, backend):
    tokens = random_tokens((3, 8), device=device)
    leaf = tokens.log_probs.requires_grad_()
    sel = select(leaf, *list(tokens)[1:], backend=backend)
    assert not sel.keep.requires_grad
    assert not sel.metrics.floats.requires_grad
    assert (sel.m2_threshold, sel.scope) == (0.04, "quadrants")
