"""Log-probs from logits as torch sees them: in place, twice, compiled; and m2po_loss_from_logits."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import same_bits
from logits_helpers import need, run
from test_logits import random_case
from torch._dynamo.testing import CompileCounterWithBackend

from m2po_kernels import m2po_loss, m2po_loss_from_logits, select, selective_log_softmax
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.logits_args import LogitsArgs

OPS = torch.ops.m2po_kernels


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# In place.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_inplace_is_the_same_gradient_in_the_logits_memory(shift, dtype, device, backend):
    logits, ids, g, ge = random_case((3, 6, 1500), dtype=dtype, device=device)
    options = {"temperature": 0.8, "logit_softcap": 20.0, "vocab_size": 1490, "shift": shift, "backend": backend}
    ids, g, ge = ids % 1490, g[:, shift:], ge[:, shift:]
    want = run(logits, ids, g, ge, **options)
    leaf = logits.clone().requires_grad_()
    hidden = leaf * 1  # as a model's logits are: the result of an operation that does not need them again
    lp, entropy = selective_log_softmax(hidden, ids, return_entropy=True, entropy_grad=True, inplace=True, **options)
    seen = []
    hidden.register_hook(lambda grad: seen.append(grad.data_ptr()))
    torch.autograd.backward([lp, entropy], [g.to(lp), ge.to(lp)])
    assert seen == [hidden.data_ptr()]
    assert same_bits(hidden.detach().cpu(), want.grad)
    assert leaf.grad is not None
    assert same_bits(leaf.grad.cpu(), want.grad)
    assert same_bits(lp.detach().cpu(), want.log_probs)


def test_second_use_of_logits_that_are_overwritten_is_an_error(device, backend):
    logits, ids, _, _ = random_case((3, 50), device=device)

    def fresh():
        x = logits.clone().requires_grad_() * 1
        return x, selective_log_softmax(x, ids, inplace=True, backend=backend)

    x, lp = fresh()
    lp.sum().backward(retain_graph=True)
    with pytest.raises(InvalidArgument, match=r"inplace=True allows one backward"):
        lp.sum().backward()

    for inplace in (False, True):
        x, lp = fresh()
        other = selective_log_softmax(x, ids, inplace=inplace, backend=backend)
        lp.sum().backward(retain_graph=True)
        with pytest.raises(InvalidArgument, match=r"logits were overwritten.*inplace=True"):
            other.sum().backward()

    x, lp = fresh()
    other = selective_log_softmax(x, ids, inplace=True, backend=backend)
    with pytest.raises(InvalidArgument, match=r"logits were overwritten.*inplace=True"):
        (lp.sum() + other.sum()).backward()

    x, lp = fresh()
    used_elsewhere = x.square().sum()
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used_elsewhere.backward()


def test_inplace_without_a_gradient_leaves_the_logits(device, backend):
    logits, ids, _, _ = random_case((3, 50), device=device)
    before = logits.clone()
    assert not selective_log_softmax(logits, ids, inplace=True, backend=backend).requires_grad
    leaf = logits.requires_grad_()
    with torch.no_grad():
        assert not selective_log_softmax(leaf, ids, inplace=True, backend=backend).requires_grad
    assert same_bits(leaf.detach(), before)


def test_inplace_refuses_second_derivatives_at_once(device, backend):
    logits, ids, _, _ = random_case((3, 50), device=device)
    lp = selective_log_softmax(logits.requires_grad_(), ids, inplace=True, backend=backend)
    with pytest.raises(InvalidArgument, match=r"second derivative.*create_graph"):
        torch.autograd.grad(lp.sum(), logits, create_graph=True)


# Autograd.


def test_second_backward_gives_the_same_gradient(device, backend):
    logits, ids, g, _ = random_case((3, 70), device=device)
    lp = selective_log_softmax(logits.requires_grad_(), ids, backend=backend)
    (first,) = torch.autograd.grad(lp, logits, g, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(lp, logits, g)
    assert same_bits(first, second)
    assert same_bits(first, kept)


def test_second_derivative_is_refused(device, backend):
    logits, ids, _, _ = random_case((3, 50), device=device)
    lp = selective_log_softmax(logits.requires_grad_(), ids, backend=backend)
    (grad,) = torch.autograd.grad(lp.sum(), logits, create_graph=True)
    with pytest.raises(InvalidArgument, match=r"second derivative.*create_graph"):
        grad.sum().backward()


def test_entropy_is_detached_unless_asked(device, backend):
    logits, ids, g, ge = random_case((3, 70), device=device)
    leaf = logits.requires_grad_()
    lp, entropy = selective_log_softmax(leaf, ids, return_entropy=True, backend=backend)
    assert lp.requires_grad
    assert not entropy.requires_grad
    only_lp = run(logits, ids, g, backend=backend)
    _, entropy = selective_log_softmax(leaf, ids, return_entropy=True, entropy_grad=True, backend=backend)
    (only_entropy,) = torch.autograd.grad(entropy, leaf, ge)
    both = run(logits, ids, g, ge, backend=backend)
    total = only_lp.grad + only_entropy.cpu()
    assert bool(((both.grad - total).abs() <= 2.0**-22 * (only_lp.grad.abs() + only_entropy.cpu().abs())).all())


def test_what_is_saved_for_backward(device, backend):
    """The caller's logits themselves, the ids, and 4 bytes a row."""
    logits, ids, _, _ = random_case((3, 5, 70), dtype=torch.bfloat16, device=device)
    leaf = logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        selective_log_softmax(leaf, ids, backend=backend)
    assert sum(t.data_ptr() == leaf.data_ptr() for t in saved) == 1
    others = [t for t in saved if t.data_ptr() not in (leaf.data_ptr(), ids.data_ptr())]
    assert sum(t.numel() * t.element_size() for t in others) == 4 * ids.numel()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "logit_scale": 1.5},
        {"logit_softcap": 2.0, "vocab_size": 6},
        {"shift": 1},
        {"return_entropy": True, "entropy_grad": True, "logit_softcap": 4.0},
    ],
    ids=str,
)
def test_gradcheck_in_fp64(options, device, backend):
    logits, ids, _, _ = random_case((2, 3, 7), dtype=torch.float64, device=device)
    need(backend, logits)
    ids = ids % 6
    assert torch.autograd.gradcheck(
        lambda x: selective_log_softmax(x, ids, **options, backend=backend), (logits.requires_grad_(),), nondet_tol=0.0
    )


