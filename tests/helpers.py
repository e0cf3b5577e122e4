"""What several test files share: batches, one call with its gradient, and the comparisons with their bounds."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from m2po_kernels import LossOutput, grpo_loss, m2po_loss
from m2po_kernels.reference import OracleResult, grpo_oracle, log_ratio, m2po_oracle, trust_region

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Relative error of one gradient term against fp64 arithmetic on the same d. fp32, in units of 2^-24: exp and expm1 are within
# 2 ulp = 4; grad_output / D, the weight and A (or kl_coef) are rounded once each = 3; three products = 3; the sum of the two
# terms = 1. Together 11 * 2^-24 = 6.6e-7, so 1e-6. The same count in fp64 is 11 * 2^-53 = 1.3e-15.
TERM_ERROR = {torch.float32: 1e-6, torch.float64: 2e-15}
SMALLEST_NORMAL = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
LOW_PRECISION = {torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}  # half an ulp: relative, smallest

EXACT_METRICS = (
    "masked_fraction",
    "trust_region_fraction",
    "m2_cut",
    "clip_fraction",
    "valid_tokens",
    "dropped_tokens",
    "nonfinite_tokens",
)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The four tensors of a call, in the order of the functions' arguments."""

    log_probs: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    def __iter__(self):
        return (getattr(self, f.name) for f in dataclasses.fields(self))

    def to(self, device: str | None = None, dtype: torch.dtype | None = None) -> Tokens:
        """On another device, or the floating-point tensors in another dtype."""
        return Tokens(*(t.to(device, dtype if t.is_floating_point() else None) for t in self))

    def map(self, fn) -> Tokens:
        """`fn` applied to each tensor."""
        return Tokens(*(fn(t) for t in self))


def random_tokens(
    shape: tuple[int, ...] = (16, 40), *, seed: int = 0, spread: float = 0.4, dtype=torch.float32, device="cpu"
) -> Tokens:
    """A batch with tokens of all kinds: a third without advantage, a fifth invalid, dropped and kept ones, equals among them."""
    g = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(shape, generator=g) * 4 - 0.05
    d = (torch.randn(shape, generator=g) * spread * 16).round() / 16 + torch.randn(shape, generator=g) * 0.01
    d = torch.where(torch.rand(shape, generator=g) < 0.3, (d * 8).round() / 8, d)
    advantages = torch.randn(shape, generator=g) * torch.randint(0, 3, shape, generator=g).clamp(max=1)
    mask = torch.rand(shape, generator=g) < 0.8
    return Tokens((behavior + d).to(dtype), behavior.to(dtype), advantages.to(dtype), mask).to(device)


@dataclasses.dataclass(frozen=True)
class Result:
    """One call with its gradient, on the CPU."""

    loss: Tensor
    grad: Tensor
    metrics: dict[str, float | int]
    counts: Tensor
    floats: Tensor


def run(loss_fn, tokens: Tokens, grad_output: Tensor | None = None, **options: Any) -> Result:
    """Calls `loss_fn` and backward; checks what holds for every call: types, attachment, no gradient but that of log_probs."""
    leaf = tokens.log_probs.detach().requires_grad_()
    out: LossOutput = loss_fn(leaf, *list(tokens)[1:], **options)
    wide = torch.float64 if leaf.dtype == torch.float64 else torch.float32
    assert out.loss.dtype == wide
    assert out.loss.requires_grad
    if grad_output is None:
        grad_output = torch.ones_like(out.loss)
    (grad,) = torch.autograd.grad(out.loss, leaf, grad_output.to(out.loss))
    assert grad.dtype == leaf.dtype
    assert grad.shape == leaf.shape
    assert not out.metrics.counts.requires_grad
    assert not out.metrics.floats.requires_grad
    return Result(out.loss.detach().cpu(), grad.cpu(), out.metrics.to_dict(), out.metrics.counts.cpu(), out.metrics.floats.cpu())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals NaN, and +0 is not -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_same(a: Result, b: Result) -> None:
    """Loss, gradient and every metric have the same bits."""
    assert same_bits(a.loss, b.loss), (a.loss, b.loss)
    assert same_bits(a.grad, b.grad), (a.grad - b.grad).abs().max()
    assert same_bits(a.counts, b.counts), (a.counts, b.counts)
    assert same_bits(a.floats, b.floats), (a.floats, b.floats)


