"""m2po_loss and grpo_loss: from the log-probs of the sampled tokens to the loss, its gradient and its metrics."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import ops  # noqa: F401  (registers torch.ops.m2po_kernels)
from .errors import InvalidArgument, InvalidType, describe
from .inputs import check_batch, given_denominators, sequence_weights, wide_dtype
from .parts import Part
from .results import LossOutput, Metrics, Selection
from .rule import REDUCTIONS, Batch, Rule, check_choice

_DEFAULT_THRESHOLD, _DEFAULT_SCOPE = 0.04, "quadrants"


def m2po_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    m2_threshold: float = _DEFAULT_THRESHOLD,
    scope: str = _DEFAULT_SCOPE,
    reduction: str = "token-mean",
    denominator: float | Tensor | str | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    ratio_cap: float | None = None,
    nonfinite: str = "propagate",
    selection: Selection | None = None,
    part: Part | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    backend: str | None = None,
) -> LossOutput:
    """The M2PO loss (arXiv 2510.01161) of one batch: select, drop, -exp(d) A, reduce. One sweep over the tokens.

    log_probs: [B, T], or packed [N]; log pi_current of each sampled token (nats); the only argument that gets a gradient.
    behavior_log_probs, advantages, mask, m2_threshold, scope, nonfinite, cu_seqlens, backend: as in `select`.
    reduction: "token-mean" (sum / D), "sequence-mean" (mean over each sequence's valid tokens, then over the sequences that
        have any; packed: needs cu_seqlens), "sum", or "none" (one loss per token).
    denominator: D of token-mean (default: valid tokens, counted before dropping) or the number of sequences of
        sequence-mean: a number >= 0 or a one-element tensor on the device (0 gives loss 0). "kept": divide the policy
        term by the tokens that were kept, as AReaL does (token-mean only).
    ref_log_probs, kl_coef: adds kl_coef * (exp(q) - q - 1), q = ref_log_probs - log_probs, at every valid token, dropped or not.
    ratio_cap: c > 1 caps exp(d) at c where A < 0 (dual clip); a capped token has no gradient.
    selection: use this M (from `select` on the whole optimizer batch, or from `M2Accumulator.solve`) instead of selecting here;
        D is then its valid tokens, so that the losses of all micro-batches of all ranks add up to that of the whole batch.
    part: with a selection from `M2Accumulator.solve`, the handle that `add` returned for this micro-batch. "sequence-mean" then
        needs denominator=, the number of sequences of the whole batch that have a valid token.
    sequence_lengths: int [B] (packed: [S]), the valid tokens of each whole sequence, where the batch holds only parts of them.

    Returns a LossOutput. No host sync, except with nonfinite="error". Second derivatives raise.
    Raises InvalidArgument, InvalidType, MissingBehaviorLogProbs, NonFiniteError, BackendUnavailable (all in m2po_kernels.errors).
    """
    batch, rule = prepare(
        log_probs,
        behavior_log_probs,
        advantages,
        mask,
        m2_threshold=m2_threshold,
        scope=scope,
        reduction=reduction,
        denominator=denominator,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        ratio_cap=ratio_cap,
        nonfinite=nonfinite,
        selection=selection,
        part=part,
        cu_seqlens=cu_seqlens,
        sequence_lengths=sequence_lengths,
        backend=backend,
    )
    return _run(batch, rule)


def prepare(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    m2_threshold: float = _DEFAULT_THRESHOLD,
    scope: str = _DEFAULT_SCOPE,
    reduction: str = "token-mean",
    denominator: float | Tensor | str | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    ratio_cap: float | None = None,
    nonfinite: str = "propagate",
    selection: Selection | None = None,
    part: Part | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Batch, Rule]:
    """The arguments of `m2po_loss` checked, as the ops take them.

    The values of log_probs are read for the weights of "sequence-mean" with nonfinite="drop" alone; else any of that shape do.
    """
    batch, ids = check_batch(
        log_probs,
        behavior_log_probs,
        advantages,
        mask,
        ref_log_probs=_used_reference(ref_log_probs, kl_coef),
        cu_seqlens=cu_seqlens,
    )
    if selection is not None:
        keep, m2_threshold, scope = _check_selection(selection, part, batch, m2_threshold, scope)
        batch = batch._replace(keep=keep)
    elif part is not None:
        raise InvalidArgument("part goes with selection=, the Selection that solve() returned; got selection=None")
    if part is not None and reduction == "sequence-mean" and denominator is None:
        raise InvalidArgument(
            'denominator is None: reduction="sequence-mean" with part= needs the number of sequences of the whole batch with '
            "a valid token, which one part cannot know"
        )
    batch, normalizer = _normalize(batch, ids, reduction, denominator, selection, cu_seqlens, sequence_lengths, nonfinite)
    rule = Rule(
        m2_threshold=m2_threshold,
        scope=scope,
        kl_coef=kl_coef,
        ratio_cap=math.inf if ratio_cap is None else ratio_cap,
        nonfinite=nonfinite,
        normalizer=normalizer,
        per_token=reduction == "none",
        backend=backend,
    )
    return batch, rule


def grpo_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reduction: str = "token-mean",
    denominator: float | Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    ratio_cap: float | None = None,
    nonfinite: str = "propagate",
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    backend: str | None = None,
) -> LossOutput:
    """GRPO with PPO's clip (arXiv 1707.06347) through the same kernel: for comparison with `m2po_loss`, and as fallback.

    clip_low in [0, 1], clip_high >= 0: the ratio is clipped to [1 - clip_low, 1 + clip_high], each decided on d.
    All other arguments, the result and the errors: as in `m2po_loss`. Nothing is dropped; m2_after equals m2_before.
    """
    if isinstance(denominator, str):
        raise InvalidArgument(
            f"denominator must be a number or a tensor of one element: grpo_loss drops nothing; got {denominator!r}"
        )
    batch, ids = check_batch(
        log_probs,
        behavior_log_probs,
        advantages,
        mask,
        ref_log_probs=_used_reference(ref_log_probs, kl_coef),
        cu_seqlens=cu_seqlens,
    )
    batch, normalizer = _normalize(batch, ids, reduction, denominator, None, cu_seqlens, sequence_lengths, nonfinite)
    rule = Rule(
        rule="clip",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        ratio_cap=math.inf if ratio_cap is None else ratio_cap,
        nonfinite=nonfinite,
        normalizer=normalizer,
        per_token=reduction == "none",
        backend=backend,
    )
    return _run(batch, rule)


def _run(batch: Batch, rule: Rule) -> LossOutput:
    loss, _, _, counts, floats = torch.ops.m2po_kernels.policy_loss(*batch, *rule.args())
    return LossOutput(loss, Metrics(counts, floats))


def _used_reference(ref_log_probs: Tensor | None, kl_coef: float) -> Tensor | None:
    if kl_coef == 0:
        return None
    if ref_log_probs is None:
        raise InvalidArgument(
            f"ref_log_probs is None with kl_coef={kl_coef!r}: pass the reference model's log-probs, or kl_coef=0"
        )
    return ref_log_probs


def _check_selection(
    selection: Selection, part: Part | None, batch: Batch, m2_threshold: float, scope: str
) -> tuple[Tensor, float, str]:
    """(M of this batch, the selection's threshold and scope)."""
    if not isinstance(selection, Selection):
        raise InvalidType(f"selection must be a Selection, as select() and solve() return; got {describe(selection)}")
    if selection.parts and part is None:
        raise InvalidArgument("part is None: a selection over micro-batches needs the handle that add() returned for this one")
    keep = selection.keep if part is None else selection.keep_of(part)
    if keep.shape != batch.log_probs.shape or keep.device != batch.log_probs.device:
        raise InvalidArgument(
            f"selection was made for {list(keep.shape)} on {keep.device}; log_probs is {describe(batch.log_probs)}"
        )
    if part is not None:
        part.use(batch)
    for name, given, default, made in [
        ("m2_threshold", m2_threshold, _DEFAULT_THRESHOLD, selection.m2_threshold),
        ("scope", scope, _DEFAULT_SCOPE, selection.scope),
    ]:
        if given != default and given != made:
            raise InvalidArgument(f"{name} must be left out, or equal that of the selection, {made!r}; got {given!r}")
    return keep, selection.m2_threshold, selection.scope


def _normalize(
    batch: Batch,
    ids: Tensor | None,
    reduction: str,
    denominator: float | Tensor | str | None,
    selection: Selection | None,
    cu_seqlens: Tensor | None,
    sequence_lengths: Tensor | None,
    nonfinite: str,
) -> tuple[Batch, str]:
    """The batch with its weights and, where known before the sweep, its denominators; and who counts them else."""
    check_choice("reduction", reduction, REDUCTIONS)
    if sequence_lengths is not None and reduction != "sequence-mean":
        raise InvalidArgument(f'sequence_lengths goes with reduction="sequence-mean"; got reduction={reduction!r}')
    if reduction in ("sum", "none"):
        if denominator is not None:
            raise InvalidArgument(
                f"denominator must be None with reduction={reduction!r}, which divides by nothing; got {describe(denominator)}"
            )
        return batch, "one"
    kept = denominator == "kept" if isinstance(denominator, str) else False
    if reduction == "sequence-mean":
        if kept:
            raise InvalidArgument('denominator="kept" goes with reduction="token-mean" only; got reduction="sequence-mean"')
        weights, n_sequences = sequence_weights(batch, ids, cu_seqlens, sequence_lengths, nonfinite)
        batch = batch._replace(weights=weights)
        denominator = n_sequences if denominator is None else denominator
    if denominator is not None and not kept:
        return batch._replace(denominators=given_denominators(denominator, batch.log_probs)), "valid"
    if selection is not None:
        valid = selection.metrics.valid_tokens
        policy = valid - selection.metrics.dropped_tokens if kept else valid
        return batch._replace(denominators=torch.stack([policy, valid]).to(wide_dtype(valid.device))), "valid"
    return batch, "kept" if kept else "valid"
