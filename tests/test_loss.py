"""m2po_loss and grpo_loss: every option against the fp64 oracle, and what must be exactly zero or the same bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import DTYPES, Tokens, assert_matches_oracle, assert_same, oracle_of, random_tokens, run

from m2po_kernels import grpo_loss, m2po_loss, select
from m2po_kernels.errors import NonFiniteError

BOTH = pytest.mark.parametrize("loss_fn", [m2po_loss, grpo_loss], ids=["m2po", "grpo"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
REDUCTIONS = ("token-mean", "sequence-mean", "sum", "none")


def reference_model(tokens: Tokens, dtype: torch.dtype | None = None) -> torch.Tensor:
    g = torch.Generator().manual_seed(11)
    noise = torch.randn(tokens.log_probs.shape, generator=g) * 0.3
    return (tokens.log_probs.cpu().float() + noise).to(tokens.log_probs.device, dtype or tokens.log_probs.dtype)


@BOTH
@EVERY_DTYPE
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_with_and_without_kl(loss_fn, dtype, kl_coef, reduction, device, backend):
    tokens = random_tokens((9, 41), dtype=dtype, device=device)
    tokens.mask[3] = False
    options = {"reduction": reduction, "kl_coef": kl_coef}
    if kl_coef:
        options["ref_log_probs"] = reference_model(tokens)
    assert_matches_oracle(run(loss_fn, tokens, **options, backend=backend), loss_fn, tokens, **options)


@BOTH
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize(
    "denominator", [0, 0.0, 1, 37, 1000.5, torch.tensor(37), torch.tensor([12.5]), torch.tensor(0)], ids=repr
)
def test_given_denominator(loss_fn, reduction, denominator, device, backend):
    tokens = random_tokens(device=device)
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(device)
    options = {"reduction": reduction, "denominator": denominator, "kl_coef": 0.2, "ref_log_probs": reference_model(tokens)}
    result = run(loss_fn, tokens, **options, backend=backend)
    assert_matches_oracle(result, loss_fn, tokens, **options)
    if float(denominator) == 0:
        assert float(result.loss) == 0
        assert not result.grad.any()


@BOTH
def test_denominator_zero_is_zero_where_exp_overflows(loss_fn, device, backend):
    tokens = Tokens(*(torch.tensor([x, 0.1], device=device) for x in (100.0, 0.0, -1.0, 1.0)))
    result = run(loss_fn, tokens, denominator=0, backend=backend)
    assert float(result.loss) == 0
    assert result.grad.tolist() == [0.0, 0.0]


@EVERY_DTYPE
@pytest.mark.parametrize("scope", ["quadrants", "all"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_kept_denominator_divides_the_policy_term_alone(dtype, scope, kl_coef, device, backend):
    tokens = random_tokens(dtype=dtype, device=device)
    options = {"denominator": "kept", "scope": scope, "kl_coef": kl_coef}
    if kl_coef:
        options["ref_log_probs"] = reference_model(tokens)
    assert_matches_oracle(run(m2po_loss, tokens, **options, backend=backend), m2po_loss, tokens, **options)


def test_kept_denominator_of_a_batch_that_keeps_nothing(device, backend):
    tokens = Tokens(*(torch.tensor(x, device=device) for x in ([1.0, 2.0], [0.0, 0.0], [1.0, 1.0], [1, 1])))
    assert run(m2po_loss, tokens, denominator="kept", backend=backend).loss == 0
    ref = torch.tensor([0.5, 2.5], device=device)
    options = {"denominator": "kept", "kl_coef": 1.0, "ref_log_probs": ref}
    result = run(m2po_loss, tokens, **options, backend=backend)
    q = (ref - tokens.log_probs).double().cpu()
    assert float(result.loss) == pytest.approx(float((torch.expm1(q) - q).mean()), rel=1e-6)
    assert_matches_oracle(result, m2po_loss, tokens, **options)


def test_denominator_is_counted_before_dropping(device, backend):
    tokens = Tokens(*(torch.tensor(x, device=device) for x in ([0.1, 2.0], [0.0, 0.0], [1.0, 1.0], [1, 1])))
    assert float(run(m2po_loss, tokens, backend=backend).loss) == pytest.approx(-math.exp(0.1) / 2)
    assert float(run(m2po_loss, tokens, denominator="kept", backend=backend).loss) == pytest.approx(-math.exp(0.1))


@pytest.mark.parametrize("tau", [0.0, 0.003, 0.3, math.inf])
@pytest.mark.parametrize("scope", ["quadrants", "all"])
def test_thresholds_and_scopes(tau, scope, device, backend):
    tokens = random_tokens(device=device)
    options = {"m2_threshold": tau, "scope": scope}
    assert_matches_oracle(run(m2po_loss, tokens, **options, backend=backend), m2po_loss, tokens, **options)


@BOTH
@EVERY_DTYPE
@pytest.mark.parametrize("cap", [1.05, 1.3, 3.0, 1e30])
def test_ratio_cap(loss_fn, dtype, cap, device, backend):
    tokens = random_tokens(dtype=dtype, device=device)
    options = {"ratio_cap": cap, "reduction": "sequence-mean"}
    result = run(loss_fn, tokens, **options, backend=backend)
    assert_matches_oracle(result, loss_fn, tokens, **options)
    per_token = run(loss_fn, tokens, ratio_cap=cap, reduction="none", backend=backend)
    assert_matches_oracle(per_token, loss_fn, tokens, ratio_cap=cap, reduction="none")


def test_ratio_cap_is_decided_on_d_against_the_rounded_log(device, backend):
    """At log c itself the token is not capped; one float further it is, and has no gradient but the cap's loss."""
    at = torch.tensor(3.0, dtype=torch.float64).log().float()
    d = torch.stack([at, torch.nextafter(at, torch.tensor(9.0)), torch.tensor(50.0), torch.tensor(100.0)]).to(device)
    tokens = Tokens(d, torch.zeros_like(d), -torch.ones_like(d), torch.ones_like(d))
    result = run(m2po_loss, tokens, ratio_cap=3.0, reduction="none", backend=backend)
    assert result.grad.tolist() == [pytest.approx(3.0, rel=1e-6), 0.0, 0.0, 0.0]
    assert result.loss.tolist() == [pytest.approx(3.0, rel=1e-6), 3.0, 3.0, 3.0]
    above = Tokens(d, torch.zeros_like(d), torch.ones_like(d), torch.ones_like(d))
    uncapped = run(m2po_loss, above, ratio_cap=3.0, m2_threshold=math.inf, reduction="none", backend=backend)
    assert float(uncapped.loss[2]) == pytest.approx(-math.exp(50.0), rel=1e-6)