def decision(tokens: Tokens, scope: str = "quadrants") -> tuple[Tensor, Tensor, Tensor]:
    """(v, T, valid) of a batch, on the CPU, with 0 at invalid positions."""
    lp, blp, adv, mask = tokens.to("cpu")
    d, v = log_ratio(lp, blp)
    adv = (adv[:, None] if adv.dim() < lp.dim() else adv).to(d.dtype).expand(d.shape)
    valid = mask != 0
    return torch.where(valid, v, 0), trust_region(d, adv, valid, scope), valid


def assert_mask(keep: Tensor, expected: Tensor, v: Tensor, region: Tensor, tau: float) -> None:
    """`keep` is `expected`, except for the one token at the cut where the contract allows it.

    It allows it where the exact sum of a run is within a relative 1e-9 of tau times its length, because a low token (v <= tau)
    enters the sums rounded to 2^-k, tau * 2^k in [2^30, 2^31). Where no low token is rounded (every v above tau / 128 in
    fp32 is a multiple of 2^-k), nothing is allowed.
    """
    keep, expected = keep.cpu(), expected.cpu()
    if torch.equal(keep, expected):
        return
    different = (keep != expected).sum().item()
    assert different == 1, f"{different} tokens differ"
    values = sorted(Fraction(x) for x in v[region].double().tolist() if x != math.inf)
    unit = Fraction(2) ** (math.frexp(tau)[1] - 31)
    assert any(x <= tau and x % unit for x in values), "no low token is rounded, yet the mask differs"
    run, close = Fraction(0), False
    for n, x in enumerate(values, 1):
        run += x
        close = close or abs(run - Fraction(tau) * n) <= Fraction(tau) * n / 10**9
    assert close, "the mask differs though no run's mean is within 1e-9 of tau"


def oracle_of(loss_fn, tokens: Tokens, **options: Any) -> OracleResult:
    """The oracle on the CPU, with the options of `loss_fn` in its own terms."""
    tokens = tokens.to("cpu")
    options = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items() if k != "backend"}
    cu_seqlens = options.pop("cu_seqlens", None)
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().long()
        ids = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        options["sequence_ids"] = ids
        if tokens.advantages.shape != tokens.log_probs.shape:
            tokens = dataclasses.replace(tokens, advantages=tokens.advantages[ids])
    if isinstance(options.get("denominator"), Tensor):
        options["denominator"] = float(options["denominator"])
    return {m2po_loss: m2po_oracle, grpo_loss: grpo_oracle}[loss_fn](*tokens, **options)


def _with_advantages(tokens: Tokens, fn) -> Tokens:
    adv = tokens.advantages
    return dataclasses.replace(tokens, advantages=torch.where(adv.isfinite(), fn(adv), adv))


