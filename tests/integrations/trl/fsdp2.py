"""One of two gloo ranks: `torchrun --nproc-per-node 2 fsdp2.py OUT` trains with a linear head under FSDP2, and without.

What it saw goes to OUT/fsdp2-<rank>.json: for each way to shard, how far the weights are from those of the unsplit run.
"""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  (the path of qwen2)
import qwen2
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from m2po_kernels import linear_m2po_loss, loss_scale, m2po_loss
from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations.common import MicroBatch, select_window
from m2po_kernels.integrations.transformers import add_linear_head

VOCAB, STEPS, KEEP = 61, 3, 6


def shard(model: Any, way: str) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    if way == "as accelerate does":
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    elif way == "as accelerate does, tied":
        fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False)
    elif way == "head alone":
        fully_shard(model.lm_head)
    fully_shard(model)


def batch(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        "ids": torch.randint(3, VOCAB, (2, 9), generator=generator),
        "noise": 0.4 * torch.randn(2, KEEP, generator=generator, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0]) if rank == 0 else torch.tensor([0.5, 0.0]),
    }


def log_probs(model: Any, ids: Tensor) -> Tensor:
    scaled = model(input_ids=ids).logits[:, -KEEP - 1 : -1].log_softmax(-1)
    return scaled.gather(-1, ids[:, -KEEP:, None])[..., 0]


def unsplit(model: nn.Module) -> list[Tensor]:
    """Both ranks' tokens in one step, by the model's own logits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        batches = [batch(rank, step) for rank in range(2)]
        current = torch.cat([log_probs(model, b["ids"]) for b in batches])
        behavior = current.detach() + torch.cat([b["noise"] for b in batches])
        advantages = torch.cat([b["advantages"] for b in batches])
        optimizer.zero_grad()
        m2po_loss(current, behavior, advantages, torch.ones_like(current)).loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def sharded(model: Any, *, two_steps: bool) -> list[Tensor]:
    """two_steps: log-probs with a gradient, then the loss; else the loss in place of the head, of a selection made before."""
    group = dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        given = batch(dist.get_rank(), step)
        ids, labels = given["ids"], given["ids"].clone()
        labels[:, :-KEEP] = -100
        with torch.set_grad_enabled(two_steps):
            current = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs[:, -KEEP:]
        behavior = current.detach() + given["noise"]
        mask = torch.ones_like(current).detach()
        window = select_window([MicroBatch(current, behavior, given["advantages"], mask)], group=group)
        terms = {"behavior_log_probs": behavior, "advantages": given["advantages"], "mask": mask}
        terms |= {"selection": window.selection, "part": window.shares[0].part}
        optimizer.zero_grad()
        if two_steps:
            loss = m2po_loss(current, **terms).loss
        else:
            head = partial(linear_m2po_loss, **terms, logits_to_keep=KEEP)
            loss = model(input_ids=ids, labels=ids, fused_lm_head=True, head=head).loss
        (loss * loss_scale(group)).backward()
        optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]


def main() -> None:
    dist.init_process_group("gloo")
    seen: dict[str, Any] = {}
    for way in ("as accelerate does", "as accelerate does, tied", "head alone", "root alone"):
        whole = qwen2.tiny(VOCAB, tie_word_embeddings=way.endswith("tied")).double()
        start = [p.detach().clone() for p in whole.parameters()]
        want = unsplit(copy.deepcopy(whole))
        for two_steps in (True, False):
            model = copy.deepcopy(whole)
            add_linear_head(model)
            shard(model, way)
            got = sharded(model, two_steps=two_steps)
            moved = sum((b - s).square().sum() for b, s in zip(want, start, strict=True)).sqrt()
            apart = sum((a - b).square().sum() for a, b in zip(got, want, strict=True)).sqrt()
            seen[f"{way}, {'two steps' if two_steps else 'one'}"] = float(apart / moved)
    try:
        add_linear_head(model)
    except InvalidArgument as error:
        seen["added late"] = str(error)
    (Path(sys.argv[1]) / f"fsdp2-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
