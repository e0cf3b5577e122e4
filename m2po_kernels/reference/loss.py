"""The loss and its gradient in fp64, term by term as docs/semantics.md writes them. Unfused and slow on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithm1 import log_ratio, select_sorted, trust_region


@dataclass(frozen=True)
class OracleResult:
    """keep: M (bool). loss: fp64, 0-d or per token. grad: d loss / d log_probs, fp64, at grad_output 1. metrics: numbers."""

    keep: Tensor
    loss: Tensor
    grad: Tensor
    metrics: dict[str, float | int]


def m2po_oracle(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    m2_threshold: float = 0.04,
    scope: str = "quadrants",
    reduction: str = "token-mean",
    denominator: float | str | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    ratio_cap: float | None = None,
    nonfinite: str = "propagate",
    sequence_ids: Tensor | None = None,
    select=select_sorted,
) -> OracleResult:
    """What `m2po_loss` must return. Options as there; advantages of any shape that broadcasts as they do in `m2po_loss`.

    sequence_ids: int64, the sequence of each packed token (for [B, T] it is the row). select: select_sorted or select_literal.
    """
    d, v, adv, valid, nonfinite_tokens = _tokens(
        log_probs, behavior_log_probs, advantages, mask, ref_log_probs if kl_coef else None, nonfinite
    )
    region = trust_region(d, adv, valid, scope)
    keep = select(v, region, valid, m2_threshold)
    cap = math.inf if ratio_cap is None else ratio_cap
    active = keep & (adv != 0)
    x, a = d.double(), adv.double()
    ratio = torch.where(active, x, 0).exp()
    capped = active & (adv < 0) & (d > torch.tensor(cap, dtype=torch.float64).log().to(d.dtype))
    policy = torch.where(active, -torch.where(capped, cap, ratio) * a, 0.0)
    policy_grad = torch.where(capped, 0.0, policy)
    after = region & keep
    dropped = valid & ~keep
    metrics = _metrics(d, v, adv, valid, region, after, dropped, nonfinite_tokens, 0.2, 0.2)
    kept = int(keep.sum()) if denominator == "kept" else None
    given = denominator if not isinstance(denominator, str) else None
    return _reduce(
        log_probs,
        keep,
        valid,
        policy,
        policy_grad,
        ref_log_probs,
        kl_coef,
        reduction,
        given,
        kept,
        sequence_ids,
        metrics,
    )


def grpo_oracle(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reduction: str = "token-mean",
    denominator: float | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    ratio_cap: float | None = None,
    nonfinite: str = "propagate",
    sequence_ids: Tensor | None = None,
) -> OracleResult:
    """What `grpo_loss` must return: PPO's clip, decided on d against log1p of the bounds in the type of d."""
    d, v, adv, valid, nonfinite_tokens = _tokens(
        log_probs, behavior_log_probs, advantages, mask, ref_log_probs if kl_coef else None, nonfinite
    )
    region = trust_region(d, adv, valid)
    high, low = _clip_bounds(clip_low, clip_high, d.dtype)
    cap = math.inf if ratio_cap is None else ratio_cap
    active = valid & (adv != 0)
    ratio = torch.where(active, d.double(), 0).exp()
    log_cap = torch.tensor(cap, dtype=torch.float64).log().to(d.dtype)
    flat = (adv > 0) & (d > high) | (adv < 0) & (d < low) | (adv < 0) & (d > log_cap)
    bound = torch.full_like(ratio, 1 + clip_high)
    bound = torch.where(adv > 0, bound, torch.where(d < low, torch.full_like(ratio, 1 - clip_low), cap))
    policy = torch.where(active, -torch.where(flat, bound, ratio) * adv.double(), 0.0)
    metrics = _metrics(d, v, adv, valid, region, region, torch.zeros_like(valid), nonfinite_tokens, clip_low, clip_high)
    policy_grad = torch.where(flat, 0.0, policy)
    return _reduce(
        log_probs,
        valid,
        valid,
        policy,
        policy_grad,
        ref_log_probs,
        kl_coef,
        reduction,
        denominator,
        None,
        sequence_ids,
        metrics,
    )


