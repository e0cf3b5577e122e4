"""What each of two ranks runs, in a process of its own."""

from __future__ import annotations

from typing import Any

import stand_ins
import torch
import torch.distributed as dist


def job(rank: int, folder: str) -> None:
    stand_ins.install()
    import engine

    from m2po_kernels.errors import MissingBehaviorLogProbs

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    run = engine.Run(12, unscored=1)
    result: dict[str, Any] = {
        "windows": list(run.windows()),
        "weights": run.strategy.weights,
        "gradients": run.strategy.gradients,
        "status": run.status,
    }
    try:
        engine.Run(6, missing=rank == 1)
    except MissingBehaviorLogProbs as error:
        result["error"] = str(error)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