def op_arguments(backend, device, dtype, extras: bool, inplace: bool = False, requires_grad: bool = False):
    logits, ids, g, ge = random_case((2, 4, 33), dtype=dtype, device=device)
    args = LogitsArgs(
        logit_softcap=9.0 if extras else 0.0,
        vocab_size=31 if extras else 33,
        shift=int(extras),
        with_entropy=extras,
        entropy_grad=extras,
    )
    n = 4 - args.shift
    temperatures = torch.full((2, n), 0.5, device=device) if extras else None
    inputs = (logits.requires_grad_(requires_grad), ids % 31, temperatures)
    scalars = (*args.args(), inplace, backend)
    return inputs, scalars, (g[:, :n].float(), ge[:, :n].float() if extras else None)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, extras, device, backend):
    inputs, scalars, grads = op_arguments(backend, device, dtype, extras)
    torch.library.opcheck(OPS.selective_log_softmax.default, (*inputs, *scalars))
    results = OPS.selective_log_softmax(*inputs, *scalars)
    arguments = (*grads, *results, *inputs, *scalars)
    torch.library.opcheck(OPS.selective_log_softmax_backward.default, arguments)
    torch.library.opcheck(OPS.selective_log_softmax_backward_inplace.default, arguments)


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck_with_gradient(extras, device, backend):
    inputs, scalars, _ = op_arguments(backend, device, torch.float32, extras, requires_grad=True)
    torch.library.opcheck(OPS.selective_log_softmax.default, (*inputs, *scalars))


# torch.compile.


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_call_is_the_eager_call(inplace, compiler, device, backend):
    logits, ids, g, _ = random_case((3, 6, 257), device=device)
    weight = torch.tensor(1.25, device=device)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return selective_log_softmax(x * w, ids, temperature=0.9, inplace=inplace, backend=backend)

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend=compiler)):
        x, w = logits.clone().requires_grad_(), weight.clone().requires_grad_()
        lp = fn(x, w)
        lp.backward(g)
        assert x.grad is not None
        results.append((lp.detach(), x.grad))
        assert same_bits(x.detach(), logits)
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


def test_compiled_options(device, backend):
    logits, ids, g, ge = random_case((3, 6, 257), device=device)
    temperature = torch.linspace(0.5, 1.5, 15, device=device).reshape(3, 5)
    options = {"shift": 1, "temperature": temperature, "logit_softcap": 9.0, "vocab_size": 250, "return_entropy": True}
    ids, g, ge = ids % 250, g[:, 1:], ge[:, 1:]
    results = []
    for fn in (selective_log_softmax, torch.compile(selective_log_softmax, fullgraph=True, backend="aot_eager")):
        x = logits.clone().requires_grad_()
        lp, entropy = fn(x, ids, **options, entropy_grad=True, backend=backend)
        results.append((lp.detach(), entropy.detach(), torch.autograd.grad([lp, entropy], x, [g, ge])[0]))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_lengths_do_not_recompile(device, backend):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m2po_loss_from_logits, fullgraph=True, backend=counter)
    frames = []
    for n in (5, 6, 9, 17):
        logits, ids, g, _ = random_case((2, n, 33), device=device)
        lp = selective_log_softmax(logits, ids, backend=backend)
        compiled(logits.requires_grad_(), ids, lp, g, torch.ones_like(g), backend=backend).loss.backward()
        frames.append(counter.frame_count)
    assert frames[-1] == frames[1] <= 2, frames


# m2po_loss_from_logits.


