"""The ops as torch sees them: schemas, fake kernels, autograd formulas, torch.compile."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import Result, Tokens, assert_same, random_tokens, run, same_bits
from torch._dynamo.testing import CompileCounterWithBackend

from m2po_kernels import grpo_loss, m2po_loss, select
from m2po_kernels.errors import InvalidArgument
from m2po_kernels.inputs import check_batch
from m2po_kernels.rule import Rule

OPS = torch.ops.m2po_kernels
BOTH = pytest.mark.parametrize("loss_fn", [m2po_loss, grpo_loss], ids=["m2po", "grpo"])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(tokens: Tokens, extras: bool, **rule: object) -> tuple:
    """What the ops take: the batch, then the rule. extras: every optional tensor is there."""
    batch, _ = check_batch(*tokens, ref_log_probs=tokens.log_probs.detach() - 0.25 if extras else None)
    if extras:
        lp = tokens.log_probs
        batch = batch._replace(
            weights=torch.full(lp.shape, 0.5, device=lp.device),
            keep=tokens.mask & (lp.detach() < -0.5),
            denominators=torch.tensor([7.0, 9.0], dtype=torch.float64, device=lp.device),
        )
    return (*batch, *Rule(**rule, kl_coef=0.1 if extras else 0.0).args())


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(extras, dtype, device, backend):
    tokens = random_tokens((3, 7), dtype=dtype, device=device)
    args = arguments(tokens, extras, backend=backend)
    torch.library.opcheck(OPS.select.default, args)
    _, scales, cut, *_ = OPS.policy_loss(*args)
    one = torch.ones((), device=device)
    torch.library.opcheck(OPS.policy_loss_backward.default, (one, scales, cut, *args))
    out = torch.zeros_like(tokens.log_probs)
    torch.library.opcheck(OPS.policy_loss_backward_out.default, (one, scales, cut, *args), {"out": out})


@pytest.mark.parametrize("options", [{}, {"per_token": True, "normalizer": "one"}, {"rule": "clip"}], ids=str)
@pytest.mark.parametrize("extras", [False, True])
def test_opcheck_with_gradient(options, extras, device, backend):
    tokens = random_tokens((3, 7), device=device)
    tokens.log_probs.requires_grad_()
    torch.library.opcheck(OPS.policy_loss.default, arguments(tokens, extras, **options, backend=backend))


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sequence-mean"}, {"reduction": "none"}, {"kl": True}, {"ratio_cap": 1.5}, {"denominator": 7}],
    ids=str,
)
def test_gradcheck_in_fp64(loss_fn, options, device, backend):
    """Away from the cut, the clip bounds and the cap, where the loss has no derivative: no d is within 1e-3 of one."""
    tokens = random_tokens((3, 9), dtype=torch.float64, device=device, seed=4)
    d = (tokens.log_probs - tokens.behavior_log_probs).abs()
    for kink in (0.0, math.log(1.2), -math.log(0.8), math.log(1.5)):
        d = torch.where((d - kink).abs() < 1e-3, d + 3e-3, d)
    lp = tokens.behavior_log_probs + d * (tokens.log_probs - tokens.behavior_log_probs).sign()
    if options.get("kl"):
        options = {"kl_coef": 0.3, "ref_log_probs": lp - 0.2}
    rest = list(tokens)[1:]
    assert torch.autograd.gradcheck(
        lambda x: loss_fn(x, *rest, **options, backend=backend).loss, (lp.detach().requires_grad_(),), nondet_tol=0.0
    )


def compiled_run(loss_fn, tokens: Tokens, compiler: str, **options) -> Result:
    return run(torch.compile(loss_fn, fullgraph=True, backend=compiler), tokens, **options)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@BOTH
def test_compiled_call_is_the_eager_call(loss_fn, compiler, device, backend):
    tokens = random_tokens((6, 20), device=device)
    options = {"backend": backend, "kl_coef": 0.1, "ref_log_probs": tokens.behavior_log_probs, "reduction": "token-mean"}
    assert_same(compiled_run(loss_fn, tokens, compiler, **options), run(loss_fn, tokens, **options))


def test_compiled_options(device, backend):
    """The other ways through the Python code, each in one graph."""
    tokens = random_tokens((6, 20), device=device)
    flat = tokens.map(torch.flatten)
    cu_seqlens = torch.arange(0, 121, 20, dtype=torch.int32, device=device)
    sel = select(*tokens, backend=backend)
    for given, options in [
        (tokens, {"reduction": "sequence-mean"}),
        (tokens, {"reduction": "none", "nonfinite": "drop"}),
        (tokens, {"denominator": torch.tensor(11.0, device=device)}),
        (tokens, {"denominator": "kept", "ratio_cap": 1.5}),
        (tokens, {"selection": sel}),
        (flat, {"reduction": "sequence-mean", "cu_seqlens": cu_seqlens}),
        (dataclasses.replace(flat, advantages=flat.advantages[:6].clone()), {"cu_seqlens": cu_seqlens}),
    ]:
        torch._dynamo.reset()
        want = run(m2po_loss, given, **options, backend=backend)
        got = compiled_run(m2po_loss, given, "aot_eager", **options, backend=backend)
        torch.testing.assert_close(got.grad, want.grad, rtol=2.0**-22, atol=0)  # weights may be computed in another order
        torch.testing.assert_close(got.loss, want.loss, rtol=2.0**-22, atol=0)
        assert torch.equal(got.counts, want.counts)


def test_compiled_select(device, backend):
    tokens = random_tokens((6, 20), device=device)
    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tokens, backend=backend).keep, select(*tokens, backend=backend).keep)


def test_compiled_inside_a_model_step(device, backend):
    """The call between other operations of the graph, whose gradient passes through it."""
    tokens = random_tokens((6, 20), device=device)
    weight = torch.tensor(0.9, device=device, requires_grad=True)
    lp, *rest = tokens

    def step(w: torch.Tensor) -> torch.Tensor:
        return m2po_loss(lp * w, *rest, backend=backend).loss * 2

    (want,) = torch.autograd.grad(step(weight), weight)
    (got,) = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(weight), weight)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_lengths_do_not_recompile(device, backend):
    """A length of its own for the first call, a symbol from the second on; with dynamic=True from the first on."""
    for dynamic, settled in ((None, 1), (True, 0)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(m2po_loss, fullgraph=True, backend=counter, dynamic=dynamic)
        frames = []
        for n in (20, 21, 33, 64, 47, 128):
            tokens = random_tokens((6, n), device=device)
            assert_same(run(compiled, tokens, backend=backend), run(m2po_loss, tokens, backend=backend))
            frames.append(counter.frame_count)
        assert frames[-1] == frames[settled] <= 2, (dynamic, frames)


def test_marked_dimension_does_not_recompile(device, backend):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(select, fullgraph=True, backend=counter)
    for n in (20, 33, 64):
        tokens = random_tokens((n,), device=device)
        for t in tokens:
            torch._dynamo.mark_dynamic(t, 0)
        assert torch.equal(compiled(*tokens, backend=backend).keep, select(*tokens, backend=backend).keep)
    assert counter.frame_count == 1


@BOTH
def test_second_derivative_is_refused(loss_fn, device, backend):
    tokens = random_tokens((3, 7), device=device)
    lp = tokens.log_probs.requires_grad_()
    loss = loss_fn(lp, *list(tokens)[1:], backend=backend).loss
    (grad,) = torch.autograd.grad(loss, lp, create_graph=True)
    with pytest.raises(InvalidArgument, match=r"second derivative.*create_graph"):
        grad.sum().backward()


@BOTH
def test_second_backward_gives_the_same_gradient(loss_fn, device, backend):
    tokens = random_tokens((3, 70), device=device)
    lp = tokens.log_probs.requires_grad_()
    loss = loss_fn(lp, *list(tokens)[1:], backend=backend).loss
    (first,) = torch.autograd.grad(loss, lp, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, lp, retain_graph=True)
    assert same_bits(first, second)
    (third,) = torch.autograd.grad(3 * loss, lp)
    assert same_bits(first, kept)
    torch.testing.assert_close(third, 3 * first, rtol=2.0**-22, atol=0)


@BOTH
def test_only_log_probs_get_a_gradient(loss_fn, device, backend):
    tokens = random_tokens((3, 7), device=device)
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in tokens]
    ref = tokens.behavior_log_probs.detach().clone().requires_grad_()
    out = loss_fn(*leaves, kl_coef=0.1, ref_log_probs=ref, backend=backend)
    out.loss.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is leaves[2].grad is ref.grad is None


@BOTH
def test_no_grad_does_no_gradient_work(loss_fn, device, backend):
    tokens = random_tokens((3, 7), device=device)
    want = run(loss_fn, tokens, backend=backend)
    lp = tokens.log_probs.requires_grad_()
    with torch.no_grad():
        out = loss_fn(lp, *list(tokens)[1:], backend=backend)
    assert not out.loss.requires_grad
    assert same_bits(out.loss.cpu(), want.loss)
    with torch.inference_mode():
        assert same_bits(loss_fn(lp, *list(tokens)[1:], backend=backend).loss.cpu(), want.loss)
    assert not loss_fn(lp.detach(), *list(tokens)[1:], backend=backend).loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradient_into_a_given_buffer(dtype, device, backend):
    """Any strides; every element is written, none beside it."""
    tokens = random_tokens((5, 33), dtype=dtype, device=device)
    args = arguments(tokens, False, backend=backend)
    _, scales, cut, *_ = OPS.policy_loss(*args)
    one = torch.ones((), device=device)
    want = OPS.policy_loss_backward(one, scales, cut, *args)
    frame = torch.full((12, 70), 7.0, dtype=dtype, device=device)
    for out in (torch.empty_like(want), torch.empty(33, 5, dtype=dtype, device=device).t(), frame[1:11:2, 2:68:2]):
        assert out.shape == want.shape
        OPS.policy_loss_backward_out(one, scales, cut, *args, out=out)
        assert same_bits(out, want)
    frame[1:11:2, 2:68:2] = 7.0
    assert bool((frame == 7.0).all())


def test_inputs_are_not_written(device, backend):
    tokens = random_tokens((5, 33), device=device)
    before = tokens.map(torch.clone)
    run(m2po_loss, tokens, kl_coef=0.1, ref_log_probs=tokens.behavior_log_probs, backend=backend)
    select(*tokens, backend=backend)
    assert all(same_bits(a, b) for a, b in zip(tokens, before, strict=True))
