"""One case against the fp64 oracle: what must be equal, what may differ, and by how much.

Mask and counts must be equal. The bound of the gradient of fp32, bf16 and fp16 log-probs is 1e-6 relative, against the
oracle's gradient of the same fp32-rounded log-ratio d. Where it comes from, in relative terms per token:

    exp(d) within 2 units in the last place of fp32                 2^-22 at worst
    the product with A                                              2^-24
    the product with 1 / D * grad_output, and that factor rounded   2^-24 each
    the product with the sequence weight, and that weight rounded   2^-24 each
    the sum with the KL gradient (expm1: the same steps)            2^-24

which is 10 * 2^-24 = 6.0e-7. "Relative" is to the sum of the absolute terms, |policy gradient| + |KL gradient|: the two
may cancel. fp64 log-probs are computed in fp64 throughout; by the same count their bound is 1e-13.

Two absolute allowances are added. (1) A backend may flush numbers below the smallest normal fp32 to 0, so an exp(d) below it
may be lost: that many times the scale of the token, |A| / D. (2) The gradient is stored in the dtype of log_probs: half a unit
in the last place for bf16 and fp16, half the smallest subnormal for all. Where all terms are 0 (not valid, dropped,
A = 0, capped) there is no allowance at all: the gradient must be exactly 0.

The loss has the bound 1e-6 (fp64: 1e-13) relative to the sum of the absolute per-token terms, for the same reason: it is
summed in fp64 and rounded once. Allowance (1) holds for it too, summed likewise, and half the smallest subnormal.
The KL term exp(q) - q - 1 counts with |expm1(q)| + |q|, as those are what gets rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..loss import grpo_loss, m2po_loss
from ..results import LossOutput
from ..selection import select
from .batches import Case
from .cases import RolloutFigures, WorkedCase

RELATIVE = {torch.float64: 1e-13}
RELATIVE_FP32 = 1e-6
METRIC_RELATIVE = 1e-9  # fp64 sums of the same values in another order
PUBLISHED_DIGITS = 5e-8  # half of the last digit that the published figures show
_SELECT_OPTIONS = ("m2_threshold", "scope", "nonfinite", "cu_seqlens")


@dataclass(frozen=True)
class Expected:
    """The oracle's answer to a case, and the sums of absolute terms that errors are measured against."""

    result: reference.OracleResult
    loss_terms: Tensor  # 0-d, or per token for reduction="none"
    grad_terms: Tensor
    scale: Tensor  # |A| / D per token, as it stands before exp(d)

    @classmethod
    def of(cls, case: Case) -> Expected:
        """Runs the oracle on the CPU in fp64, once for the answer and once for each group of terms."""
        log_probs, behavior, advantages, mask = case.inputs
        options = {key: value for key, value in case.options.items() if key != "cu_seqlens"}
        if "cu_seqlens" in case.options:
            lengths = case.options["cu_seqlens"].diff().to(torch.int64)
            options["sequence_ids"] = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
            advantages = advantages[options["sequence_ids"]] if advantages.shape != log_probs.shape else advantages
        oracle = reference.grpo_oracle if case.clip else reference.m2po_oracle
        result = oracle(log_probs, behavior, advantages, mask, **options)

        no_kl = {**options, "kl_coef": 0.0, "ref_log_probs": None}
        policy_grad = oracle(log_probs, behavior, advantages, mask, **no_kl).grad
        per_token = oracle(log_probs, behavior, advantages, mask, **{**no_kl, "reduction": "none", "denominator": None}).loss
        valid = (mask != 0) & ~_dropped_as_nonfinite(case, advantages)
        policy_scale, kl_scale = (_unit_scale(log_probs, keep, valid, options) for keep in (result.keep, valid))
        kl_terms = torch.zeros_like(per_token)
        if options.get("kl_coef"):
            q = torch.where(valid, options["ref_log_probs"].double() - log_probs.double(), 0)
            kl_terms = options["kl_coef"] * (torch.expm1(q).abs() + q.abs()) * kl_scale
        loss_terms = per_token.abs() * policy_scale + kl_terms
        spread = advantages[:, None] if advantages.dim() < log_probs.dim() else advantages
        return cls(
            result,
            loss_terms if options.get("reduction") == "none" else loss_terms.sum(),
            policy_grad.abs() + (result.grad - policy_grad).abs(),
            torch.where(valid, spread.double().abs().expand(log_probs.shape), 0) * policy_scale,
        )