def loss_case(device, dtype=torch.float32, shift: int = 0, packed: bool = False):
    logits, ids, _, _ = random_case((24, 90) if packed else (4, 6 + shift, 90), dtype=dtype, device=device)
    lp = selective_log_softmax(logits, ids, shift=shift, backend="eager")
    g = torch.Generator().manual_seed(5)
    behavior = lp - torch.randn(lp.shape, generator=g).to(lp) * 0.3
    advantages = torch.randint(-1, 2, lp.shape, generator=g).to(lp)
    mask = torch.rand(lp.shape, generator=g).to(lp) < 0.8
    return logits, ids, behavior, advantages, mask


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ({}, {}),
        ({"shift": 1}, {"reduction": "sequence-mean", "ratio_cap": 1.2}),
        ({"packed": True}, {"temperature": 0.9, "denominator": "kept"}),
        ({}, {"kl_coef": 0.1, "logit_softcap": 30.0, "vocab_size": 90, "nonfinite": "drop", "scope": "all"}),
        ({}, {"reduction": "none", "m2_threshold": 0.01, "logit_scale": 1.1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_loss_from_logits_is_the_two_calls(inplace, form, options, device, backend):
    logits, ids, behavior, advantages, mask = loss_case(device, **form)
    options = dict(options)
    if "kl_coef" in options:
        options["ref_log_probs"] = behavior - 0.1
    scaling = {k: options[k] for k in ("temperature", "logit_scale", "logit_softcap", "vocab_size") if k in options}
    rest = {k: v for k, v in options.items() if k not in scaling}
    shift = {"shift": form.get("shift", 0)}

    x = logits.clone().requires_grad_()
    lp = selective_log_softmax(x, ids, **scaling, **shift, backend=backend)
    want = m2po_loss(lp, behavior, advantages, mask, **rest, backend=backend)
    want.loss.sum().backward()
    y = logits.clone().requires_grad_()
    got = m2po_loss_from_logits(y * 1, ids, behavior, advantages, mask, **options, **shift, inplace=inplace, backend=backend)
    got.loss.sum().backward()
    assert same_bits(got.loss, want.loss)
    assert same_bits(got.metrics.floats, want.metrics.floats)
    assert x.grad is not None
    assert y.grad is not None
    assert bool((x.grad != 0).any())
    assert torch.equal(y.grad, x.grad)


@pytest.mark.parametrize("shift", [0, 1])
def test_what_stands_where_the_mask_is_0_changes_nothing(shift, device, backend):
    logits, ids, behavior, advantages, mask = loss_case(device, shift=shift)
    temperature = torch.full(behavior.shape, 0.9, device=device)
    options = {"shift": shift, "temperature": temperature, "backend": backend}

    def call(x, ids, behavior, advantages, temperature):
        x = x.clone().requires_grad_()
        out = m2po_loss_from_logits(x, ids, behavior, advantages, mask, **{**options, "temperature": temperature})
        out.loss.backward()
        return out, x.grad

    want, want_grad = call(logits, ids, behavior, advantages, temperature)
    where = torch.cat([mask, torch.zeros_like(mask[:, :1])], 1) if shift else mask
    dirty = torch.where(where[..., None], logits, math.nan)
    ids = ids.clone()
    ids[:, shift:][~mask] = -100
    holes = [torch.where(mask, t, math.nan) for t in (behavior, advantages)]
    got, grad = call(dirty, ids, *holes, torch.where(mask, temperature, 0.0))
    assert same_bits(got.loss, want.loss)
    assert same_bits(got.metrics.floats, want.metrics.floats)
    assert torch.equal(grad, want_grad)
    assert bool((grad[~where] == 0).all())


def test_given_selection(device, backend):
    logits, ids, behavior, advantages, mask = loss_case(device)
    lp = selective_log_softmax(logits, ids, backend=backend)
    sel = select(lp, behavior, advantages, mask, backend=backend)
    out = m2po_loss_from_logits(logits, ids, behavior, advantages, mask, selection=sel, backend=backend)
    want = m2po_loss(lp, behavior, advantages, mask, backend=backend)
    assert torch.equal(out.loss, want.loss)
    assert int(sel.metrics.dropped_tokens) > 0


def test_errors_of_the_loss_still_name_the_argument():
    logits, ids, behavior, advantages, mask = loss_case("cpu")
    with pytest.raises(MissingBehaviorLogProbs):
        m2po_loss_from_logits(logits, ids, None, advantages, mask)
    with pytest.raises(InvalidArgument, match="mask must have the shape"):
        m2po_loss_from_logits(logits, ids, behavior, advantages, mask[:, :-1])
    with pytest.raises(InvalidArgument, match="token_ids must be in"):
        m2po_loss_from_logits(logits, ids + 90, behavior, advantages, mask)
    with pytest.raises(InvalidArgument, match="m2_threshold"):
        m2po_loss_from_logits(logits, ids, behavior, advantages, mask, m2_threshold=-1.0)
