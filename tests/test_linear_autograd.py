"""The functions from hidden states as torch sees them: saved tensors, checkpointing, compile, opcheck, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import same_bits
from linear_helpers import Case, gradients, loss_tensors, make_case
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from m2po_kernels import linear_log_probs, linear_m2po_loss
from m2po_kernels.errors import InvalidArgument
from m2po_kernels.linear import ops, softmax, walk
from m2po_kernels.linear.args import Inputs, LinearArgs

OPS = torch.ops.m2po_kernels
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_of(case: Case, tokens, **options):
    return linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens, **case.head, **options)


def saved_bytes(call) -> dict[int, int]:
    """Bytes of each storage that `call` saves for its backward."""
    saved: dict[int, int] = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        note.result = call()
    return saved


def test_what_log_probs_save():
    """The caller's hidden states, weight and ids."""
    case = make_case((4, 10), dtype=torch.bfloat16).leaves()
    saved = saved_bytes(lambda: linear_log_probs(case.hidden, case.weight, case.token_ids))
    assert set(saved) == {t.untyped_storage().data_ptr() for t in (case.hidden, case.weight, case.token_ids)}


def test_what_the_loss_saves():
    """One gradient per parameter, fp32 for the weight's, and the scale: nothing that grows with tokens times vocabulary."""
    case = make_case((4, 10), dtype=torch.bfloat16, bias=True).leaves()
    tokens = loss_tensors(case)
    saved = saved_bytes(lambda: loss_of(case, tokens))
    own = case.hidden.numel() * 2 + (case.weight.numel() + case.bias.numel()) * 4
    assert own <= sum(saved.values()) <= own + 64
    assert case.hidden.untyped_storage().data_ptr() not in saved


def test_second_backward_gives_the_same_gradient():
    case = make_case((4, 10)).leaves()
    tokens = loss_tensors(case)
    for output, flow in [
        (loss_of(case, tokens).loss, torch.tensor(2.0)),
        (linear_log_probs(case.hidden, case.weight, case.token_ids), torch.randn(4, 10)),
    ]:
        first = torch.autograd.grad(output, [case.hidden, case.weight], flow, retain_graph=True)
        kept = [g.clone() for g in first]
        for g in first:
            g.zero_()
        second = torch.autograd.grad(output, [case.hidden, case.weight], flow)
        assert all(same_bits(a, b) for a, b in zip(second, kept, strict=True))


def test_second_derivatives_are_refused():
    case = make_case((4, 10)).leaves()
    outputs = [loss_of(case, loss_tensors(case)).loss, linear_log_probs(case.hidden, case.weight, case.token_ids).sum()]
    for output in outputs:
        with pytest.raises(InvalidArgument, match=r"second derivative.*create_graph"):
            torch.autograd.grad(output, case.hidden, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_scale_is_not_rounded_to_the_type_of_hidden(dtype):
    """1 / D of a batch of 2.9 million tokens is 5.8 units of the smallest fp16."""
    total = torch.linspace(-4000, 4000, 100, dtype=dtype)
    factor = torch.tensor(1 / 2.9e6)
    got = OPS.scaled(total, factor, dtype)
    assert torch.equal(got, (total.double() * factor.double()).to(dtype))
    assert not torch.equal(got, total * factor.to(dtype))  # the control


def test_no_gradient_work_under_no_grad():
    case = make_case((4, 10)).leaves()
    tokens = loss_tensors(case)
    with torch.no_grad():
        out = loss_of(case, tokens)
        assert not linear_log_probs(case.hidden, case.weight, case.token_ids).requires_grad
    assert not out.loss.requires_grad
    assert out.work[1:].tolist() == [0, 0]
    assert same_bits(out.loss, loss_of(case, tokens).loss.detach())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    case = make_case((4, 10)).leaves()
    tokens = loss_tensors(case)
    want = gradients(case, (loss_of(case, tokens).loss, torch.ones(())))

    def step(hidden, weight):
        lp = linear_log_probs(hidden, weight, case.token_ids)
        return linear_m2po_loss(hidden, weight, case.token_ids, *tokens).loss + 0.0 * lp.sum()

    case.hidden.grad = case.weight.grad = None
    checkpoint(step, case.hidden, case.weight, use_reentrant=use_reentrant).backward()
    assert torch.equal(case.hidden.grad, want["hidden"])
    assert torch.equal(case.weight.grad, want["weight"])


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "logit_softcap": 4.0}, {"return_entropy": True, "entropy_grad": True, "vocab_size": 10}],
    ids=str,
)
def test_gradcheck_in_fp64(options):
    case = make_case((2, 3), width=4, vocab=11, dtype=torch.float64, bias=True, lora=2).leaves()
    ids = case.token_ids % 10

    def call(hidden, weight, bias, lora_a, lora_b):
        return linear_log_probs(hidden, weight, ids, bias=bias, lora_a=lora_a, lora_b=lora_b, lora_scale=0.5, **options)

    assert torch.autograd.gradcheck(call, tuple(case.parameters().values()), nondet_tol=0.0)