@dataclass(frozen=True)
class Comparison:
    """How one backend did on one case. Errors are relative to the sums of absolute terms, beyond the allowances."""

    mask_differs: int  # tokens
    loss_error: float
    grad_error: float
    m2_before: float
    m2_after: float
    problems: tuple[str, ...]


def compare(case: Case, expected: Expected, backend: str, device: torch.device) -> Comparison:
    """Runs `backend` on `device` and says how far it is from the oracle. Raises BackendUnavailable if it declines the case."""
    inputs = [_place(tensor, device, case.strided) for tensor in case.inputs]
    options = {key: _place(value, device, case.strided and key == "ref_log_probs") for key, value in case.options.items()}
    log_probs = inputs[0].requires_grad_()
    function = grpo_loss if case.clip else m2po_loss
    out = function(log_probs, *inputs[1:], **options, backend=backend)
    (grad,) = torch.autograd.grad(out.loss, log_probs, torch.full_like(out.loss, case.grad_output))
    problems: list[str] = []

    differs = 0
    if not case.clip:
        chosen = {key: options[key] for key in _SELECT_OPTIONS if key in options}
        selection = select(log_probs, *inputs[1:], **chosen, backend=backend)
        differs = int((selection.keep.cpu() != expected.result.keep).sum())
        if differs:
            problems.append(f"mask differs at {differs} tokens")
        problems += _metric_problems("select", selection.metrics.to_dict(), expected.result.metrics)
    metrics = out.metrics.to_dict()
    problems += _metric_problems("loss", metrics, expected.result.metrics)

    dtype = case.inputs[0].dtype
    relative = RELATIVE.get(dtype, RELATIVE_FP32)
    scale = expected.scale if case.options.get("reduction") == "none" else expected.scale.sum()
    off = _beyond((out.loss.detach().cpu().double() - expected.result.loss).abs(), _allowance(scale, out.loss.dtype))
    loss_error = _relative_error(off, expected.loss_terms)
    if not loss_error <= relative:
        problems.append(f"loss error {loss_error:.2g} > {relative:g}")
    target, factor = expected.result.grad * case.grad_output, abs(case.grad_output)
    rounding = target.abs() * (torch.finfo(dtype).eps / 2) if dtype in (torch.bfloat16, torch.float16) else 0
    off = _beyond((grad.cpu().double() - target).abs(), _allowance(expected.scale * factor, dtype) + rounding)
    grad_error = _relative_error(off, expected.grad_terms * factor, exact_where=expected.grad_terms == 0, exact=grad.cpu())
    if not grad_error <= relative:
        problems.append(f"gradient error {grad_error:.2g} > {relative:g}")
    if case.published is not None:
        problems += _published_problems(case.published, out, grad, float(expected.loss_terms))
    return Comparison(differs, loss_error, grad_error, float(metrics["m2_before"]), float(metrics["m2_after"]), tuple(problems))


def _unit_scale(log_probs: Tensor, keep: Tensor, valid: Tensor, options: dict[str, Any]) -> Tensor:
    """What a term of token i is multiplied by: the oracle's gradient with d = 0, A = -1 and this M."""
    used = {key: options[key] for key in ("reduction", "denominator", "sequence_ids") if key in options}
    zeros = torch.zeros(log_probs.shape, dtype=torch.float64)
    return reference.m2po_oracle(zeros, zeros, zeros - 1, valid, select=lambda *_: keep, **used).grad


