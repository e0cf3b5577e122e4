"""Processes with a gloo group, started once and given many jobs: a process costs seconds, a job milliseconds.

The functions of a job are in distributed_jobs.py, as a spawned process must be able to import them.
"""

from __future__ import annotations

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

TIMEOUT = 20  # seconds that a collective waits, and a test for the processes


class World:
    """`size` processes of one gloo world. The group of the first n ranks, n a power of two, is `groups[n]` in each."""

    def __init__(self, size: int):
        context = mp.get_context("spawn")
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable, *args_of_ranks: tuple) -> list[Any]:
        """job(rank, groups, *args) on as many ranks as there are `args_of_ranks`; what each returns, or Raised."""
        for pipe, args in zip(self._pipes, args_of_ranks, strict=False):
            pipe.send((job, args))
        return [self._receive(rank) for rank in range(len(args_of_ranks))]

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def _receive(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(3 * TIMEOUT):
            raise AssertionError(f"rank {rank} hangs")
        try:
            return pipe.recv()
        except EOFError:
            return Raised("exit", f"the process of rank {rank} has ended", "")


class Raised:
    """What a job raised: the name of its class, its message, and where."""

    def __init__(self, kind: str, message: str, trace: str):
        self.kind, self.message, self.trace = kind, message, trace

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.trace}"


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in (1, 2, 4) if n <= size}
    while (work := pipe.recv()) is not None:
        job, args = work
        try:
            result = job(rank, groups, *args)
        except Exception as error:  # the test decides what it means
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
    dist.destroy_process_group()