@EVERY_DTYPE
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 5.0), (0.5, math.inf)], ids=str)
def test_grpo_clip_bounds(dtype, clip, device, backend):
    tokens = random_tokens(dtype=dtype, device=device)
    options = {"clip_low": clip[0], "clip_high": clip[1]}
    for reduction in ("token-mean", "none"):
        result = run(grpo_loss, tokens, **options, reduction=reduction, backend=backend)
        assert_matches_oracle(result, grpo_loss, tokens, **options, reduction=reduction)
    assert result.metrics["dropped_tokens"] == 0
    assert result.metrics["m2_after"] == result.metrics["m2_before"]


def test_grpo_fp64_clips_to_the_double_bound(device, backend):
    d = torch.tensor([1.0, -1.0], dtype=torch.float64, device=device)
    tokens = Tokens(d, torch.zeros_like(d), torch.tensor([1.0, -1.0], device=device), torch.ones_like(d))
    result = run(grpo_loss, tokens, clip_low=0.3, clip_high=0.1, reduction="none", backend=backend)
    assert result.loss.tolist() == [-(1 + 0.1), 1 - 0.3]


@BOTH
@pytest.mark.parametrize("grad_output", [1.0, -3.0, 0.0, 1e-3])
def test_grad_output_scales_the_gradient(loss_fn, grad_output, device, backend):
    tokens = random_tokens(device=device)
    options = {"kl_coef": 0.1, "ref_log_probs": reference_model(tokens)}
    result = run(loss_fn, tokens, torch.tensor(grad_output, device=device), **options, backend=backend)
    assert_matches_oracle(result, loss_fn, tokens, grad_output, **options)