def _dropped_as_nonfinite(case: Case, advantages: Tensor) -> Tensor:
    log_probs, behavior = case.inputs[:2]
    if case.options.get("nonfinite") != "drop":
        return torch.zeros(log_probs.shape, dtype=torch.bool)
    spread = advantages[:, None] if advantages.dim() < log_probs.dim() else advantages
    return ~((log_probs.double() - behavior.double()).isfinite() & spread.isfinite())


def _place(value: Any, device: torch.device, strided: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    moved = value.detach().to(device)  # detached: a leaf of its own, though the case is shared between backends
    return torch.stack([moved, moved.flip(0)], -1)[..., 0] if strided and value.dim() == 2 else moved


def _allowance(scale: Tensor, stored_as: torch.dtype) -> Tensor:
    info = torch.finfo(stored_as)
    return torch.finfo(torch.float32).smallest_normal * scale + info.smallest_normal * info.eps / 2


def _beyond(error: Tensor, allowance: Tensor) -> Tensor:
    # clamp keeps a NaN, which must not pass for a small error.
    return (error - allowance).clamp(min=0)


def _relative_error(error: Tensor, terms: Tensor, exact_where: Tensor | None = None, exact: Tensor | None = None) -> float:
    """Largest |error| / terms; 0 for none at all, inf where a value that must be exactly 0 is not, NaN if any error is NaN."""
    ratio = torch.where(error == 0, 0.0, error.abs() / terms)
    if exact_where is not None and exact is not None:
        ratio = torch.where(exact_where, torch.where(exact == 0, 0.0, math.inf), ratio)
    if not ratio.numel():
        return 0.0
    return math.nan if bool(ratio.isnan().any()) else float(ratio.max())


def _metric_problems(source: str, got: dict[str, float | int], right: dict[str, float | int]) -> list[str]:
    problems = [
        f"{source}: {name} is {got[name]}, expected {right[name]}"
        for name in ("valid_tokens", "dropped_tokens", "nonfinite_tokens", "m2_cut")
        if got[name] != right[name]
    ]
    summed = dict.fromkeys(
        ("m2_before", "m2_after", "masked_fraction", "trust_region_fraction", "clip_fraction"), METRIC_RELATIVE
    )
    # exp(d) of fp32 log-ratios may overflow to inf where the oracle's does not.
    overflows = right["ratio_max"] > torch.finfo(torch.float32).max
    for name, relative in {**summed, "ratio_mean": RELATIVE_FP32, "ratio_max": RELATIVE_FP32}.items():
        a, b = got[name], right[name]
        overflowed = overflows and name.startswith("ratio") and a == math.inf
        if not (a == b or overflowed or abs(a - b) <= relative * abs(b)):
            problems.append(f"{source}: {name} is {a:.12g}, expected {b:.12g}")
    return problems


def _published_problems(published: WorkedCase | RolloutFigures, out: LossOutput, grad: Tensor, loss_terms: float) -> list[str]:
    got = out.metrics
    near = [
        ("loss", out.loss.item(), published.loss, RELATIVE_FP32 * loss_terms),
        ("m2_before", got.m2_before.item(), published.m2_before, RELATIVE_FP32 * published.m2_before),
        ("m2_after", got.m2_after.item(), published.m2_after, RELATIVE_FP32 * published.m2_after),
    ]
    if isinstance(published, WorkedCase):
        right = torch.tensor(published.grad, dtype=torch.float64).flatten().tolist()
        pairs = enumerate(zip(grad.cpu().flatten().tolist(), right, strict=True))
        near += [(f"gradient {i}", a, b, RELATIVE_FP32 * abs(b)) for i, (a, b) in pairs]
    else:
        near += [
            ("size of T", got.trust_region_tokens.item(), published.trust_region, 0.0),
            ("candidates", got.candidate_tokens.item(), published.candidates, 0.0),
            ("dropped", got.dropped_tokens.item(), published.dropped, 0.0),
        ]
    return [f"{name} is {a:.9g}, published {b:.9g}" for name, a, b, room in near if not abs(a - b) <= room + PUBLISHED_DIGITS]
