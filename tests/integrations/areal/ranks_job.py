"""What each of two ranks runs, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stand_ins
import torch
import torch.distributed as dist


def job(rank: int, folder: str) -> None:
    stand_ins.install()
    import engine
    from areal.api.cli_args import MicroBatchSpec
    from areal.utils import stats_tracker

    from m2po_kernels.errors import MissingBehaviorLogProbs

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    own = Path(folder) / str(rank)
    run = engine.run(own, unscored=True, mb_spec=MicroBatchSpec(n_mbs=1 + rank))
    result: dict[str, Any] = {"batches": run.batches, "weights": run.weights, "gradients": run.gradients}
    result["stats"] = stats_tracker.export_all(reduce_group=dist.group.WORLD)
    batch = {**run.batches[0], "attention_mask": torch.ones_like(run.batches[0]["input_ids"])}
    if rank == 1:
        del batch["logprobs"]
    try:
        run.actor.engine._select(batch)
    except MissingBehaviorLogProbs as error:
        result["error"] = str(error)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
