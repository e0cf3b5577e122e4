"""What only a GPU can show: CUDA graphs, no wait for the device, launches, and that a new shape compiles nothing.

Everything else runs on a GPU as on a CPU: conftest.py puts the pairs (cuda, cuda) and (cuda, triton) beside the others.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Tokens, random_tokens, run, same_bits
from torch.utils import deterministic

from m2po_kernels import M2Accumulator, dispatch, grpo_loss, m2po_loss, m2po_loss_from_logits, select, selective_log_softmax

SHAPES = ((3, 7), (16, 257), (64, 1024), (1, 1))


def why_no_gpu() -> str | None:
    """None if Triton serves a GPU in this process, else the reason."""
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is False"
    return dispatch.why_not("triton", "cuda")


pytestmark = pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu()))


@pytest.fixture(params=["triton", "cuda"])
def fused(request: pytest.FixtureRequest) -> str:
    """A backend of fused kernels. bench/gpu.sh fails where cuda cannot run on a GPU of NVIDIA."""
    reason = dispatch.why_not(request.param, "cuda")
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


def contents(shape: tuple[int, int], dtype: torch.dtype) -> list[Tokens]:
    """Batches of one shape: healthy, stale, all candidates and equal, nothing valid, NaN and infinity at valid tokens."""
    made = [random_tokens(shape, seed=seed, spread=spread, dtype=dtype, device="cuda") for seed, spread in ((1, 0.02), (2, 0.6))]
    ones = torch.ones(shape, dtype=dtype, device="cuda")
    made.append(Tokens(ones * 0.5, ones * 0, ones, torch.ones(shape, dtype=torch.bool, device="cuda")))
    made.append(Tokens(ones * math.nan, ones, ones, torch.zeros(shape, dtype=torch.bool, device="cuda")))
    odd = random_tokens(shape, seed=3, dtype=dtype, device="cuda")
    odd.log_probs[0, 0], odd.behavior_log_probs[-1, -1] = math.nan, -math.inf
    odd.mask[0, 0] = odd.mask[-1, -1] = True
    return [*made, odd]


def fill(static: Tokens, new: Tokens) -> None:
    with torch.no_grad():
        for buffer, tensor in zip(static, new, strict=True):
            buffer.copy_(tensor)


def warmed_up(call) -> None:
    """Runs it on another stream, as a capture asks for: kernels are loaded and compiled before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def captured(call):
    """(graph, what the call returned inside it)."""
    warmed_up(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_graph_replay_of_select(shape, dtype, fused):
    batches = contents(shape, dtype)
    static = batches[1].map(torch.clone)
    graph, sel = captured(lambda: select(*static, backend=fused))
    for tokens in batches:
        fill(static, tokens)
        graph.replay()
        want = select(*tokens, backend=fused)
        assert torch.equal(sel.keep, want.keep)
        assert same_bits(sel.metrics.counts, want.metrics.counts)
        assert same_bits(sel.metrics.floats, want.metrics.floats)


@pytest.mark.parametrize("loss_fn", [m2po_loss, grpo_loss], ids=["m2po", "grpo"])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sequence-mean"}, {"reduction": "none", "kl": True}, {"denominator": 7}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_graph_replay_of_loss_and_backward(loss_fn, options, shape, fused):
    batches = contents(shape, torch.float32)
    static = batches[1].map(torch.clone)
    static.log_probs.requires_grad_()
    options = dict(options)
    if options.pop("kl", False):
        options |= {"kl_coef": 0.1, "ref_log_probs": batches[0].behavior_log_probs.clone()}

    def call():
        out = loss_fn(*static, **options, backend=fused)
        (grad,) = torch.autograd.grad(out.loss, static.log_probs, torch.ones_like(out.loss))
        return out, grad

    graph, (out, grad) = captured(call)
    for tokens in batches:
        fill(static, tokens)
        graph.replay()
        want = run(loss_fn, tokens, **options, backend=fused)
        assert same_bits(out.loss.detach().cpu(), want.loss)
        assert same_bits(grad.cpu(), want.grad)
        assert same_bits(out.metrics.counts.cpu(), want.counts)
        assert same_bits(out.metrics.floats.cpu(), want.floats)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [257, 8192])
