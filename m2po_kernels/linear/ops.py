"""The torch.library ops that start from hidden states: each schema, fake kernel and autograd formula once.

What the loss's op returns as d hidden and d weight are sums without the loss's divisor; its backward multiplies them by
`scale` and by the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.m2po_kernels)
from ..errors import InvalidArgument
from ..inputs import wide_dtype
from ..results import COUNTS, FLOATS
from ..rule import Batch, Rule
from .args import N_INPUTS, PARAMETERS, Inputs, LinearArgs
from .policy import loss_forward
from .walk import Walk

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor token_ids, Tensor? temperatures, "
    "Tensor? rows"
)
_ARGS = "float[] numbers, SymInt[] sizes, int[] choices, str? group, str? backend"  # LinearArgs.args()
_BATCH = (
    "Tensor behavior_log_probs, Tensor advantages, Tensor mask, Tensor? ref_log_probs, Tensor? weights, Tensor? keep, "
    "Tensor? denominators"
)
_RULE = "float[] rule_numbers, int[] rule_choices, str? rule_backend"  # Rule.args()
_N_ARGS = 5
SCALED_AT_ONCE = 1 << 22  # elements; 16 MB of fp32 where what is scaled, or the result, has 16 bits
_N_BATCH = len(Batch._fields) - 1
_GRADIENTS = ", ".join(f"Tensor d_{name}" for name in PARAMETERS)

_lib = torch.library.Library("m2po_kernels", "FRAGMENT")
_lib.define(f"linear_log_probs({_INPUTS}, {_ARGS}) -> (Tensor log_probs, Tensor entropy)")
_lib.define(f"linear_log_probs_backward(Tensor grad_log_probs, Tensor? grad_entropy, {_INPUTS}, {_ARGS}) -> ({_GRADIENTS})")
_lib.define(
    f"linear_m2po_loss({_INPUTS}, {_ARGS}, {_BATCH}, {_RULE}) -> (Tensor loss, Tensor log_probs, Tensor entropy, Tensor counts, "
    f"Tensor floats, Tensor scale, Tensor work, {_GRADIENTS})"
)
_lib.define("scaled(Tensor sum, Tensor factor, ScalarType dtype) -> Tensor")


def _split(args: tuple) -> tuple[Inputs, LinearArgs]:
    return Inputs(*args[:N_INPUTS]), LinearArgs.of_args(*args[N_INPUTS : N_INPUTS + _N_ARGS])


def _log_probs(*args):
    inputs, linear = _split(args)
    with torch.no_grad(), torch.autocast(inputs.hidden.device.type, enabled=False):
        walk = Walk(inputs, linear, with_gradients=False)
        log_probs, entropy = _empty_results(inputs, linear)
        for tokens in walk.tokens(inputs.rows):
            rows = walk.visit(tokens).rows
            log_probs[tokens] = rows.log_prob
            if rows.entropy is not None:
                entropy[tokens] = rows.entropy
    if inputs.rows is not None and not linear.gather_rows:
        log_probs = torch.where(inputs.rows, log_probs, 0.0)
        entropy = torch.where(inputs.rows, entropy, 0.0) if linear.with_entropy else entropy
    return log_probs, entropy


def _empty_results(inputs: Inputs, linear: LinearArgs) -> tuple[Tensor, Tensor]:
    n = inputs.token_ids.shape[0]
    log_probs = inputs.hidden.new_zeros(n, dtype=linear.sum_dtype)
    return log_probs, torch.zeros_like(log_probs) if linear.with_entropy else log_probs.new_zeros(0)


def _log_probs_backward(grad_log_probs, grad_entropy, *args):
    inputs, linear = _split(args)
    flows = grad_log_probs != 0
    if grad_entropy is not None:
        flows = flows | (grad_entropy != 0)
    if inputs.rows is not None:
        flows = flows & inputs.rows
        if not linear.gather_rows:
            grad_log_probs = torch.where(inputs.rows, grad_log_probs, 0.0)
            grad_entropy = None if grad_entropy is None else torch.where(inputs.rows, grad_entropy, 0.0)
    inputs = inputs._replace(rows=flows)  # a row that no gradient flows into may hold NaN, and 0 * NaN is NaN
    with torch.no_grad(), torch.autocast(inputs.hidden.device.type, enabled=False):
        walk = Walk(inputs, linear, with_gradients=True)
        for tokens in walk.tokens(flows):
            of_entropy = None if grad_entropy is None else grad_entropy[tokens]
            walk.add_gradient(walk.visit(tokens), grad_log_probs[tokens], of_entropy)
        sums = walk.finish()
    parameters = inputs[: len(PARAMETERS)]
    return tuple(
        total if t is None or not total.numel() else total.to(t.dtype) for total, t in zip(sums, parameters, strict=True)
    )


def _loss(*args):
    inputs, linear = _split(args)
    batch = Batch(inputs.hidden, *args[N_INPUTS + _N_ARGS : N_INPUTS + _N_ARGS + _N_BATCH])  # log_probs: set once they are known
    rule = Rule.of_args(*args[N_INPUTS + _N_ARGS + _N_BATCH :])
    with torch.no_grad(), torch.autocast(inputs.hidden.device.type, enabled=False):
        return loss_forward(inputs, batch, rule, linear)


def _scaled(total, factor, dtype):
    """total * factor in fp32 or fp64, then rounded: as fp16 the 1 / D of a large batch is subnormal, as bf16 off by up to 2^-8.

    In pieces, so that the wide temporaries are small.
    """
    return _scale(total, factor, torch.empty(total.shape, dtype=dtype, device=total.device))


def _scale(total: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    factor = factor.reshape(1)  # of its own dtype in the product; one without dimensions would take that of `total`
    for piece, made in zip(total.reshape(-1).split(SCALED_AT_ONCE), out.view(-1).split(SCALED_AT_ONCE), strict=True):
        torch.mul(piece, factor, out=made)
    return out


for _name, _fn in [
    ("linear_log_probs", _log_probs),
    ("linear_log_probs_backward", _log_probs_backward),
    ("linear_m2po_loss", _loss),
    ("scaled", _scaled),
]:
    _lib.impl(_name, _fn, "CompositeExplicitAutograd")


def _fake_gradients(inputs: Inputs, linear: LinearArgs, sums: bool) -> tuple[Tensor, ...]:
    made = []
    for name, tensor, want in zip(PARAMETERS, inputs, linear.wanted, strict=False):
        if not want or tensor is None:
            made.append(inputs.hidden.new_empty(0))
        else:
            dtype = linear.sum_dtype if sums and name != "hidden" else tensor.dtype
            made.append(tensor.new_empty(tensor.shape, dtype=dtype))
    return tuple(made)


@torch.library.register_fake("m2po_kernels::linear_log_probs", lib=_lib)
def _log_probs_fake(*args):
    return _empty_results(*_split(args))


@torch.library.register_fake("m2po_kernels::linear_log_probs_backward", lib=_lib)
def _log_probs_backward_fake(grad_log_probs, grad_entropy, *args):
    return _fake_gradients(*_split(args), sums=False)


@torch.library.register_fake("m2po_kernels::linear_m2po_loss", lib=_lib)
def _loss_fake(*args):
    inputs, linear = _split(args)
    log_probs, entropy = _empty_results(inputs, linear)
    counts = log_probs.new_empty(len(COUNTS), dtype=torch.int64)
    floats = log_probs.new_empty(len(FLOATS), dtype=wide_dtype(log_probs.device))
    work = torch.empty(3, dtype=torch.int64)
    results = (log_probs.new_empty(()), log_probs, entropy, counts, floats, log_probs.new_empty(()), work)
    return *results, *_fake_gradients(inputs, linear, sums=True)


@torch.library.register_fake("m2po_kernels::scaled", lib=_lib)
def _scaled_fake(total, factor, dtype):
    return total.new_empty(total.shape, dtype=dtype)


def _log_probs_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:N_INPUTS])
    ctx.args = inputs[N_INPUTS:]
    ctx.linear = LinearArgs.of_args(*ctx.args)
    ctx.set_materialize_grads(False)
    if not ctx.linear.entropy_grad:
        ctx.mark_non_differentiable(output[1])


def _log_probs_grad(ctx, grad_log_probs, grad_entropy):
    if not ctx.linear.entropy_grad:
        grad_entropy = None
    rest = (None,) * (N_INPUTS - len(PARAMETERS) + _N_ARGS)
    if grad_log_probs is None and grad_entropy is None:
        return (None,) * len(PARAMETERS) + rest
    inputs = Inputs(*ctx.saved_tensors)
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(grad_entropy)
    grads = torch.ops.m2po_kernels.linear_log_probs_backward(grad_log_probs, grad_entropy, *inputs, *ctx.args)
    return *_wanted(grads, ctx.linear), *rest


def _loss_setup(ctx, inputs, output) -> None:
    others = output[1:]
    scale, gradients = others[4], others[6:]
    ctx.save_for_backward(scale, *gradients)
    ctx.linear = LinearArgs.of_args(*inputs[N_INPUTS : N_INPUTS + _N_ARGS])
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[: len(PARAMETERS)]]
    ctx.rest = len(inputs) - len(PARAMETERS)
    ctx.mark_non_differentiable(*others)
    ctx.owns_sums = False  # `linear_m2po_loss` says otherwise
    ctx.set_materialize_grads(False)  # else zeros as large as all gradients are made for the backward


def _loss_grad(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * (len(PARAMETERS) + ctx.rest)
    if torch.is_grad_enabled():  # create_graph=True; the sums have no history that could refuse later
        _refuse_second_derivative(ctx)
    scale, *sums = ctx.saved_tensors
    factor = grad_loss * scale
    wanted = _wanted(sums, ctx.linear)
    grads = [
        None if total is None else _scaled_sum(total, factor, dtype, ctx.owns_sums)
        for total, dtype in zip(wanted, ctx.dtypes, strict=True)
    ]
    return *grads, *(None for _ in range(ctx.rest))


def _scaled_sum(total: Tensor, factor: Tensor, dtype: torch.dtype, owned: bool) -> Tensor:
    """The gradient made of a saved sum: in its place where nobody will ask for the sum again, as d hidden is large.

    Those who would: a holder of the op's results, a second backward (retain_graph=True), a traced graph, which runs many times.
    """
    keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
    if owned and total.dtype == dtype and type(total) is Tensor and not keep_graph():
        return _scale(total, factor, out=total)
    return torch.ops.m2po_kernels.scaled(total, factor, dtype)


def _wanted(gradients: Sequence[Tensor], linear: LinearArgs) -> list[Tensor | None]:
    return [gradient if want else None for gradient, want in zip(gradients, linear.wanted, strict=True)]


def _refuse_second_derivative(ctx, *_):
    raise InvalidArgument(
        "linear_log_probs and linear_m2po_loss have no second derivative: call backward() without create_graph=True"
    )


torch.library.register_autograd("m2po_kernels::linear_log_probs", _log_probs_grad, setup_context=_log_probs_setup, lib=_lib)
torch.library.register_autograd("m2po_kernels::linear_log_probs_backward", _refuse_second_derivative, lib=_lib)
torch.library.register_autograd("m2po_kernels::linear_m2po_loss", _loss_grad, setup_context=_loss_setup, lib=_lib)
torch.library.register_autograd("m2po_kernels::scaled", _refuse_second_derivative, lib=_lib)