def test_gradcheck_of_the_loss_in_fp64():
    """With the selection's decision far from any step of the finite differences."""
    case = make_case((3, 5), width=4, vocab=11, dtype=torch.float64, bias=True).leaves()
    tokens = tuple(t.double() if t.is_floating_point() else t for t in loss_tensors(case))
    dropped = int(loss_of(case, tokens, m2_threshold=0.01).metrics.dropped_tokens)
    assert dropped > 0

    def call(hidden, weight, bias):
        return linear_m2po_loss(hidden, weight, case.token_ids, *tokens, bias=bias, m2_threshold=0.01).loss

    assert torch.autograd.gradcheck(call, tuple(case.parameters().values()), nondet_tol=0.0)


# torch.compile and the ops.


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_calls_are_the_eager_calls(compiler):
    case = make_case((4, 10), bias=True)
    tokens = loss_tensors(case)

    def step(hidden, weight, bias):
        out = linear_m2po_loss(hidden * 1.5, weight, case.token_ids, *tokens, bias=bias, return_entropy=True)
        lp = linear_log_probs(hidden, weight, case.token_ids, mask=tokens[2], temperature=0.9)
        return out.loss + 0.1 * lp.mean(), out.entropy, out.metrics.floats

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend=compiler)):
        leaves = case.leaves()
        loss, *others = fn(leaves.hidden, leaves.weight, leaves.bias)
        got = gradients(leaves, (loss, torch.ones(())))
        results.append([loss.detach(), *others, *got.values()])
    for a, b in zip(*results, strict=True):
        # The sum of the two gradients, and of the loss, may be fused with a product.
        assert bool(((a - b).abs() <= 4 * 2.0**-24 * a.abs().max()).all())


def test_lengths_do_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_m2po_loss, fullgraph=True, backend=counter)
    frames = []
    for n in (5, 6, 9, 17):
        case = make_case((2, n)).leaves()
        tokens = loss_tensors(case)
        compiled(case.hidden, case.weight, case.token_ids, *tokens).loss.backward()
        frames.append(counter.frame_count)
    assert frames[-1] == frames[1] <= 2, frames


