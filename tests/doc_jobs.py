"""The recipes of docs/distributed.md and docs/vocabulary.md as they stand there, on each rank of a gloo world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed_jobs import Policy
from doc_blocks import ROOT, run_python
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # inputs, behaviour log-probs, advantages, mask
DISTRIBUTED, VOCABULARY = ROOT / "docs" / "distributed.md", ROOT / "docs" / "vocabulary.md"


class Recording:
    """In the place of an optimizer: keeps the gradients that a step would use."""

    def __init__(self, model: nn.Module):
        self.model, self.grads = model, []

    def step(self) -> None:
        grads = [p.grad for p in self.model.parameters()]
        self.grads = [(g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for g in grads]

    def zero_grad(self) -> None:
        self.model.zero_grad()


def recipes() -> dict[str, Any]:
    """Names that the blocks after the first define."""
    return run_python(DISTRIBUTED, {}, first=1)


def step(rank: int, groups: dict, how: str, batches: list[Batch]) -> tuple[list[Tensor], int]:
    """The gradients of one step on two ranks, and how many tokens were dropped in all."""
    named, group, model = recipes(), groups[2], Policy()
    if how == "megatron":
        return _megatron(named, group, model, batches)
    if how == "ddp":
        trained, over = nn.parallel.DistributedDataParallel(model, process_group=group), group
    else:
        from torch.distributed.fsdp import fully_shard

        over = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        trained = fully_shard(model, mesh=over)
    optimizer = Recording(trained)
    metrics = named[f"{how}_step"](trained, optimizer, batches, over)
    return optimizer.grads, int(metrics.dropped_tokens)


def _megatron(named: dict[str, Any], group: Any, model: nn.Module, batches: list[Batch]) -> tuple[list[Tensor], int]:
    """Megatron-Core's schedule and its average over the ranks, written out: forward_step_calc_loss divides twice."""
    with torch.no_grad():
        selection, parts = named["megatron_select"]([(model(x), *tokens) for x, *tokens in batches], group)
    for part, (x, *tokens) in zip(parts, batches, strict=True):
        loss_func = named["megatron_loss_func"](
            selection, part, tokens, num_microbatches=len(batches), data_parallel_size=dist.get_world_size(group)
        )
        loss, num_tokens, _ = loss_func(model(x))
        (loss / num_tokens.clamp(min=1) / len(batches)).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=group)
        grad /= dist.get_world_size(group)
    return grads, int(selection.metrics.dropped_tokens)


def split_head(
    rank: int, groups: dict, hidden: Tensor, weight: Tensor, ids: Tensor, batch: tuple
) -> tuple[float, Tensor, Tensor]:
    """Loss, d hidden and d weight with the head split unevenly over two ranks."""
    loss_fn = run_python(VOCABULARY, {})["split_head_loss"]
    start, end = (0, 40) if rank == 0 else (40, len(weight))
    hidden = hidden.clone().requires_grad_()
    shard = weight[start:end].clone().requires_grad_()
    out = loss_fn(hidden, shard, ids, *batch, tp_group=groups[2], vocab_start=start, vocab_size=len(weight))
    out.loss.backward()
    return float(out.loss.detach()), hidden.grad, shard.grad
