"""What runs on two ranks at once, each a process of its own."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tiny
import torch
import workers
from tensordict import TensorDict

from m2po_kernels.errors import MissingBehaviorLogProbs

LAYOUTS = {
    "micro-batches of 3": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3},
    "micro-batches of 1": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
}


def on_two_ranks(job: Callable, model_path: str, folder: pathlib.Path) -> list[Any]:
    """What `job(model_path, rank)` returns on each."""
    torch.multiprocessing.spawn(_run, (job, model_path, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _run(rank: int, job: Callable, model_path: str, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    workers.join(rank, 2, folder / "store")
    torch.save(job(model_path, rank), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def share(model_path: str, rank: int) -> list[tiny.Sequence]:
    """The rollouts of one rank: the two have different numbers of tokens, scored and not."""
    return tiny.rollouts(model_path, 12, seed=10 + rank, unscored=0.1)


def train(model_path: str, rank: int, overrides: tuple[str, ...] = (), layouts: Iterable[str] = LAYOUTS) -> dict[str, Any]:
    """Two mini-batches of 12 sequences, in each layout."""
    actor, results = workers.make_actor(workers.compose(model_path, *overrides)), {}
    for name in layouts:
        workers.restart(actor)
        metrics = workers.update(actor, workers.nested_batch(share(model_path, rank)), mini_batch=12, **LAYOUTS[name])
        results[name] = {"steps": list(actor.actor.engine.steps), "metrics": metrics}
    return results


def lose_log_probs(model_path: str, rank: int) -> dict[str, str]:
    """Errors by what is wrong on rank 1 alone."""
    actor, errors = workers.make_actor(workers.compose(model_path)), {}

    def without(field: str) -> Callable[[TensorDict], Any]:
        return lambda batch: batch.pop(field)

    def recomputed(batch: TensorDict) -> None:
        batch["old_log_probs"] = batch["old_log_probs"] * 1.01

    for name, spoil in [
        ("no rollout_log_probs", without("rollout_log_probs")),
        ("no old_log_probs", without("old_log_probs")),
        ("recomputed", recomputed),
    ]:
        batch = workers.nested_batch(share(model_path, rank)[:6])
        if rank == 1:
            spoil(batch)
        with pytest.raises(MissingBehaviorLogProbs) as caught:
            workers.update(actor, batch, mini_batch=12, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
        errors[name] = str(caught.value)
    return errors