def test_the_two_step_form_compiles():
    case = make_case((4, 10)).leaves()
    tokens = loss_tensors(case)
    compiled = torch.compile(linear_m2po_loss, fullgraph=True, backend="aot_eager")
    for options in ({"reduction": "none"}, {"gather_rows": False}):
        got = compiled(case.hidden, case.weight, case.token_ids, *tokens, **options)
        want = linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens, **options)
        assert same_bits(got.loss.detach(), want.loss.detach())
        a, b = (gradients(case, (o.loss.sum(), torch.ones(()))) for o in (got, want))
        assert all(same_bits(a[n], b[n]) for n in a)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(extras, requires_grad, monkeypatch):
    """The ops themselves, with the arguments that the functions give them."""
    case = make_case((3, 5), bias=extras, lora=2 if extras else 0)
    case = case.leaves() if requires_grad else case
    tokens = loss_tensors(case)
    calls = []

    class Recording:
        def __getattr__(self, name):
            op = getattr(OPS, name)
            return lambda *args: calls.append((op, args)) or op(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "m2po_kernels", Recording())
        out = loss_of(case, tokens, return_entropy=extras)
        lp = linear_log_probs(case.hidden, case.weight, case.token_ids, **case.head)
        if requires_grad:
            (out.loss + lp.sum()).backward(retain_graph=True)  # else sums are scaled in place, by no op
    own = [(op, args) for op, args in calls if op.__name__.startswith(("linear", "scaled"))]
    names = {op.__name__ for op, _ in own}
    assert names == {"linear_m2po_loss", "linear_log_probs"} | (
        {"linear_log_probs_backward", "scaled"} if requires_grad else set()
    )
    for op, args in own:
        first = op.__name__ in ("linear_m2po_loss", "linear_log_probs")  # the others refuse a second derivative
        detached = [a.detach().requires_grad_(first and a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(op.default, tuple(detached))


# CUDA graphs.


def test_without_gathering_nothing_waits_for_the_device(monkeypatch):
    """Fake tensors have no values, so that whatever would bring one to the host raises; gathering the rows is the control."""
    # Both look at values on a CPU alone.
    monkeypatch.setattr(walk, "check_values", lambda *_: None)
    monkeypatch.setattr(softmax, "backward", lambda *_: None)

    def forward_and_backward(gather_rows: bool) -> list[torch.Tensor]:
        hidden, weight = torch.empty(20, 8), torch.empty(30, 8)
        inputs = Inputs(
            hidden, weight, None, None, None, torch.empty(20, dtype=torch.int64), None,
            torch.empty(20, dtype=torch.bool),
        )  # fmt: skip
        args = LinearArgs(
            vocab_size=30, tokens=20, positions=20, max_workspace_bytes=1000 * 4, gather_rows=gather_rows, backend="eager",
            wanted=(True, True, False, False, False),
        )  # fmt: skip
        log_probs, _ = ops._log_probs(*inputs, *args.args())
        d_hidden, d_weight, *_ = ops._log_probs_backward(torch.empty_like(log_probs), None, *inputs, *args.args())
        return [log_probs, d_hidden, d_weight]

    with FakeTensorMode():
        assert [list(t.shape) for t in forward_and_backward(False)] == [[20], [20, 8], [30, 8]]
        with pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
            forward_and_backward(True)


# Memory.

MEMORY = """
import sys, torch
sys.path.insert(0, {root!r})
from bench.memory import peak_bytes, reset_peak
from m2po_kernels import linear_m2po_loss

n, width, vocab = int(sys.argv[1]), 8, 512
g = torch.Generator().manual_seed(0)
def call(n):
    hidden = torch.randn(n, width, generator=g).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) / 4).requires_grad_()
    ids = torch.randint(vocab, (n,), generator=g)
    tokens = torch.full((n,), -6.2), torch.randn(n, generator=g), torch.ones(n)
    def run():
        linear_m2po_loss(hidden, weight, ids, *tokens, max_workspace_bytes=4_000_000).loss.backward()
    return run
call(8)()
run = call(n)
before = reset_peak()
run()
print(peak_bytes() - before)
"""


def test_memory_does_not_grow_with_the_tokens():
    """But for d hidden, which is an output and 32 bytes a row here, and 16 bytes a row."""

    def peak(n: int) -> float:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY.format(root=str(ROOT)), str(n)],
            # Freed memory goes back at once, so that the peak is what was in use at one time.
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return float(done.stdout)

    few, many = 1 << 18, 1 << 20
    short, long = peak(few), peak(many)
    row_bytes = 8 * 4 + 16
    noise = 2e6  # the allocator's pages; 2.5 bytes a row
    assert long - short <= (many - few) * row_bytes + noise, (short, long)
    # A chunk and d weight are what else there is.
    assert short <= 4e6 + 512 * 8 * 4 + few * row_bytes + 3e6, short