def test_graph_replay_of_log_softmax(columns, dtype, inplace):
    """In place the gradient lies in the logits: new logits are copied into them before each replay."""
    generator = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randn(9, columns, generator=generator, device="cuda").mul(s).to(dtype) for s in (0.1, 3.0, 30.0)]
    ids = torch.randint(columns, (9,), generator=generator, device="cuda")
    flow = torch.randn(9, generator=generator, device="cuda")
    flow[::3] = 0
    static = batches[0].clone().requires_grad_()

    def call():
        lp, entropy = selective_log_softmax(static, ids, return_entropy=True, inplace=inplace, backend="triton")
        (grad,) = torch.autograd.grad(lp, static, flow)
        return lp, entropy, grad

    graph, (lp, entropy, grad) = captured(call)
    for x in batches:
        static.detach().copy_(x)
        graph.replay()
        leaf = x.clone().requires_grad_()
        want, want_entropy = selective_log_softmax(leaf, ids, return_entropy=True, backend="triton")
        (want_grad,) = torch.autograd.grad(want, leaf, flow)
        assert same_bits(lp.detach(), want.detach())
        assert same_bits(entropy, want_entropy)
        assert same_bits(grad, want_grad)
        assert inplace == (grad.data_ptr() == static.data_ptr())


def logits_batch(b: int, t: int, columns: int = 512) -> tuple[torch.Tensor, ...]:
    tokens = random_tokens((b, t), device="cuda")
    logits = torch.randn(b, t, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    return logits, torch.randint(columns, (b, t), device="cuda"), *list(tokens)[1:]


def test_graph_replay_of_loss_from_logits():
    logits, *rest = logits_batch(4, 33)

    def call():
        out = m2po_loss_from_logits(logits, *rest, backend="triton")
        return out.loss, torch.autograd.grad(out.loss, logits)[0]

    graph, (loss, grad) = captured(call)
    logits.detach().mul_(1.5)
    graph.replay()
    want, want_grad = call()
    assert same_bits(loss.detach(), want.detach())
    assert same_bits(grad, want_grad)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_in_one_graph(mode, fused):
    """reduce-overhead: inductor puts the kernels into CUDA graphs of its own."""
    tokens = random_tokens((6, 200), device="cuda")
    want = run(m2po_loss, tokens, backend=fused)
    compiled = torch.compile(m2po_loss, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        got = run(compiled, tokens, backend=fused)
        assert same_bits(got.loss, want.loss)
        assert same_bits(got.grad, want.grad)
    logits, ids, *_ = logits_batch(2, 9)
    log_softmax = torch.compile(selective_log_softmax, fullgraph=True, mode=mode)
    assert same_bits(log_softmax(logits, ids, backend="triton").detach().clone(), selective_log_softmax(logits, ids).detach())
    torch._dynamo.reset()


@pytest.fixture
def no_sync():
    """Within it, an operation that makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_guard_sees_a_sync(no_sync):
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device="cuda").item()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sequence-mean"},
        {"reduction": "none"},
        {"denominator": 7},
        {"denominator": "kept", "ratio_cap": 3.0},
        {"nonfinite": "drop", "m2_threshold": 0.0, "scope": "all"},
    ],
    ids=str,
)
def test_loss_never_waits_for_the_device(options, no_sync, fused):
    torch.cuda.set_sync_debug_mode("default")
    tokens = random_tokens((6, 200), device="cuda")
    leaf = tokens.log_probs.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    out = m2po_loss(*tokens, **options, backend=fused)
    out.loss.sum().backward()
    select(leaf.detach(), *list(tokens)[1:], backend=fused)
    m2po_loss(leaf, *list(tokens)[1:], selection=select(*tokens, backend=fused), backend=fused).loss.backward()


def test_packed_loss_never_waits_for_the_device(no_sync, fused):
    torch.cuda.set_sync_debug_mode("default")
    tokens = random_tokens((120,), device="cuda")
    cu_seqlens = torch.tensor([0, 7, 7, 31, 120], dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    m2po_loss(*tokens, cu_seqlens=cu_seqlens, reduction="sequence-mean", backend=fused)


def test_logits_never_wait_for_the_device(no_sync):
    torch.cuda.set_sync_debug_mode("default")
    logits, ids, *rest = logits_batch(4, 33)
    torch.cuda.set_sync_debug_mode("error")
    m2po_loss_from_logits(logits, ids, *rest, backend="triton").loss.backward()
    lp = selective_log_softmax(logits, ids, temperature=0.7, inplace=True, backend="triton")
    lp.sum().backward()


@pytest.fixture
def nccl_alone(tmp_path):
    """An NCCL group of this process alone: its collectives run as those of many."""
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("spread", [0.01, 0.6])
def test_solve_without_a_sync_never_waits(spread, nccl_alone, no_sync):
    torch.cuda.set_sync_debug_mode("default")
    tokens = random_tokens((6, 200), spread=spread, device="cuda")
    first, second = M2Accumulator(), M2Accumulator()
    first.add(*tokens)
    second.add(*tokens)
    want = first.solve(nccl_alone)  # waits, and connects
    torch.cuda.set_sync_debug_mode("error")
    sel = second.solve(nccl_alone, sync=False)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sel.keep, select(*tokens).keep.flatten())
    assert torch.equal(sel.keep, want.keep)
    assert same_bits(sel.metrics.floats, want.metrics.floats)
    assert M2Accumulator().solve(nccl_alone).keep.device.type == "cuda"


def device_work(call) -> list[str]:
    """Names of the kernels and memsets that a call puts on the device, copies included."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_launches(monkeypatch, fused):
    """Forward: one kernel, in triton after a memset, whether or not something is dropped; backward: one kernel."""
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)  # the tests' poison is a kernel of its own
    for spread in (0.02, 0.6):
        tokens = random_tokens((64, 257), spread=spread, device="cuda")
        work = device_work(lambda tokens=tokens: torch.ops.m2po_kernels.policy_loss(*arguments(tokens, fused)))
        assert work, "the profiler saw nothing on the device"
        assert len(work) <= (1 if fused == "cuda" else 2), work
        args = arguments(tokens, fused)
        _, scales, cut, *_ = torch.ops.m2po_kernels.policy_loss(*args)
        one, out = torch.ones((), device="cuda"), torch.zeros_like(tokens.log_probs)
        work = device_work(
            lambda: torch.ops.m2po_kernels.policy_loss_backward_out(one, scales, cut, *args, out=out)  # noqa: B023
        )
        assert len(work) == 1, work


def arguments(tokens: Tokens, backend: str) -> tuple:
    from m2po_kernels.inputs import check_batch
    from m2po_kernels.rule import Rule

    return (*check_batch(*tokens)[0], *Rule(backend=backend).args())


def n_compiled() -> int:
    """How many compiled kernels Triton keeps for this package in this process."""
    from m2po_kernels.backends.triton import forward, logits, policy

    kernels = (
        forward.forward_kernel,
        policy.backward_kernel,
        logits.log_softmax_kernel,
        logits.log_softmax_backward_kernel,
    )
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def test_a_new_shape_compiles_nothing():
    def once(tokens: Tokens) -> None:
        run(m2po_loss, tokens, backend="triton")
        select(*tokens, backend="triton")

    def logits_once(b: int, t: int) -> None:
        logits, ids, *_ = logits_batch(b, t)
        selective_log_softmax(logits, ids, backend="triton").sum().backward()

    once(random_tokens((3, 7), device="cuda"))
    logits_once(2, 9)
    before = n_compiled()
    assert before >= 5
    for n in (1, 16, 17, 256, 1000, 4096, 65537, 1 << 20):
        once(random_tokens((n,), device="cuda"))
    for shape in ((1, 16), (16, 1), (16, 64), (5, 333)):
        once(random_tokens(shape, device="cuda"))
        logits_once(*shape)
    assert n_compiled() == before
