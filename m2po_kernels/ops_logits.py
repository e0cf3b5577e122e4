"""The torch.library ops that start from logits: each schema, fake kernel and autograd formula once.

logits are [B, T + shift, V] with any strides, token_ids [B, T + shift]; log_probs, entropy and temperatures are [B, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch
from .errors import InvalidArgument
from .inputs import compute_dtype
from .logits_args import LogitsArgs

_TOKENS = "Tensor token_ids, Tensor? temperatures"
_INPUTS = f"Tensor logits, {_TOKENS}"
_SCALARS = (
    "float temperature, float logit_scale, float logit_softcap, SymInt vocab_size, int shift, bool with_entropy, "
    "bool entropy_grad, bool inplace, str? backend"
)
_GRADS = "Tensor grad_log_probs, Tensor? grad_entropy, Tensor log_probs, Tensor entropy"
_N_INPUTS = 3

_lib = torch.library.Library("m2po_kernels", "FRAGMENT")
_lib.define(f"selective_log_softmax({_INPUTS}, {_SCALARS}) -> (Tensor log_probs, Tensor entropy)")
_lib.define(f"selective_log_softmax_backward({_GRADS}, {_INPUTS}, {_SCALARS}) -> Tensor")
_lib.define(f"selective_log_softmax_backward_inplace({_GRADS}, Tensor(a!) logits, {_TOKENS}, {_SCALARS}) -> ()")


def _split(scalars: tuple) -> tuple[LogitsArgs, str | None]:
    return LogitsArgs(*scalars[:-2]), scalars[-1]


def _log_softmax(logits, token_ids, temperatures, *scalars):
    args, backend = _split(scalars)
    module = dispatch.backend_for_logits(logits, args, backend)
    if token_ids.shape[1] > args.shift and token_ids.shape[0]:
        if logits.device.type == "cpu":  # here reading a value costs no wait for a device
            check_values(token_ids[:, args.shift :], temperatures, args.vocab_size)
        return module.log_softmax(logits, token_ids, temperatures, args)
    return _empty_results(logits, args)


def check_values(token_ids: Tensor, temperatures: Tensor | None, vocab_size: int) -> None:
    """Raises InvalidArgument unless every id is in the vocabulary and every temperature positive. Reads them: for a CPU."""
    low, high = (int(x) for x in torch.aminmax(token_ids))
    if low < 0 or high >= vocab_size:
        raise InvalidArgument(f"token_ids must be in [0, {vocab_size}), the vocabulary; got ids from {low} to {high}")
    if temperatures is not None and not bool((temperatures > 0).all()):
        raise InvalidArgument(f"temperature must be > 0 at every token; got {float(temperatures.min())!r} as the smallest")


def _empty_results(logits: Tensor, args: LogitsArgs) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], logits.shape[1] - args.shift)
    log_probs = logits.new_empty(shape, dtype=compute_dtype(logits))
    return log_probs, log_probs.new_empty(shape if args.with_entropy else (0,))


def _log_softmax_backward(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, *scalars):
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_gradient(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, scalars, out)
    return out


def _log_softmax_backward_inplace(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, *scalars):
    _write_gradient(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, scalars, logits)


def _write_gradient(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, scalars, out) -> None:
    args, backend = _split(scalars)
    module = dispatch.backend_for_logits(logits, args, backend)
    if logits.numel():
        module.log_softmax_backward(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, args, out)


for _name, _fn in [
    ("selective_log_softmax", _log_softmax),
    ("selective_log_softmax_backward", _log_softmax_backward),
    ("selective_log_softmax_backward_inplace", _log_softmax_backward_inplace),
]:
    _lib.impl(_name, _fn, "CompositeExplicitAutograd")


@torch.library.register_fake("m2po_kernels::selective_log_softmax", lib=_lib)
def _log_softmax_fake(logits, token_ids, temperatures, *scalars):
    return _empty_results(logits, _split(scalars)[0])


@torch.library.register_fake("m2po_kernels::selective_log_softmax_backward", lib=_lib)
def _log_softmax_backward_fake(grad_log_probs, grad_entropy, log_probs, entropy, logits, *args):
    return logits.new_empty(logits.shape)


@torch.library.register_fake("m2po_kernels::selective_log_softmax_backward_inplace", lib=_lib)
def _log_softmax_backward_inplace_fake(*args):
    return None


def _setup_context(ctx, inputs, output) -> None:
    log_probs, entropy = output
    ctx.save_for_backward(*inputs[:_N_INPUTS], log_probs, entropy)
    ctx.scalars = inputs[_N_INPUTS:]
    ctx.args = LogitsArgs(*ctx.scalars[:-2])
    ctx.overwritten = False
    ctx.set_materialize_grads(False)
    if not ctx.args.entropy_grad:
        ctx.mark_non_differentiable(entropy)


def _log_softmax_grad(ctx, grad_log_probs, grad_entropy):
    rest = (None,) * (_N_INPUTS - 1 + len(ctx.scalars))
    if not ctx.args.entropy_grad:
        grad_entropy = None
    if grad_log_probs is None and grad_entropy is None:
        return None, *rest
    inplace = ctx.scalars[-2]
    if ctx.overwritten:
        raise InvalidArgument(
            "inplace=True allows one backward: the logits that a second one needs are overwritten by the gradient; "
            "pass inplace=False"
        )
    logits, token_ids, temperatures, log_probs, entropy = _saved(ctx)
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(log_probs)
    tensors = (grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures)
    if not inplace:
        return torch.ops.m2po_kernels.selective_log_softmax_backward(*tensors, *ctx.scalars), *rest
    if torch.is_grad_enabled():
        _refuse_second_derivative(ctx)
    ctx.overwritten = True
    grad = logits.detach()
    torch.ops.m2po_kernels.selective_log_softmax_backward_inplace(*tensors[:4], grad, *tensors[5:], *ctx.scalars)
    torch.autograd.graph.increment_version(grad)  # so that torch notices if anyone else needs these logits later
    return grad, *rest


def _saved(ctx) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise InvalidArgument(
            "logits were overwritten between selective_log_softmax and its backward, by an in-place operation or by the backward "
            "of another call with inplace=True: with inplace=True the logits may have no second use"
        ) from error


def _refuse_second_derivative(ctx, *_):
    raise InvalidArgument("selective_log_softmax has no second derivative: call backward() without create_graph=True")


torch.library.register_autograd("m2po_kernels::selective_log_softmax", _log_softmax_grad, setup_context=_setup_context, lib=_lib)
torch.library.register_autograd("m2po_kernels::selective_log_softmax_backward", _refuse_second_derivative, lib=_lib)
