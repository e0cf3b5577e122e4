"""The runs of a comparison in worker processes, one file a run, so that an interrupted comparison goes on where it stopped.

A file is found again only by the same plan under the same setting: their hashes name its folder.
Every run has one thread to itself: its bits do not depend on how many workers there are, or on which run came before.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import __version__, dispatch
from ..shared import CliError, need
from .plan import Plan, Run, short_hash
from .policy import new_model, warm_start
from .task import Task
from .train import train

PACKAGE = Path(dispatch.__file__).parent
# These only show what the runs gave. Adapters, the other commands and the linear functions have no part in a run.
SHOWING = {"command.py", "figures.py", "report.py"}


class Finished(NamedTuple):
    """A run that was made: its row, and the seconds that one core took for it."""

    row: dict[str, Any]
    seconds: float


def setting() -> dict[str, str]:
    """What the bits of a run depend on beside its plan."""
    return {
        "m2po_kernels": __version__,
        "code": code(PACKAGE),
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),
        "backend": dispatch.choose(torch.device("cpu")),
        "cpu": f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def code(package: Path) -> str:
    """A hash of every module and compiled library of the package that can change a bit of a run."""
    files = [*package.glob("*.py"), *package.glob("*.so"), *(package / "cli" / "stale").glob("*.py")]
    files += [file for name in ("backends", "reference") for file in (package / name).rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.name not in SHOWING):
        digest.update(f"{file.relative_to(package)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def facts(plan: Plan, workers: int) -> dict[str, Any]:
    """The setting, where it ran and, in a checkout, at which commit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **setting(),
        "commit": _commit(),
        "device": f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}",
        "workers": workers,
        "plan": plan.digest(),
    }


def run_all(plan: Plan, folder: Path, workers: int, fresh: bool, finished: Callable[[int, int, str], None]) -> list[Finished]:
    """All runs, in the plan's order. `finished(done, of, line)` is called after each warm start and run made now.

    folder: where the files of the runs are, in one subfolder for each plan and setting; `fresh` empties it first.
    """
    need("transformers", "stale")
    place = folder / _subfolder(plan)
    if fresh and place.is_dir():
        shutil.rmtree(place)
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / "setting.json").write_text(json.dumps({**setting(), **plan.values()}, indent=1) + "\n")
    except OSError as error:
        raise CliError(f"--runs: cannot write to {place}: {error.strerror}") from error
    made = {run: found for run in plan.runs() if (found := _read(place, run)) is not None}
    missing = [run for run in plan.runs() if run not in made]
    seeds = [seed for seed in dict.fromkeys(run.seed for run in missing) if not _warm_file(place, seed).is_file()]
    total, done = len(seeds) + len(plan.runs()), len(made)
    if missing:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker)
        try:
            for _, line in _finish({pool.submit(warm, plan, place, seed): seed for seed in seeds}):
                done += 1
                finished(done, total, line)
            for run, result in _finish({pool.submit(execute, plan, place, run): run for run in missing}):
                made[run] = result
                done += 1
                reward = result.row["reward"]
                finished(done, total, f"{run.name}: reward {reward[0]:.3f} -> {reward[-1]:.3f} in {result.seconds:.0f} s")
        finally:
            pool.shutdown(cancel_futures=True)
    return [made[run] for run in plan.runs()]


def warm(plan: Plan, place: Path, seed: int) -> str:
    """Makes the weights that every run of `seed` starts from, and a line to show."""
    start = time.perf_counter()
    model, steps = warm_start(plan, Task(plan.levels), seed)
    path = _warm_file(place, seed)
    torch.save(model.state_dict(), path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
    return f"seed{seed}: warm start, {steps} supervised steps in {time.perf_counter() - start:.0f} s"


def execute(plan: Plan, place: Path, run: Run) -> Finished:
    """One run from the warm start of its seed, also written to its file."""
    start = time.process_time()
    model = new_model(plan, run.seed)
    model.load_state_dict(torch.load(_warm_file(place, run.seed), weights_only=True))
    result = Finished(train(model, plan, run), round(time.process_time() - start, 1))
    path = _run_file(place, run)
    path.with_suffix(".part").write_text(json.dumps(result._asdict()) + "\n")
    os.replace(path.with_suffix(".part"), path)
    return result


def _finish(futures: dict[Future[Any], Any]) -> Iterator[tuple[Any, Any]]:
    for future in as_completed(futures):
        yield futures[future], future.result()


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """A worker whose parent was killed would wait for its next run for ever."""
    parent.join()
    os._exit(1)


def _subfolder(plan: Plan) -> str:
    return f"{plan.digest()}-{short_hash(json.dumps(setting(), sort_keys=True).encode())}"


def _warm_file(place: Path, seed: int) -> Path:
    return place / f"warm-seed{seed}.pt"


def _run_file(place: Path, run: Run) -> Path:
    return place / f"{run.name}.json"


def _read(place: Path, run: Run) -> Finished | None:
    path = _run_file(place, run)
    return Finished(**json.loads(path.read_text())) if path.is_file() else None


def _cpu_model() -> str:
    """Matrix products choose their code by it, not by the vector instructions alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the checkout that the package is in; None for an installed package."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("rev-parse", "--show-prefix") != f"{PACKAGE.name}/":  # some other project's checkout, with .venv in it
            return None
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
