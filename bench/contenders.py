"""Who is timed, and what: each contender gives for a batch and a task a call without arguments. No timing here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import m2po_kernels
from m2po_kernels import dispatch
from m2po_kernels.rule import Batch, Rule

from .data import M2_THRESHOLD, TokenBatch
from .peers import compiled, sort_based

# Task -> the task of the sort-based way that its speed-up is taken against (that way has no gradient buffer to reuse).
TASKS = {
    "select": "select",
    "forward": "forward",
    "forward_backward": "forward_backward",
    "forward_backward_reused": "forward_backward",
}
PEERS = ("sort_based", "compiled")
# As many bytes as the loss with its gradient must move:
COPY_BYTES_PER_TOKEN = 17  # read 4 + 4 + 4 + 1 (log-probs, behaviour log-probs, advantage, mask), write 4 (gradient)

NAMES = (*PEERS, *dispatch.BACKENDS)
LABELS = {
    "sort_based": "a: sort-based PyTorch",
    "compiled": "b: torch.compile",
    "copy": "c: copy of 17 B a token",
    "eager": "m2po_kernels eager",
    "native": "m2po_kernels native",
    "triton": "m2po_kernels triton",
    "cuda": "m2po_kernels cuda",
}


@dataclass(frozen=True)
class Call:
    """`run()` does the task once and returns keep, the loss, or (loss, gradient). `reset()` goes before it, untimed."""

    run: Callable[[], object]
    reset: Callable[[], None]


def why_not(name: str, device: str = "cpu") -> str | None:
    """None if the contender can run on `device` in this process, else the reason in one line."""
    if name not in NAMES:
        raise ValueError(f"contender must be one of {', '.join(NAMES)}; got {name!r}")
    return None if name in PEERS else dispatch.why_not(name, device)


def has(name: str, task: str) -> bool:
    """Whether the contender has the task: the peers have no gradient buffer to reuse."""
    return name not in PEERS or task != "forward_backward_reused"


def make_call(name: str, task: str, batch: TokenBatch) -> Call:
    """What is timed for `name` doing `task` on `batch`. `compiled` compiles here."""
    tensors = batch.tensors()
    if task == "forward_backward_reused":
        return Call(_reusing(name, batch), _nothing)
    select, loss = functions(name, task, tensors)
    if task == "select":
        return Call(partial(select, *tensors), _nothing)
    if task == "forward":
        return Call(partial(loss, *tensors), _nothing)

    def forward_backward() -> tuple[Tensor, Tensor | None]:
        out = loss(*tensors)
        out.backward()
        return out, batch.log_probs.grad

    def forget_gradient() -> None:
        batch.log_probs.grad = None

    return Call(forward_backward, forget_gradient)


def _nothing() -> None:
    """A task that leaves nothing behind."""


def functions(name: str, task: str, tensors: tuple[Tensor, ...]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(select, loss) of a contender, each of the four tensors of a batch. `compiled` compiles the one that `task` names, here."""
    if name == "sort_based":
        return sort_based.select, sort_based.loss
    if name == "sort_static":
        return sort_based.select_static, sort_based.loss_static
    if name == "compiled":
        chosen = compiled.compile_for(compiled.select if task == "select" else compiled.loss, *tensors)
        return chosen, chosen

    def select(*args: Tensor) -> Tensor:
        return m2po_kernels.select(*args, m2_threshold=M2_THRESHOLD, backend=name).keep

    def loss(*args: Tensor) -> Tensor:
        return m2po_kernels.m2po_loss(*args, m2_threshold=M2_THRESHOLD, backend=name).loss

    return select, loss


def _reusing(name: str, batch: TokenBatch) -> Callable[[], tuple[Tensor, Tensor]]:
    """The forward and the backward op themselves, the gradient written into one buffer that is kept between calls."""
    rule = Rule(m2_threshold=M2_THRESHOLD, backend=name).args()
    tensors = Batch(batch.log_probs.detach(), *batch.tensors()[1:])
    buffer = torch.zeros_like(tensors.log_probs)
    grad_loss = torch.ones((), device=buffer.device)

    def run() -> tuple[Tensor, Tensor]:
        loss, scales, cut, _, _ = torch.ops.m2po_kernels.policy_loss(*tensors, *rule)
        torch.ops.m2po_kernels.policy_loss_backward_out(grad_loss, scales, cut, *tensors, *rule, out=buffer)
        return loss, buffer

    return run


def copy_calls(tokens: int) -> dict[str, Call]:
    """Ways to copy 17 bytes a token between two written buffers of torch's allocator, as the inputs are."""
    import numpy as np  # here alone: the GPU benchmarks run with torch and triton, without it

    n = COPY_BYTES_PER_TOKEN * tokens
    source, target = (torch.empty(n, dtype=torch.uint8).fill_(i) for i in (1, 2))
    wide = (n // 8) * 8
    ways: dict[str, Callable[[], object]] = {
        "numpy, one thread": partial(np.copyto, target.numpy(), source.numpy()),
        "torch uint8": lambda: target.copy_(source),
        "torch int64": lambda: target[:wide].view(torch.int64).copy_(source[:wide].view(torch.int64)),
    }
    return {name: Call(run, _nothing) for name, run in ways.items()}
