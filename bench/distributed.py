"""One selection over several processes: bytes sent and time, against gathering and sorting all tokens.

`python -m bench.distributed` (some 10 minutes on 2 cores, 16 GB); `--quick` for a smoke run. gloo over this machine's loopback,
the cores divided among the ranks. Nothing is timed before both ways have given the right mask. Rows go to
bench/results/<machine>-distributed.jsonl, their tables to docs/distributed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from m2po_kernels import M2Accumulator, Selection, select
from m2po_kernels.reference import select_sorted

from . import machine, report_distributed
from .data import M2_THRESHOLD, TokenBatch, make_batch
from .gate import GateRed

RANKS = (2, 4)
TOKENS = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # per rank
SHARES = (0.005, 0.75)
MOST_FOR_ORACLE = 1 << 24  # beyond it the gate takes `select`, which this very oracle checks in bench.compare
ROUNDS = 7


def sort_gathered(batch: TokenBatch) -> Tensor:
    """keep, the plain way: v of T from every rank, one sort of all, the mask of this rank. Other tokens travel as -1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    log_probs, behavior, advantages, mask = (t.detach() for t in batch.tensors())
    d = log_probs - behavior
    own = torch.where(mask & (d * advantages.sign() > 0), d * d, -1.0).flatten()
    everything = torch.empty(size * own.numel())
    dist.all_gather(list(everything.view(size, -1).unbind()), own)
    inside = (everything >= 0).nonzero().flatten().flip(0)  # the latest of equals first
    values, order = torch.sort(everything[inside], stable=True)
    runs = torch.arange(1, values.numel() + 1, dtype=torch.float64)
    n_kept = (values.cumsum(0, dtype=torch.float64) <= M2_THRESHOLD * runs).sum()
    keep = torch.ones(size * own.numel(), dtype=torch.bool)
    keep[inside[order[n_kept:]]] = False
    return keep.view(size, *mask.shape)[rank] & mask


def added(batch: TokenBatch) -> M2Accumulator:
    """An accumulator that holds this rank's tokens."""
    acc = M2Accumulator(m2_threshold=M2_THRESHOLD)
    acc.add(*batch.tensors())
    return acc


class Sent:
    """Bytes and number of this rank's collectives while the block runs: the buffers as they are handed over."""

    def __enter__(self) -> Sent:
        self.bytes = self.calls = 0
        self.original = dist.all_reduce, dist.all_gather
        dist.all_reduce = self._counting(dist.all_reduce, 0)
        dist.all_gather = self._counting(dist.all_gather, 1)
        return self

    def _counting(self, collective: Callable, argument: int) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            self.bytes += args[argument].numel() * args[argument].element_size()
            return collective(*args, **options)

        return call

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, dist.all_gather = self.original


