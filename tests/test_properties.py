"""Properties over small batches that hold many equals, sums that hit the threshold exactly, and thresholds at both ends."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
import torch
from helpers import Tokens, assert_mask, assert_matches_oracle, assert_same, decision, random_tokens, run, same_bits
from hypothesis import assume, given
from hypothesis import strategies as st

from m2po_kernels import dispatch, grpo_loss, m2po_loss, select
from m2po_kernels.reference import select_literal

# Few values, so that equals are common; the first group has squares that fp32 holds exactly.
DYADIC = (0.0, 0.125, 0.1875, 0.25, 0.5, 1.0, 2.0)
OTHER = (0.1, 0.19, 0.2, 0.21, 0.6, 1e-7, 1e-3, 30.0)
EXTREME = (1e-22, 3e-20, 1e15, 1e20, math.inf)
BATCH_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
GARBAGE = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-40, 50.0)


def signed(values: tuple[float, ...]) -> st.SearchStrategy[float]:
    return st.builds(math.copysign, st.sampled_from(values), st.sampled_from([1.0, -1.0, 1.0]))


@st.composite
def batches(draw: st.DrawFn, values: tuple[float, ...] = DYADIC + OTHER, max_size: int = 24) -> Tokens:
    """d against behaviour log-probs of 0, so that d has exactly the chosen value."""
    pool = draw(st.sampled_from([values, values[:3], values[:2] + values[-1:]]))
    token = st.tuples(signed(pool), st.sampled_from([1.0, -1.0, 0.0, 0.5, 1.0]), st.sampled_from([1, 1, 1, 0]))
    rows = draw(st.lists(token, min_size=1, max_size=max_size))
    dtype = draw(st.sampled_from(BATCH_DTYPES))
    d, adv, mask = zip(*rows, strict=True)
    return Tokens(
        torch.tensor(d, dtype=torch.float64).to(dtype),
        torch.zeros(len(d), dtype=dtype),
        torch.tensor(adv, dtype=dtype),
        torch.tensor(mask, dtype=torch.uint8),
    )


@st.composite
def batches_with_threshold(
    draw: st.DrawFn, values: tuple[float, ...] = DYADIC + OTHER, max_size: int = 24
) -> tuple[Tokens, float]:
    """With a threshold that is often the exact mean of one of the runs that the loop can end with."""
    tokens = draw(batches(values, max_size))
    v, region, _ = decision(tokens)
    squares = sorted(Fraction(x) for x in v[region].double().tolist() if math.isfinite(x))
    means = [float(total / n) for n, total in enumerate(itertools.accumulate(squares), 1)]
    fixed = st.sampled_from([0.04, 0.0, math.inf, 1e-30, 1e30, 0.01, 0.0625, 1.0])
    return tokens, draw(st.one_of(fixed, st.sampled_from(means)) if means else fixed)


def serves(tokens: Tokens, backend: str) -> bool:
    """Whether the backend takes fp64 log-probs, where these are. One declined batch would skip a property as a whole."""
    return tokens.log_probs.dtype != torch.float64 or backend not in ("triton", "cuda")


def check_mask(tokens: Tokens, tau: float, device: str, backend: str, scope: str) -> None:
    assume(serves(tokens, backend))
    v, region, valid = decision(tokens, scope)
    keep = select(*tokens.to(device), m2_threshold=tau, scope=scope, backend=backend).keep
    assert_mask(keep, select_literal(v, region, valid, tau), v, region, tau)


@given(case=batches_with_threshold(), scope=st.sampled_from(["quadrants", "all"]))
def test_mask_is_that_of_the_literal_loop(case, scope, device, backend):
    check_mask(*case, device, backend, scope)


@given(case=batches_with_threshold(DYADIC))
def test_mask_where_every_sum_is_exact(case, device, backend):
    """Squares of dyadic numbers and their means: equality with the threshold is exact, and keeps."""
    check_mask(*case, device, backend, "quadrants")


@given(case=batches_with_threshold(EXTREME + DYADIC))
def test_mask_with_infinite_huge_and_tiny_squares(case, device, backend):
    check_mask(*case, device, backend, "quadrants")


@given(case=batches_with_threshold(), data=st.data())
def test_permutation_changes_only_which_of_equals_goes(case, data, device, backend):
    tokens, tau = case
    assume(serves(tokens, backend))
    order = torch.tensor(data.draw(st.permutations(range(tokens.log_probs.numel()))))
    v, region, valid = decision(tokens)
    one = select(*tokens.to(device), m2_threshold=tau, backend=backend)
    two = select(*tokens.map(lambda t: t[order]).to(device), m2_threshold=tau, backend=backend)
    assert torch.equal(one.metrics.counts[:5], two.metrics.counts[:5])
    gone_one = valid & ~one.keep.cpu()
    gone_two = valid[order] & ~two.keep.cpu()
    assert torch.equal(v[gone_one].sort().values, v[order][gone_two].sort().values)
    # Of those that are equal to the cut the earliest go, in either order; all larger ones are gone.
    if bool(gone_one.any()):
        cut = v[gone_one].min()
        assert bool(gone_one[region & (v > cut)].all())
        for gone, squares, inside in ((gone_one, v, region), (gone_two, v[order], region[order])):
            at_cut = gone[inside & (squares == cut)].int()
            assert bool((at_cut.diff() <= 0).all())


@given(tokens=batches(DYADIC + OTHER), data=st.data())
@pytest.mark.parametrize("loss_fn", [m2po_loss, grpo_loss], ids=["m2po", "grpo"])
@pytest.mark.parametrize("nonfinite", ["propagate", "drop"])
def test_padding_garbage_changes_not_one_bit(loss_fn, nonfinite, tokens, data, device, backend):
    assume(serves(tokens, backend))
    off = tokens.mask == 0
    garbage = st.lists(st.sampled_from(GARBAGE), min_size=off.numel(), max_size=off.numel())

    def spoil(t: torch.Tensor) -> torch.Tensor:
        return torch.where(off, torch.tensor(data.draw(garbage)).to(t.dtype), t).to(device)

    parts, ref = list(tokens), tokens.log_probs * 0.5
    options = {"kl_coef": data.draw(st.sampled_from([0.0, 0.1])), "nonfinite": nonfinite, "backend": backend}
    options["reduction"] = data.draw(st.sampled_from(["token-mean", "sum", "none"]))
    spoiled = Tokens(spoil(parts[0]), spoil(parts[1]), spoil(parts[2]), parts[3].to(device))
    clean = run(loss_fn, tokens.to(device), ref_log_probs=ref.to(device), **options)
    assert_same(run(loss_fn, spoiled, ref_log_probs=spoil(ref), **options), clean)
    assert not clean.grad[off].any()
    assert torch.equal(select(*spoiled, backend=backend).keep, select(*tokens.to(device), backend=backend).keep)


def test_padding_garbage_in_a_batch_of_rows(device, backend):
    """The same on padded rows with per-sequence means, over several vectors' lengths."""
    tokens = random_tokens((7, 333), device=device)
    ref = tokens.behavior_log_probs.clone()
    options = {"reduction": "sequence-mean", "kl_coef": 0.1, "backend": backend}
    clean = run(m2po_loss, tokens, ref_log_probs=ref, **options)
    off = ~tokens.mask
    for value in GARBAGE:
        spoiled = Tokens(*(t.masked_fill(off, value) for t in list(tokens)[:3]), tokens.mask)
        assert_same(run(m2po_loss, spoiled, ref_log_probs=ref.masked_fill(off, value), **options), clean)