def _tokens(log_probs, behavior_log_probs, advantages, mask, ref_log_probs, nonfinite):
    d, v = log_ratio(log_probs, behavior_log_probs)
    if advantages.dim() == 1 and log_probs.dim() == 2:
        advantages = advantages[:, None]
    adv = advantages.to(d.dtype).expand(d.shape)
    valid = mask != 0
    finite = d.isfinite() & adv.isfinite()
    if ref_log_probs is not None:
        finite &= (ref_log_probs.to(d.dtype) - log_probs.detach().to(d.dtype)).isfinite()
    bad = valid & ~finite
    if nonfinite == "drop":
        valid = valid & finite
    clean = torch.where(valid, d, 0)
    return clean, torch.where(valid, v, 0), torch.where(valid, adv, 0), valid, int(bad.sum())


def _clip_bounds(clip_low: float, clip_high: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = torch.tensor([clip_high, -clip_low], dtype=torch.float64).log1p().to(dtype)
    return both[0], both[1]


def _metrics(d, v, adv, valid, region, after, dropped, nonfinite_tokens, clip_low, clip_high) -> dict[str, float | int]:
    high, low = _clip_bounds(clip_low, clip_high, d.dtype)
    x = d.double()[valid]
    n = int(valid.sum())
    clipped = valid & ((adv > 0) & (d > high) | (adv < 0) & (d < low))

    def mean(values: Tensor) -> float:
        return float(values.double().mean()) if values.numel() else 0.0

    return {
        "m2_before": mean(v[region]),
        "m2_after": mean(v[after]),
        "masked_fraction": int(dropped.sum()) / n if n else 0.0,
        "trust_region_fraction": int(region.sum()) / n if n else 0.0,
        "m2_cut": float(v[dropped].min()) if int(dropped.sum()) else math.inf,
        "ratio_mean": mean(x.exp()),
        "ratio_max": float(x.exp().max()) if n else 0.0,
        "approx_kl": mean(torch.expm1(x) - x),
        "clip_fraction": int(clipped.sum()) / n if n else 0.0,
        "valid_tokens": n,
        "dropped_tokens": int(dropped.sum()),
        "nonfinite_tokens": nonfinite_tokens,
    }


def _reduce(
    log_probs, keep, valid, policy, policy_grad, ref_log_probs, kl_coef, reduction, given, kept, ids, metrics
) -> OracleResult:
    kl = kl_grad = torch.zeros_like(policy)
    if kl_coef:
        dtype = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
        q = (ref_log_probs.to(dtype) - log_probs.detach().to(dtype)).double()
        q = torch.where(valid, q, 0)
        kl, kl_grad = kl_coef * (torch.expm1(q) - q), -kl_coef * torch.expm1(q)
    weights = torch.ones_like(policy)
    n_policy = n_kl = 1.0
    if reduction == "token-mean":
        n_kl = float(int(valid.sum())) if given is None else float(given)
        n_policy = n_kl if kept is None else float(kept)
    elif reduction == "sequence-mean":
        rows = ids if ids is not None else torch.arange(valid.shape[0]).repeat_interleave(valid.shape[1])
        lengths = torch.zeros(int(rows.max()) + 1 if rows.numel() else 0, dtype=torch.float64).index_add_(
            0, rows, valid.flatten().double()
        )
        weights = torch.where(valid.flatten(), 1.0 / lengths.clamp(min=1)[rows], 0).reshape(valid.shape)
        n_policy = n_kl = float(int((lengths > 0).sum())) if given is None else float(given)

    def share(term: Tensor, n: float) -> Tensor:
        return term * weights / n if n else torch.zeros_like(term)

    loss = share(policy, n_policy) + share(kl, n_kl)
    grad = share(policy_grad, n_policy) + share(kl_grad, n_kl)
    return OracleResult(keep, loss if reduction == "none" else loss.sum(), grad, metrics)
