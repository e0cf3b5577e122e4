"""linear_log_probs and linear_m2po_loss: from hidden states and the head's weight, without logits of all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgument, InvalidType, describe
from ..logits import check_softcap, check_temperatures
from ..loss import m2po_loss, prepare
from ..parts import Part
from ..results import LossOutput, Metrics, Selection
from . import ops  # noqa: F401  (registers torch.ops.m2po_kernels)
from .args import PARAMETERS, Inputs, LinearArgs
from .inputs import align, check_head, check_vocab, products_dtype
from .plan import WORKSPACE, WORKSPACE_CPU
from .policy import over_computed, rows_with_gradient, stand_in


@dataclass(frozen=True)
class LinearLossOutput(LossOutput):
    """Result of `linear_m2po_loss`.

    log_probs, entropy: of every valid token, 0 elsewhere, detached; None unless asked for.
    work: int64 [3] on the CPU: rows computed, settled on sight, recomputed (`linear.plan.Work`); None where the loss was made in
        two steps (see `linear_m2po_loss`), as the rest of the work is then the backward's.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    work: Tensor | None = None


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    entropy_grad: bool = False,
    shift: int = 0,
    logits_to_keep: int | None = None,
    tp_group: Any = None,
    vocab_start: int | None = None,
    reduce_hidden: bool = False,
    gather_rows: bool = True,
    max_workspace_bytes: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_log_softmax` of hidden W^T + bias, a chunk of rows at a time; [tokens, V] never exists.

    hidden: [..., H]; weight: [V, H]; bias: [V]; lora_a: [r, H], lora_b: [V, r]: W = weight + lora_scale * lora_b lora_a, which is
        not formed. float32, bfloat16, float16 or float64; they may differ: products are computed in the wider of hidden and
        weight, or in autocast's dtype, and TF32 is used where F.linear would. Each gets a gradient if it requires one.
    token_ids: int32 or int64 [...], the leading dimensions of hidden. shift, logits_to_keep: how they are aligned where token_ids
        and hidden are of the same positions; m2po_kernels/linear/inputs.py says it once. Results have the shape of what is left.
    mask: shape of the results, bool or 0/1: where 0 nothing is multiplied and the result is 0, whatever stands there.
    temperature, logit_scale, logit_softcap, vocab_size, return_entropy, entropy_grad, backend: as in `selective_log_softmax`.
    tp_group, vocab_start: weight (bias, lora_b) is this rank's shard, whose first row is token vocab_start; vocab_size is then
        the whole vocabulary's. Both are then required. All ranks pass the same hidden, ids and mask, and the same gradient
        flows into all. d hidden and d lora_a are this rank's part; reduce_hidden=True sums them over tp_group.
    gather_rows: False multiplies every row, so that no count has to reach the host: for CUDA graphs.
    max_workspace_bytes: of a chunk's logits and hidden states. Default 160 MB on a CPU, 640 MB elsewhere.

    Returns log_probs, or (log_probs, entropy): float32, float64 for float64 products. The backward multiplies again, only rows
    that a gradient flows into; hidden, weight and ids are all that is saved. Second derivatives raise. A row has the same bits
    only where the products have the same shapes: libraries choose the order of their sums by shape.
    Raises InvalidArgument, InvalidType, BackendUnavailable (all in m2po_kernels.errors).
    """
    if entropy_grad and not return_entropy:
        raise InvalidArgument("entropy_grad=True goes with return_entropy=True; got return_entropy=False")
    call = _call(
        hidden,
        weight,
        token_ids,
        bias=bias,
        lora_a=lora_a,
        lora_b=lora_b,
        lora_scale=lora_scale,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        return_entropy=return_entropy,
        entropy_grad=entropy_grad,
        shift=shift,
        logits_to_keep=logits_to_keep,
        tp_group=tp_group,
        vocab_start=vocab_start,
        reduce_hidden=reduce_hidden,
        gather_rows=gather_rows,
        max_workspace_bytes=max_workspace_bytes,
        backend=backend,
    )
    inputs = call.inputs
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != call.shape or mask.device != hidden.device:
            raise InvalidArgument(
                f"mask must have the result's shape, {list(call.shape)}, on {hidden.device}; got {describe(mask)}"
            )
        inputs = inputs._replace(rows=(mask != 0).reshape(-1))
    log_probs, entropy = torch.ops.m2po_kernels.linear_log_probs(*inputs, *call.args.args())
    log_probs = log_probs.reshape(call.shape)
    return (log_probs, entropy.reshape(call.shape)) if return_entropy else log_probs


def linear_m2po_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    return_log_probs: bool = False,
    return_entropy: bool = False,
    shift: int = 0,
    logits_to_keep: int | None = None,
    tp_group: Any = None,
    vocab_start: int | None = None,
    reduce_hidden: bool = False,
    gather_rows: bool = True,
    max_workspace_bytes: int | None = None,
    m2_threshold: float = 0.04,
    scope: str = "quadrants",
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
) -> LinearLossOutput:
    """`m2po_loss` of the log-probs that `linear_log_probs` takes from hidden states, with the gradients made on the way.

    hidden: [B, T, H], or packed [N, H]. behavior_log_probs, advantages, mask and the options of the loss: as in `m2po_loss`;
        those of the head and the alignment: as in `linear_log_probs`.
    return_log_probs, return_entropy: also of the valid tokens that have no gradient, which then cost their forward.

    A token that cannot have a gradient is not multiplied: not valid; A = 0 (with scope="quadrants"), or dropped by `selection`,
    and no KL term. A token that is no candidate, or for which a selection was given, gets its gradient in the visit that makes
    its log-prob. Candidates wait for the cut, and those that stay are multiplied once more. So the forward makes the gradients
    of whatever requires one, and the backward scales them: call it under no_grad for the loss alone.

    Made in two steps, linear_log_probs and m2po_loss, where no gradient is known on sight: reduction="none", gather_rows=False,
    denominator="kept" with a KL term, reduction="sequence-mean" with nonfinite="drop".

    The ratio and KL metrics are over the tokens that were computed; counts and T over all. With a given selection the tokens it
    dropped are not computed, so m2_before and m2_after are those of its kept tokens, the clipped ones are counted among the
    computed ones, and m2_cut is NaN; the selection's own metrics have the whole batch's.
    With products in fp16 the gradients are fp16 sums without the loss's divisor, which overflow where exp(d) |A| comes near
    65504: a d of some 10, which `ratio_cap` prevents; bf16 has no such limit.
    Waits for the device a few times per chunk, for numbers of rows; not with gather_rows=False.
    Raises InvalidArgument, InvalidType, MissingBehaviorLogProbs, NonFiniteError, BackendUnavailable (all in m2po_kernels.errors).
    """
    call = _call(
        hidden,
        weight,
        token_ids,
        bias=bias,
        lora_a=lora_a,
        lora_b=lora_b,
        lora_scale=lora_scale,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        return_entropy=return_entropy,
        entropy_grad=False,
        shift=shift,
        logits_to_keep=logits_to_keep,
        tp_group=tp_group,
        vocab_start=vocab_start,
        reduce_hidden=reduce_hidden,
        gather_rows=gather_rows,
        max_workspace_bytes=max_workspace_bytes,
        backend=backend,
    )
    if len(call.shape) > 2:
        raise InvalidArgument(f"hidden must have shape [B, T, H], or packed [N, H]; got {describe(hidden)}")
    options: dict[str, Any] = {
        "m2_threshold": m2_threshold,
        "scope": scope,
        "reduction": reduction,
        "denominator": denominator,
        "ref_log_probs": ref_log_probs,
        "kl_coef": kl_coef,
        "ratio_cap": ratio_cap,
        "nonfinite": nonfinite,
        "selection": selection,
        "part": part,
        "cu_seqlens": cu_seqlens,
        "sequence_lengths": sequence_lengths,
        "backend": backend,
    }
    to_come = torch.zeros((), dtype=call.args.sum_dtype, device=hidden.device).expand(call.shape)
    batch, rule = prepare(to_come, behavior_log_probs, advantages, mask, **options)
    computed = batch.mask != 0 if return_log_probs or return_entropy else rows_with_gradient(batch, rule)
    inputs = call.inputs._replace(rows=computed.reshape(-1))
    in_two_steps = (
        reduction == "none"
        or not gather_rows
        or (isinstance(denominator, str) and kl_coef > 0)
        or (reduction == "sequence-mean" and nonfinite == "drop")
    )
    if in_two_steps:
        log_probs, entropy = torch.ops.m2po_kernels.linear_log_probs(*inputs, *call.args.args())
        batch = batch._replace(log_probs=stand_in(computed, log_probs, batch))
        loss = m2po_loss(batch.log_probs, behavior_log_probs, advantages, mask, **options)
        whole = batch._replace(log_probs=batch.log_probs.detach())
        out = LinearLossOutput(
            loss.loss, Metrics(*over_computed(loss.metrics.counts, loss.metrics.floats, computed, whole, rule))
        )
    else:
        result = torch.ops.m2po_kernels.linear_m2po_loss(*inputs, *call.args.args(), *batch[1:], *rule.args())
        loss_value, log_probs, entropy, counts, floats, _, work = result[:7]
        if not torch.compiler.is_compiling() and loss_value.grad_fn is not None:
            loss_value.grad_fn.owns_sums = True  # the rest of `result` ends here, so the backward may scale it in place
        out = LinearLossOutput(loss_value, Metrics(counts, floats), work=work)
    return _with_asked_for(out, call.shape, log_probs if return_log_probs else None, entropy if return_entropy else None)


class _Call(NamedTuple):
    inputs: Inputs
    args: LinearArgs
    shape: tuple[int, ...]  # of the results


def _call(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    temperature: float | Tensor,
    logit_scale: float,
    logit_softcap: float | None,
    vocab_size: int | None,
    return_entropy: bool,
    entropy_grad: bool,
    shift: int,
    logits_to_keep: int | None,
    tp_group: Any,
    vocab_start: int | None,
    reduce_hidden: bool,
    gather_rows: bool,
    max_workspace_bytes: int | None,
    backend: str | None,
) -> _Call:
    check_head(hidden, weight, token_ids, bias, lora_a, lora_b)
    token_ids, at = align(hidden, token_ids, shift, logits_to_keep)
    shape = tuple(token_ids.shape)
    temperatures = None
    if isinstance(temperature, Tensor):
        wider = weight if weight.dtype == torch.float64 else hidden
        temperatures = check_temperatures(temperature, "hidden", wider, shape)
        temperature = 1.0
    if max_workspace_bytes is None:
        max_workspace_bytes = WORKSPACE_CPU if hidden.device.type == "cpu" else WORKSPACE
    elif isinstance(max_workspace_bytes, bool) or not isinstance(max_workspace_bytes, int):
        raise InvalidType(f"max_workspace_bytes must be an integer, or None; got {describe(max_workspace_bytes)}")
    if reduce_hidden and tp_group is None:
        raise InvalidArgument("reduce_hidden=True goes with tp_group; got no tp_group")
    inputs = Inputs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        lora_a,
        lora_b,
        token_ids.reshape(-1),
        None if temperatures is None else temperatures.reshape(-1),
        None,
    )
    parameters = inputs[: len(PARAMETERS)]
    args = LinearArgs(
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=check_softcap(logit_softcap),
        lora_scale=lora_scale,
        vocab_size=check_vocab(weight, vocab_size, vocab_start, tp_group),
        vocab_start=vocab_start or 0,
        tokens=at.tokens,
        positions=at.positions,
        first=at.first,
        max_workspace_bytes=max_workspace_bytes,
        with_entropy=return_entropy,
        entropy_grad=entropy_grad,
        gather_rows=gather_rows,
        reduce_hidden=reduce_hidden,
        dtype=products_dtype(hidden, weight),
        wanted=tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in parameters),
        group=None if tp_group is None else tp_group.group_name,
        backend=backend,
    )
    return _Call(inputs, args, shape)


def _with_asked_for(
    out: LinearLossOutput, shape: tuple[int, ...], log_probs: Tensor | None, entropy: Tensor | None
) -> LinearLossOutput:
    def shaped(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().reshape(shape)

    return LinearLossOutput(out.loss, out.metrics, shaped(log_probs), shaped(entropy), out.work)