@given(case=batches_with_threshold(), n_more=st.integers(1, 8), data=st.data())
def test_tokens_without_advantage_change_no_mask_bit(case, n_more, data, device, backend):
    tokens, tau = case
    assume(serves(tokens, backend))
    n = tokens.log_probs.numel()
    more_d = torch.tensor(data.draw(st.lists(signed(DYADIC + OTHER), min_size=n_more, max_size=n_more)))
    place = torch.tensor(sorted(data.draw(st.permutations(range(n + n_more)))[:n]))

    def scatter(t: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(n + n_more, dtype=t.dtype)
        others = torch.ones(n + n_more, dtype=torch.bool).index_fill_(0, place, False)
        whole[place], whole[others] = t, rest.to(t.dtype)
        return whole

    rest = (more_d, torch.zeros(n_more), torch.zeros(n_more), torch.ones(n_more))
    larger = Tokens(*(scatter(t, r) for t, r in zip(tokens, rest, strict=True)))
    keep = select(*larger.to(device), m2_threshold=tau, backend=backend).keep.cpu()
    assert torch.equal(keep[place], select(*tokens.to(device), m2_threshold=tau, backend=backend).keep.cpu())
    options = {"m2_threshold": tau, "denominator": 10, "backend": backend}
    one, two = run(m2po_loss, tokens.to(device), **options), run(m2po_loss, larger.to(device), **options)
    assert torch.equal(two.grad[place], one.grad)
    rounding = 2.0**-22 if one.loss.dtype == torch.float32 else 2.0**-48
    size = float((one.grad.double().abs()).sum())
    assert abs(float(one.loss) - float(two.loss)) <= rounding * size


@given(case=batches_with_threshold(), kl_coef=st.sampled_from([0.0, 0.1]), cap=st.sampled_from([None, 1.2]))
def test_loss_gradient_and_metrics_are_the_oracles(case, kl_coef, cap, device, backend):
    tokens, tau = case
    assume(serves(tokens, backend))
    options = {"m2_threshold": tau, "kl_coef": kl_coef, "ratio_cap": cap, "ref_log_probs": tokens.log_probs * 0.75}
    on_device = {**options, "ref_log_probs": options["ref_log_probs"].to(device)}
    result = run(m2po_loss, tokens.to(device), **on_device, backend=backend)
    keep = select(*tokens.to(device), m2_threshold=tau, backend=backend).keep.cpu()
    # With M as selected: where the contract allows one token at the cut to differ, the mask's own test decides.
    v, region, valid = decision(tokens)
    assert_mask(keep, select_literal(v, region, valid, tau), v, region, tau)
    assert_matches_oracle(result, m2po_loss, tokens, **options, select=lambda *_: keep)


@given(case=batches_with_threshold(DYADIC + OTHER + (math.inf,)))
def test_backends_agree_on_every_bit_of_the_mask(case, device):
    tokens, tau = case
    on_device = tokens.to(device)
    serving = [b for b in dispatch.BACKENDS if dispatch.why_not(b, device) is None and serves(tokens, b)]
    first, *others = [select(*on_device, m2_threshold=tau, backend=b) for b in serving]
    for other in others:
        assert torch.equal(first.keep, other.keep)
        assert torch.equal(first.metrics.counts, other.metrics.counts)
        assert same_bits(first.metrics.m2_cut, other.metrics.m2_cut)


@given(tokens=batches(), where=st.integers(0, 24))
def test_split_selection_is_the_whole(tokens, where, device, backend):
    assume(serves(tokens, backend))
    sel = select(*tokens.to(device), backend=backend)
    whole = run(m2po_loss, tokens.to(device), selection=sel, backend=backend)
    grads = []
    for piece in (slice(None, where), slice(where, None)):
        part = tokens.map(lambda t, piece=piece: t[piece]).to(device)
        mine = dataclasses.replace(sel, keep=sel.keep[piece])
        grads.append(run(m2po_loss, part, selection=mine, backend=backend).grad)
    assert same_bits(torch.cat(grads), whole.grad)