@BOTH
def test_grad_output_per_token(loss_fn, device, backend):
    tokens = random_tokens((6, 20), device=device)
    given = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))
    ones = oracle_of(loss_fn, tokens, reduction="none").grad
    for grad_output in (given, given.t().contiguous().t(), given[:, :1].expand(6, 20)):
        grad = run(loss_fn, tokens, grad_output.to(device), reduction="none", backend=backend).grad
        want = ones * grad_output.double()
        assert bool(((grad.double() - want).abs() <= 1e-6 * want.abs()).all())


@BOTH
@pytest.mark.parametrize("which", ["log_probs", "behavior_log_probs", "advantages", "ref_log_probs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_drop_is_a_mask_of_zero(loss_fn, which, value, device, backend):
    tokens = random_tokens((5, 30), device=device)
    ref = reference_model(tokens)
    at = tokens.mask.nonzero()[[3, 17, 60]]
    spoiled = {f.name: getattr(tokens, f.name).clone() for f in dataclasses.fields(tokens)} | {"ref_log_probs": ref.clone()}
    spoiled[which][at[:, 0], at[:, 1]] = value
    spoiled_ref = spoiled.pop("ref_log_probs")
    mask = tokens.mask.clone()
    mask[at[:, 0], at[:, 1]] = False
    for reduction in REDUCTIONS:
        options = {"kl_coef": 0.1, "reduction": reduction, "backend": backend}
        got = run(loss_fn, Tokens(**spoiled), ref_log_probs=spoiled_ref, nonfinite="drop", **options)
        want = run(loss_fn, dataclasses.replace(tokens, mask=mask), ref_log_probs=ref, **options)
        assert got.metrics["nonfinite_tokens"] == 3
        assert got.metrics == want.metrics | {"nonfinite_tokens": 3}
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.grad, want.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_drop_in_select(value, device, backend):
    tokens = random_tokens((5, 30), device=device)
    at = tuple(tokens.mask.nonzero()[7].tolist())
    mask = tokens.mask.clone()
    mask[at] = False
    want = select(*list(tokens)[:3], mask, backend=backend)
    tokens.log_probs[at] = value
    got = select(*tokens, nonfinite="drop", backend=backend)
    assert torch.equal(got.keep, want.keep)
    assert int(got.metrics.valid_tokens) == int(want.metrics.valid_tokens)
    assert int(got.metrics.nonfinite_tokens) == 1


@BOTH
@pytest.mark.parametrize("which", ["log_probs", "behavior_log_probs", "advantages", "ref_log_probs"])
def test_nonfinite_propagate_makes_the_loss_nan(loss_fn, which, device, backend):
    tokens = random_tokens((5, 30), device=device)
    ref = reference_model(tokens)
    at = tuple(((tokens.advantages != 0) & tokens.mask).nonzero()[5].tolist())
    (ref if which == "ref_log_probs" else getattr(tokens, which))[at] = math.nan
    result = run(loss_fn, tokens, kl_coef=0.1, ref_log_probs=ref, backend=backend)
    assert math.isnan(float(result.loss))
    assert math.isnan(float(result.grad[at]))
    assert result.metrics["nonfinite_tokens"] == 1
    assert result.grad.isnan().sum() == 1


def test_nan_d_does_not_reach_the_loss_where_the_advantage_is_zero(device, backend):
    tokens = Tokens(*(torch.tensor(x, device=device) for x in ([math.nan, 0.1], [0.0, 0.0], [0.0, 1.0], [1, 1])))
    result = run(m2po_loss, tokens, backend=backend)
    assert float(result.loss) == pytest.approx(-math.exp(0.1) / 2)
    assert float(result.grad[0]) == 0
    assert result.metrics["nonfinite_tokens"] == 1


@BOTH
@pytest.mark.parametrize("which", ["log_probs", "behavior_log_probs", "advantages", "ref_log_probs"])
def test_nonfinite_error_names_count_and_first_index(loss_fn, which, device, backend):
    tokens = random_tokens((5, 30), device=device)
    ref = reference_model(tokens)
    first, second = tokens.mask.nonzero()[[9, 40]].tolist()
    spoiled = ref if which == "ref_log_probs" else getattr(tokens, which)
    for at, value in ((first, math.inf), (second, math.nan)):
        spoiled[tuple(at)] = value
    with pytest.raises(NonFiniteError) as caught:
        loss_fn(*tokens, kl_coef=0.1, ref_log_probs=ref, nonfinite="error", backend=backend)
    message = str(caught.value)
    assert f"2 of {int(tokens.mask.sum())} valid tokens" in message
    assert f"flat index {first[0] * 30 + first[1]};" in message
    if which != "ref_log_probs":
        with pytest.raises(NonFiniteError, match="2 of "):
            select(*tokens, nonfinite="error", backend=backend)


@BOTH
def test_nonfinite_error_passes_clean_batches_and_padding(loss_fn, device, backend):
    tokens = random_tokens((5, 30), device=device)
    want = run(loss_fn, tokens, backend=backend)
    tokens.log_probs[~tokens.mask] = math.nan
    assert_same(run(loss_fn, tokens, nonfinite="error", backend=backend), want)


@BOTH
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sum"])
def test_empty_batch(loss_fn, shape, reduction, device, backend):
    none = torch.empty(shape, device=device)
    options = {"cu_seqlens": torch.zeros(1, dtype=torch.int32, device=device)} if len(shape) == 1 else {}
    result = run(loss_fn, Tokens(none, none, none, none), reduction=reduction, backend=backend, **options)
    assert float(result.loss) == 0
    assert result.metrics["valid_tokens"] == 0
    assert result.metrics["m2_cut"] == math.inf
    per_token = run(loss_fn, Tokens(none, none, none, none), reduction="none", backend=backend)
    assert per_token.loss.shape == shape
    assert select(none, none, none, none, backend=backend).keep.shape == shape


@BOTH
@EVERY_DTYPE
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_masked_is_exactly_zero_and_attached(loss_fn, dtype, reduction, device, backend):
    """The padding holds NaN: none of it may show."""
    nan = torch.full((3, 4), math.nan, dtype=dtype, device=device)
    tokens = Tokens(nan, nan, nan, torch.zeros_like(nan))
    result = run(loss_fn, tokens, reduction=reduction, kl_coef=0.1, ref_log_probs=nan, backend=backend)
    assert not result.loss.any()
    assert not result.grad.any()
    assert result.metrics | {"m2_cut": 0} == dict.fromkeys(result.metrics, 0)


@BOTH
@pytest.mark.parametrize("d", [0.1, -0.1, 1.0, -1.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_one_token(loss_fn, d, advantage, device, backend):
    for shape in ((1,), (1, 1)):
        tokens = Tokens(*(torch.full(shape, x, device=device) for x in (d - 2, -2.0, advantage, 1.0)))
        assert_matches_oracle(run(loss_fn, tokens, backend=backend), loss_fn, tokens)


def test_overflow_of_a_dropped_token_does_not_reach_the_loss(device, backend):
    """exp(100) is inf in fp32. The token is dropped, so each reduction must give what it gives without it."""
    tokens = Tokens(*(torch.tensor(x, device=device) for x in ([100.0, 0.1], [0.0, 0.0], [1.0, 1.0], [1, 1])))
    for reduction in ("token-mean", "sum"):
        result = run(m2po_loss, tokens, reduction=reduction, backend=backend)
        assert float(result.loss) == pytest.approx(-math.exp(0.1) / (2 if reduction == "token-mean" else 1))
        assert float(result.grad[0]) == 0
    per_token = run(m2po_loss, tokens, reduction="none", backend=backend)
    assert per_token.loss.tolist() == [0.0, pytest.approx(-math.exp(0.1))]
    assert float(per_token.grad[0]) == 0


def test_a_nan_denominator_is_not_taken_for_nothing(device, backend):
    lp = torch.tensor([0.1, -0.2], device=device, requires_grad=True)
    zeros, ones = torch.zeros(2, device=device), torch.ones(2, device=device)
    out = m2po_loss(lp, zeros, ones, ones, denominator=torch.tensor(math.nan, device=device), backend=backend)
    out.loss.backward()
    assert bool(out.loss.isnan())
    assert lp.grad is not None
    assert bool(lp.grad.isnan().all())
