"""What the processes of a world do; each function runs on every rank that takes part."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from helpers import Tokens
from torch import Tensor, nn

from m2po_kernels import M2Accumulator, accumulate, loss_scale, m2po_loss
from m2po_kernels.integrations.common import MicroBatch, select_window


@dataclass
class Solved:
    """What one rank has after solve(): its mask, the metrics, and what it sent."""

    keep: Tensor
    counts: Tensor
    floats: Tensor
    loss: float
    collectives: int
    sent: int


class _Counting:
    """Counts all-reduces and their bytes; optionally ends the process at the n-th."""

    def __init__(self, die_at: int | None = None):
        self.calls, self.sent, self.die_at = 0, 0, die_at

    def __enter__(self) -> _Counting:
        self.original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.calls += 1
            self.sent += tensor.numel() * tensor.element_size()
            if self.calls == self.die_at:
                os._exit(1)
            return self.original(tensor, *args, **options)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self.original


def solve(
    rank: int, groups: dict, size: int, parts: list[Tokens], options: dict, solving: dict | None = None, die_at: int | None = None
) -> Solved:
    """Adds the parts and solves over the first `size` ranks; size 0: over no group."""
    acc = M2Accumulator(**options)
    handles = [acc.add(*part) for part in parts]
    with _Counting(die_at) as counting:
        sel = acc.solve(groups.get(size), **(solving or {}))
    losses = [m2po_loss(*part, selection=sel, part=h).loss.double() for part, h in zip(parts, handles, strict=True)]
    keep = [sel.keep_of(h).reshape(-1) for h in handles]
    assert torch.equal(torch.cat([sel.keep[:0], *keep]), sel.keep)
    acc.close()
    metrics = sel.metrics
    return Solved(sel.keep, metrics.counts, metrics.floats, float(sum(losses)), counting.calls, counting.sent)


def solve_without_reading(rank: int, groups: dict, parts: list[Tokens]) -> tuple[Tensor, int]:
    """As on a device whose values the host cannot read without waiting: the mask, and the number of collectives."""
    before, accumulate._READ_AT_ONCE = accumulate._READ_AT_ONCE, ()
    try:
        acc = M2Accumulator()
        for part in parts:
            acc.add(*part)
        with _Counting() as counting:
            keep = acc.solve(groups[2], sync=False).keep
        return keep, counting.calls
    finally:
        accumulate._READ_AT_ONCE = before


def solve_over_mesh(rank: int, groups: dict, parts: list[Tokens], check: str, dimensions: tuple[str, str]) -> Tensor | str:
    """On a mesh of 2 x 2 ranks: `dimensions` names the one for group= and the one for replicated_over=."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    over, replicas = (mesh[name] if name else None for name in dimensions)
    return _checked(check, lambda: solve_once(parts, over, replicas))


def solve_checked(rank: int, groups: dict, parts: list[Tokens], check: str) -> Tensor:
    """Over the group of two, as if its ranks held different tokens."""
    return _checked(check, lambda: solve_once(parts, groups[2], None))


def solve_once(parts: list[Tokens], group: Any, replicas: Any) -> Tensor:
    acc = M2Accumulator()
    for part in parts:
        acc.add(*part)
    return acc.solve(group, replicated_over=replicas).keep


def select_in_window(rank: int, groups: dict, parts: list[Tokens]) -> tuple[int, int, int]:
    """As an adapter does, on two ranks: tokens without a behaviour log-prob, valid tokens, collectives."""
    with _Counting() as counting:
        window = select_window([MicroBatch(*part) for part in parts], group=groups[2])
    return int(window.unscored_tokens), int(window.selection.metrics.valid_tokens), counting.calls


def _checked(check: str, call: Any) -> Any:
    os.environ["M2PO_CHECK"] = check
    try:
        return call()
    finally:
        del os.environ["M2PO_CHECK"]


def refused_groups(rank: int, groups: dict) -> list[str]:
    """The messages for groups that solve() cannot take."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    messages = []
    for over, replicas in ((mesh, None), ("dp", None), (groups[4], mesh["tp"]), (dist.GroupMember.NON_GROUP_MEMBER, None)):
        try:
            M2Accumulator().solve(over, replicated_over=replicas)
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


class Policy(nn.Module):
    """A model with one log-prob a position, in fp64 so that sums in another order stay within bounds that can be counted."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.inner = nn.Linear(6, 8, dtype=torch.float64)
        self.outer = nn.Linear(8, 1, dtype=torch.float64)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return -nn.functional.softplus(self.outer(self.inner(x).tanh())[..., 0])


def train(rank: int, groups: dict, size: int, how: str, batches: list[tuple[Tensor, Tokens]]) -> tuple[list[Tensor], float]:
    """One optimizer step of micro-batches (features, tokens): the gradients of all parameters, and this rank's loss.

    The trainer divides each loss by the number of micro-batches, and DDP and FSDP2 average over the ranks; "fsdp2 sums" does not.
    """
    group, model = groups[size], Policy()
    if how == "ddp":
        trained: nn.Module = nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        from torch.distributed.fsdp import fully_shard

        if how == "hsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        trained = fully_shard(model, mesh=mesh)
        if how == "fsdp2 sums":
            trained.set_gradient_divide_factor(1.0)
    acc = M2Accumulator()
    with torch.no_grad():
        handles = [acc.add(trained(x), *list(tokens)[1:]) for x, tokens in batches]
    sel = acc.solve(group)
    scale, total = loss_scale(None if how == "fsdp2 sums" else group, micro_batches=len(batches)), 0.0
    for i, ((x, tokens), part) in enumerate(zip(batches, handles, strict=True)):
        last = i == len(batches) - 1
        if how == "ddp":
            trained.require_backward_grad_sync = last
        else:
            trained.set_requires_gradient_sync(last)
        loss = m2po_loss(trained(x), *list(tokens)[1:], selection=sel, part=part).loss
        total += float(loss.detach())
        (loss * scale / len(batches)).backward()
    acc.close()
    grads = [p.grad for p in trained.parameters()]
    return [(g if how == "ddp" else g.full_tensor()).clone() for g in grads], total
