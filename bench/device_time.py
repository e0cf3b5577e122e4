"""Times on a GPU: device time by events over the replay of CUDA graphs, the wall as called beside it, and the peak of memory.

A sample of device time: untimed, inputs that the last run overwrote are put back and the L2 cache is emptied by reading a large
buffer; then events stand before, between and after the graphs of forward and backward. The reading keeps the GPU busy while the
host enqueues all of this, so that the host's own time is not in the sample. What cannot be captured (its sizes come back to the
host on the way) is timed by events around the calls; that includes the gaps in which the GPU waits for the host.

With device "cpu" all times are the host's, by the same path: for trying the benchmarks without a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from m2po_kernels.dispatch import BACKENDS

MB = 1e6
SAMPLES = (5, 50)  # least and most of each kind
OUT_OF_MEMORY = "out of memory"
_FLUSH_BYTES = 1 << 29  # ten times the L2 of an H200 (50 MB); reading it takes it about 0.12 ms


@dataclass(frozen=True)
class Work:
    """What is timed: `forward()`, then `backward(what forward returned)` where there is one. `reset()` goes before, untimed."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any] | None = None
    reset: Callable[[], None] = lambda: None
    capturable: bool = True


def measure(work: Work, device: str, seconds: float) -> dict[str, Any]:
    """Medians in ms over about `seconds`: forward_ms, backward_ms (None where there is none), wall_ms of both as called.

    Also samples, p90 of each, timed_by ("graph", "events" or "host"), and peak_mb: what one run adds to the memory allocated.
    """
    _run(work)  # compiles and loads what is loaded once
    peak = _peak_mb(work) if device != "cpu" else None
    walls = _sampled(lambda: _wall(work, device), seconds / 2)
    if device == "cpu":
        times, timed_by = _sampled(lambda: _host(work), seconds / 2), "host"
    elif work.capturable:
        graphs = _capture(work)
        times, timed_by = _sampled(lambda: _events(work, *graphs), seconds / 2), "graph"
    else:
        times, timed_by = _sampled(lambda: _events(work, *_calls(work)), seconds / 2), "events"
    forward, backward = [t[0] for t in times], [t[1] for t in times]
    there = work.backward is not None
    return {
        "timed_by": timed_by,
        "samples": len(times),
        "forward_ms": _round(median(forward)),
        "forward_p90_ms": _round(_p90(forward)),
        "backward_ms": _round(median(backward)) if there else None,
        "backward_p90_ms": _round(_p90(backward)) if there else None,
        "wall_ms": _round(median(walls)),
        "wall_p90_ms": _round(_p90(walls)),
        "peak_mb": peak,
    }


def copy_ms(n_bytes: int, device: str, seconds: float = 0.3) -> float:
    """ms of a copy that reads and writes `n_bytes` together, timed as everything else: the least of torch's two ways."""
    half = max(16, n_bytes // 32 * 16)
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.zeros(half, dtype=torch.uint8, device=device)
    ways = ((source, target), (source.view(torch.int64), target.view(torch.int64)))
    return min(measure(Work(lambda a=a, b=b: b.copy_(a)), device, seconds)["forward_ms"] for a, b in ways)


class Rows:
    """Rows of a run, each appended to the file as soon as it is there, so that a run that is cut off leaves what it has."""

    def __init__(self, path: Path | None, shared: dict[str, Any]) -> None:
        self.path, self.shared, self.rows = path, shared, []
        self.failed: list[str] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def add(self, row: dict[str, Any]) -> None:
        """Takes a row; one with `error` is said, and makes the run fail unless it is a peer's lack of memory."""
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row | self.shared) + "\n")
        if row.get("error"):
            say(f"  {row['backend']}: {row['error']}")
            if row["error"] == OUT_OF_MEMORY and row["backend"] not in BACKENDS:
                return
            self.failed.append(f"{row['case']} {row['backend']}: {row['error']}")
            return
        parts = [f"{name} {row[name]} ms" for name in ("forward_ms", "backward_ms", "wall_ms") if row.get(name) is not None]
        say(f"  {row['backend']:14} {', '.join(parts)}, {row['peak_mb']} MB")

    def finish(self) -> int:
        """The exit code: 1 if a row is an error."""
        say(f"{len(self.rows)} rows{f' written to {self.path}' if self.path else ''}; {len(self.failed)} failures")
        for line in self.failed:
            say(f"FAILED {line}")
        return int(bool(self.failed))


def attempt(rows: Rows, row: dict[str, Any], build: Callable[[], dict[str, Any]]) -> None:
    """Adds `row` with what `build()` measured, or with its error: one contender that fails does not end the run."""
    try:
        made = build()
    except torch.OutOfMemoryError:
        made = {"error": OUT_OF_MEMORY}
    except Exception as error:  # whatever a peer raises; the row and the exit code say it
        made = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]}
    rows.add(row | made)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(line: str) -> None:
    """To stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def _run(work: Work) -> None:
    work.reset()
    out = work.forward()
    if work.backward is not None:
        work.backward(out)


def _sampled(sample: Callable[[], Any], seconds: float) -> list[Any]:
    start, taken = time.perf_counter(), []
    while len(taken) < SAMPLES[0] or (len(taken) < SAMPLES[1] and time.perf_counter() - start < seconds):
        taken.append(sample())
    return taken


def _wall(work: Work, device: str) -> float:
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    work.reset()
    wait()
    start = time.perf_counter()
    out = work.forward()
    result = work.backward(out) if work.backward is not None else None
    wait()
    elapsed = (time.perf_counter() - start) * 1e3
    del out, result
    return elapsed


def _host(work: Work) -> tuple[float, float]:
    work.reset()
    start = time.perf_counter()
    out = work.forward()
    middle = time.perf_counter()
    if work.backward is not None:
        work.backward(out)
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def _peak_mb(work: Work) -> float:
    work.reset()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _run(work)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / MB, 1)


def _calls(work: Work) -> tuple[Callable[[], None], Callable[[], None]]:
    held: list[Any] = []

    def forward() -> None:
        held[:] = [work.forward()]

    def backward() -> None:
        if work.backward is not None:
            work.backward(held[0])

    return forward, backward


def _capture(work: Work) -> tuple[Callable[[], None], Callable[[], None]]:
    """The replays of forward and backward: two graphs with one pool, always replayed in this order."""
    forward = torch.cuda.CUDAGraph()
    work.reset()
    torch.cuda.synchronize()
    with torch.cuda.graph(forward):
        out = work.forward()
    if work.backward is None:
        return forward.replay, lambda: None
    backward = torch.cuda.CUDAGraph()
    with torch.cuda.graph(backward, pool=forward.pool()):
        result = work.backward(out)
    held = (out, result)  # the graphs write there: it must live as long as the replay
    return forward.replay, lambda _held=held: backward.replay()


def _events(work: Work, forward: Callable[[], None], backward: Callable[[], None]) -> tuple[float, float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    work.reset()
    _flush_buffer().sum()
    events[0].record()
    forward()
    events[1].record()
    backward()
    events[2].record()
    events[2].synchronize()
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])


_buffers: list[torch.Tensor] = []


def _flush_buffer() -> torch.Tensor:
    """Read, not written: lines that have to be written back would do so during the sample."""
    if not _buffers:
        _buffers.append(torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda"))
    return _buffers[0]


def _p90(samples: list[float]) -> float:
    return sorted(samples)[int(0.9 * (len(samples) - 1))]


def _round(value: float) -> float:
    return float(f"{value:.4g}")
