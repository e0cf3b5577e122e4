"""The package's torch.library ops: each schema, fake kernel and autograd formula once. dispatch.py picks who computes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch
from .errors import InvalidArgument, NonFiniteError
from .inputs import compute_dtype, wide_dtype
from .results import COUNTS, FLOATS
from .rule import Batch, Rule

_BATCH = (
    "Tensor log_probs, Tensor behavior_log_probs, Tensor advantages, Tensor mask, "
    "Tensor? ref_log_probs, Tensor? weights, Tensor? keep, Tensor? denominators"
)
_RULE = "float[] scalars, int[] choices, str? backend"  # Rule.args()
_N_BATCH = len(Batch._fields)

_lib = torch.library.Library("m2po_kernels", "DEF")
_lib.define(f"select({_BATCH}, {_RULE}) -> (Tensor keep, Tensor counts, Tensor floats)")
_lib.define(f"policy_loss({_BATCH}, {_RULE}) -> (Tensor loss, Tensor scales, Tensor cut, Tensor counts, Tensor floats)")
_lib.define(f"policy_loss_backward(Tensor grad_loss, Tensor scales, Tensor cut, {_BATCH}, {_RULE}) -> Tensor")
_lib.define(f"policy_loss_backward_out(Tensor grad_loss, Tensor scales, Tensor cut, {_BATCH}, {_RULE}, *, Tensor(a!) out) -> ()")


def _split(args: tuple) -> tuple[Batch, Rule]:
    return Batch(*args[:_N_BATCH]), Rule.of_args(*args[_N_BATCH:])


def _select(*args):
    batch, rule = _split(args)
    keep, counts, floats = dispatch.backend_for(batch, rule).select(batch, rule)
    _raise_on_nonfinite(counts, rule)
    return keep, counts, floats


def _policy_loss(*args):
    batch, rule = _split(args)
    result = dispatch.backend_for(batch, rule).policy_loss(batch, rule)
    _raise_on_nonfinite(result[3], rule)
    return result


def _policy_loss_backward(grad_loss, scales, cut, *args):
    batch, rule = _split(args)
    backend = dispatch.backend_for(batch, rule)
    grad = getattr(backend, "empty_gradient", torch.empty_like)(batch.log_probs, memory_format=torch.contiguous_format)
    backend.policy_loss_backward(grad_loss, scales, cut, batch, rule, grad)
    return grad


def _policy_loss_backward_out(grad_loss, scales, cut, *args, out):
    batch, rule = _split(args)
    dispatch.backend_for(batch, rule).policy_loss_backward(grad_loss, scales, cut, batch, rule, out)


def _raise_on_nonfinite(counts: Tensor, rule: Rule) -> None:
    if rule.nonfinite != "error":
        return
    named = dict(zip(COUNTS, counts.tolist(), strict=True))  # the one sync that nonfinite="error" costs
    if named["nonfinite_tokens"]:
        raise NonFiniteError(
            f"log_probs, behavior_log_probs, advantages or ref_log_probs: {named['nonfinite_tokens']} of "
            f"{named['valid_tokens']} valid tokens have a NaN or infinite log-ratio or input, the first at flat index "
            f'{named["first_nonfinite"]}; expected finite values (nonfinite="drop" leaves such tokens out)'
        )


for _name, _fn in [
    ("select", _select),
    ("policy_loss", _policy_loss),
    ("policy_loss_backward", _policy_loss_backward),
    ("policy_loss_backward_out", _policy_loss_backward_out),
]:
    _lib.impl(_name, _fn, "CompositeExplicitAutograd")


def _statistics(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    counts = log_probs.new_empty(len(COUNTS), dtype=torch.int64)
    return counts, log_probs.new_empty(len(FLOATS), dtype=wide_dtype(log_probs.device))


@torch.library.register_fake("m2po_kernels::select", lib=_lib)
def _select_fake(log_probs, *args):
    return log_probs.new_empty(log_probs.shape, dtype=torch.bool), *_statistics(log_probs)


@torch.library.register_fake("m2po_kernels::policy_loss", lib=_lib)
def _policy_loss_fake(log_probs, *args):
    per_token = Rule.of_args(*args[_N_BATCH - 1 :]).per_token
    loss = log_probs.new_empty(log_probs.shape if per_token else (), dtype=compute_dtype(log_probs))
    scales = log_probs.new_empty(2, dtype=wide_dtype(log_probs.device))
    return loss, scales, log_probs.new_empty(2, dtype=torch.int64), *_statistics(log_probs)


@torch.library.register_fake("m2po_kernels::policy_loss_backward", lib=_lib)
def _policy_loss_backward_fake(grad_loss, scales, cut, log_probs, *args):
    return log_probs.new_empty(log_probs.shape)


@torch.library.register_fake("m2po_kernels::policy_loss_backward_out", lib=_lib)
def _policy_loss_backward_out_fake(*args, out):
    return None


def _setup_context(ctx, inputs, output) -> None:
    _, scales, cut, counts, floats = output
    ctx.save_for_backward(scales, cut, *(t for t in inputs[:_N_BATCH] if t is not None))
    ctx.present = [t is not None for t in inputs[:_N_BATCH]]
    ctx.rule = inputs[_N_BATCH:]
    ctx.mark_non_differentiable(scales, cut, counts, floats)


def _policy_loss_grad(ctx, grad_loss, *_):
    scales, cut, *tensors = ctx.saved_tensors
    present = iter(tensors)
    batch = [next(present) if here else None for here in ctx.present]
    grad = torch.ops.m2po_kernels.policy_loss_backward(grad_loss, scales, cut, *batch, *ctx.rule)
    return grad, *(None for _ in range(len(ctx.present) - 1 + len(ctx.rule)))


def _refuse_second_derivative(ctx, *_):
    raise InvalidArgument("m2po_loss and grpo_loss have no second derivative: call backward() without create_graph=True")


torch.library.register_autograd("m2po_kernels::policy_loss", _policy_loss_grad, setup_context=_setup_context, lib=_lib)
torch.library.register_autograd("m2po_kernels::policy_loss_backward", _refuse_second_derivative, lib=_lib)