def assert_matches_oracle(result: Result, loss_fn, tokens: Tokens, grad_output: float = 1.0, **options: Any) -> None:
    """Loss, gradient and metrics against the fp64 oracle of the same inputs, each within the bound that its arithmetic has.

    Only for |d| and |q| < 80: beyond that exp leaves the range of fp32.
    """
    tokens = tokens.to("cpu")
    whole = oracle_of(loss_fn, tokens, **options)
    fixed = {} if loss_fn is grpo_loss else {"select": lambda v, region, valid, tau: whole.keep}
    no_kl = {**options, **fixed, "kl_coef": 0.0}
    kl_coef, dtype = options.get("kl_coef", 0.0), _compute_dtype(tokens)
    error = TERM_ERROR[dtype]

    d, _ = log_ratio(tokens.log_probs, tokens.behavior_log_probs)
    valid = tokens.mask != 0
    q = torch.zeros_like(d)
    if kl_coef:
        q = options["ref_log_probs"].cpu().to(dtype) - tokens.log_probs.to(dtype)
    if options.get("nonfinite") == "drop":
        per_token = oracle_of(loss_fn, tokens, **{**no_kl, "reduction": "none", "denominator": None}).loss
        assert bool(per_token.isfinite().all())
        finite = d.isfinite() & q.isfinite()
        valid = valid & finite & _per_token(tokens).isfinite()
    d, q = torch.where(valid, d, 0).double(), torch.where(valid, q, 0).double()

    # Gradient: the bound is on the two terms, as their sum may cancel.
    policy_grad = oracle_of(loss_fn, tokens, **no_kl).grad
    terms = policy_grad.abs() + (whole.grad - policy_grad).abs()
    # Where exp, a product or A / D is below the smallest normal number it may have become 0 on the way.
    adv = torch.where(valid, _per_token(tokens), 0).double()
    floor = 4 * SMALLEST_NORMAL[dtype] * (1 + abs(grad_output) * adv.abs() + d.exp() + q.exp())
    bound = abs(grad_output) * error * terms + floor
    want = grad_output * whole.grad
    if tokens.log_probs.dtype in LOW_PRECISION:
        relative, smallest = LOW_PRECISION[tokens.log_probs.dtype]
        bound = bound + want.abs() * relative + smallest
    off = (result.grad.double() - want).abs()
    assert bool((off <= bound).all()), f"gradient off by {float((off / bound).max())} times its bound"

    # Loss: the same per term, over sizes instead of signed terms; exp(q) - 1 - q loses to cancellation what its parts have.
    above = oracle_of(loss_fn, _with_advantages(tokens, lambda a: a.clamp(min=0)), **no_kl).loss.abs()
    below = oracle_of(loss_fn, _with_advantages(tokens, lambda a: a.clamp(max=0)), **no_kl).loss.abs()
    size = above + below
    if kl_coef:
        kl_size = kl_coef * (torch.expm1(q).abs() + q.abs()) * _loss_weights(tokens, valid, options)
        size = size + (kl_size if options.get("reduction") == "none" else kl_size.sum())
    off = (result.loss.double() - whole.loss).abs()
    bound = error * (size + whole.loss.abs()) + 4 * SMALLEST_NORMAL[dtype]
    assert bool((off <= bound).all()), f"loss off by {float((off / bound).max())} times its bound"
    _assert_metrics(result.metrics, whole.metrics, d[valid], error)


def _per_token(tokens: Tokens) -> Tensor:
    adv, like = tokens.advantages, tokens.log_probs
    if adv.dim() < like.dim():
        adv = adv[:, None]
    # Packed per-sequence advantages only scale the floor: their largest will do.
    if adv.dim() == 1 and adv.shape != like.shape:
        adv = adv.abs().max()
    return adv.to(_compute_dtype(tokens)).expand(like.shape)


def _compute_dtype(tokens: Tokens) -> torch.dtype:
    return torch.float64 if tokens.log_probs.dtype == torch.float64 else torch.float32


def _loss_weights(tokens: Tokens, valid: Tensor, options: dict[str, Any]) -> Tensor:
    """What each token's KL term is multiplied by: the gradient of a batch with ratio 1 and advantage -1 everywhere."""
    zero = torch.zeros_like(tokens.log_probs, dtype=torch.float64)
    given = {k: options[k] for k in ("reduction", "denominator", "cu_seqlens") if k in options}
    if given.get("denominator") == "kept":
        del given["denominator"]
    return oracle_of(m2po_loss, Tokens(zero, zero, zero - 1, valid), **given).grad


def _assert_metrics(got: dict[str, float | int], want: dict[str, float | int], d: Tensor, error: float) -> None:
    assert list(got) == list(want)
    for name in EXACT_METRICS:
        assert got[name] == want[name], (name, got[name], want[name])
    for name in ("m2_before", "m2_after"):  # fp64 sums of fp32 values
        assert math.isclose(got[name], want[name], rel_tol=1e-12), (name, got[name], want[name])
    for name in ("ratio_mean", "ratio_max"):
        assert math.isclose(got[name], want[name], rel_tol=error), (name, got[name], want[name])
    size = float((torch.expm1(d).abs() + d.abs()).mean()) if d.numel() else 0.0
    assert abs(got["approx_kl"] - want["approx_kl"]) <= error * size, (got["approx_kl"], want["approx_kl"])