def gate(batch: TokenBatch, keep: Tensor, name: str) -> None:
    """Raise GateRed, on every rank, unless the ranks' masks together are that of one process that has all tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = []
    for tensor in (*(t.detach() for t in batch.tensors()), keep.view(batch.mask.shape)):
        on_first = torch.empty(size, *tensor.shape, dtype=tensor.dtype) if rank == 0 else None
        dist.gather(tensor.contiguous(), None if on_first is None else list(on_first.unbind()))
        whole.append(on_first)
    verdict = torch.zeros(2, dtype=torch.int64)
    if rank == 0:
        log_probs, behavior, advantages, mask, together = (t.flatten(0, 1) for t in whole)
        if mask.numel() <= MOST_FOR_ORACLE:
            d = log_probs - behavior
            want = select_sorted(d * d, mask & (d * advantages.sign() > 0), mask, M2_THRESHOLD)
        else:
            want = select(log_probs, behavior, advantages, mask, m2_threshold=M2_THRESHOLD).keep
        verdict = torch.stack([(together != want).sum(), (want != mask).sum()])
    dist.broadcast(verdict, 0)
    wrong, dropped = verdict.tolist()
    if wrong or not dropped:
        raise GateRed(f"{name}: {wrong} tokens differ from the one-process mask, which drops {dropped}; expected none, and some")


def timed(call: Callable[[], Any]) -> float:
    """Seconds until the last rank is done, from when all are there."""
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    del result
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(tokens: int, share: float, rounds: int) -> list[dict]:
    """The rows of one case, the same on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = make_batch(tokens, share, seed=rank)
    group = dist.group.WORLD
    case = f"distributed/{size}x{tokens}/{share}"
    acc = added(batch)
    with Sent() as by_digits:
        sel: Selection = acc.solve(group)
    gate(batch, sel.keep, f"{case} solve")
    with Sent() as by_sort:
        keep = sort_gathered(batch)
    gate(batch, keep, f"{case} gather_and_sort")
    del acc, sel, keep
    times: dict[str, list[float]] = {"add": [], "solve": [], "solve_local": [], "gather_and_sort": []}
    for _ in range(rounds):
        times["gather_and_sort"].append(timed(lambda: sort_gathered(batch)))
        for name, over in (("solve", group), ("solve_local", None)):
            held: list[M2Accumulator] = []
            times["add"].append(timed(lambda held=held: held.append(added(batch))))
            times[name].append(timed(lambda held=held, over=over: held[0].solve(over, sync=True)))
    sent = {"solve": by_digits, "gather_and_sort": by_sort}
    base = median(times["gather_and_sort"])
    return [
        {
            "case": case,
            "backend": name,
            "ranks": size,
            "tokens_per_rank": tokens,
            "share": share,
            "samples": len(samples),
            "min_ms": round(min(samples) * 1e3, 3),
            "median_ms": round(median(samples) * 1e3, 3),
            "p90_ms": round(sorted(samples)[min(len(samples) - 1, int(0.9 * len(samples)))] * 1e3, 3),
            "speedup_over_gather_and_sort": round(base / median(samples), 2),
            "collectives": sent[name].calls if name in sent else 0,
            "buffer_bytes": sent[name].bytes if name in sent else 0,
        }
        for name, samples in times.items()
    ]


def worker(rank: int, size: int, store: str, cases: list[tuple[int, float]], rounds: int, out: str) -> None:
    """One rank; the first writes the rows."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for tokens, share in cases:
        rows = measure(tokens, share, rounds)
        if rank == 0:
            with Path(out).open("a") as file:
                for row in rows:
                    file.write(json.dumps(row | {"threads_per_rank": torch.get_num_threads()}) + "\n")
                    print("  {case} {backend}: {median_ms} ms, {buffer_bytes} B".format(**row), file=sys.stderr, flush=True)
    dist.destroy_process_group()


def run(size: int, cases: list[tuple[int, float]], rounds: int) -> list[dict]:
    """The rows of all cases with `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "rows.jsonl")
        mp.spawn(worker, (size, str(Path(folder) / "store"), cases, rounds, out), nprocs=size)
        return [json.loads(line) for line in Path(out).read_text().splitlines()]


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short; rows go nowhere unless --out is given")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-distributed.jsonl; the file is replaced")
    args = parser.parse_args(argv)
    rows: list[dict] = []
    for size in (2,) if args.quick else RANKS:
        sizes = (1 << 14,) if args.quick else TOKENS
        rows += run(size, [(n, share) for n in sizes for share in SHARES], 2 if args.quick else ROUNDS)
    if args.quick and args.out is None:
        return 0
    shared = machine.facts()
    out = args.out or machine.RESULTS / f"{machine.slug(str(shared['device']))}-distributed.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row | shared) + "\n" for row in rows))
    print(f"{len(rows)} rows written to {out}", file=sys.stderr)
    return 0 if args.quick else report_distributed.main([str(out)])


if __name__ == "__main__":
    raise SystemExit(main())
