"""The loss and its gradients from hidden states against the peers: time, peak memory and operations; and how it grows with N.

`python -m bench.linear` (about 20 minutes on 2 quiet cores; `--device cuda` for a GPU's shapes; `--quick` for small ones). All
contenders of a case run by turns in one process, after each has been compared with fp64. Rows go to
bench/results/<machine>-linear.jsonl; `python -m bench.linear_report` makes a page and a plot of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode

from m2po_kernels import linear_m2po_loss
from m2po_kernels.linear.plan import Work

from . import linear_contenders as contenders
from . import machine
from .linear_contenders import Batch, Shape
from .memory import MB, peak_bytes, reset_peak

SHARES = (0.0, 0.4, 0.7)  # of the rows that have no advantage; 45.6 % of the tokens in the recorded rollouts
CASES = {"cpu": Shape(4096, 576, 49152, "fp32"), "cuda": Shape(32768, 4096, 152064, "bf16")}
SCALING = {"cpu": (4096, 8192, 16384, 32768, 65536), "cuda": (8192, 16384, 32768, 65536, 131072)}
QUICK = Shape(256, 64, 2000, "fp32")
QUICK_SCALING = (256, 512)
GATE_ROWS, GATE_WIDTH, GATE_VOCAB = 512, 48, 1500
SCALING_SHARE = 0.4

# Relative to the largest value. A gate against wrong results, not a measure of accuracy: bf16 peers round logits and log-probs.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


def gate(name: str, share: float, dtype: str, device: str) -> None:
    """Raise unless loss and gradients of a small batch of the same kind agree with fp64."""
    batch = contenders.make_batch(Shape(GATE_ROWS, GATE_WIDTH, GATE_VOCAB, dtype), share, device)
    loss = contenders.run(name, batch)
    got = [loss.detach(), *(t.grad for t in (batch.hidden, batch.weight))]
    want = contenders.exact(name, batch)
    for what, a, b in zip(("loss", "d hidden", "d weight"), got, want, strict=True):
        assert a is not None
        worst = float((a.double() - b).abs().max() / b.abs().max())
        if not worst <= TOLERANCE[dtype]:
            raise AssertionError(f"{name}, {share:.0%} without advantage, {dtype}: {what} off by {worst}; no time is reported")


def compare(shape: Shape, share: float, names: list[str], seconds: float, device: str) -> list[dict]:
    """The rows of one case: each contender gated, then all by turns for about `seconds`."""
    times: dict[str, list[float]] = {}
    for name in names:
        if name != "products":
            gate(name, share, shape.dtype, device)
        times[name] = []
    batch = contenders.make_batch(shape, share, device)
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or (time.perf_counter() - start < seconds and rounds < 20):
        for name, samples in times.items():
            samples.append(_time(name, batch))
        rounds += 1
    rows = []
    for name, samples in times.items():
        own = median(samples)
        rows.append(
            {
                "case": f"linear/{shape.rows}x{shape.width}x{shape.vocab}/{shape.dtype}/{share:g}",
                "backend": name,
                **shape._asdict(),
                "share_without_advantage": share,
                "samples": len(samples),
                "min_ms": round(min(samples) * 1e3, 2),
                "median_ms": round(own * 1e3, 2),
                "times_products": round(own / median(times["products"]), 3),
                "extra_mb": extra_memory(name, shape, share, device),
                "gflop": round(operations(name, batch) / 1e9, 3),
            }
        )
        print("  {case} {backend}: {median_ms} ms, {extra_mb} MB, {gflop} GFLOP".format(**rows[-1]), file=sys.stderr, flush=True)
    return rows


def scaling(shape: Shape, device: str) -> dict:
    """The row of this package at one N of many, with one workspace: the least time of two runs, and the memory."""
    batch = contenders.make_batch(shape, SCALING_SHARE, device)
    seconds = min(_time("m2po", batch) for _ in range(2))
    itemsize = batch.hidden.element_size()
    outputs = (shape.rows + shape.vocab) * shape.width * itemsize / MB  # d hidden and d weight
    extra = extra_memory("m2po", shape, SCALING_SHARE, device)
    row = {
        "case": f"linear-scaling/{shape.rows}",
        "backend": "m2po",
        **shape._asdict(),
        "share_without_advantage": SCALING_SHARE,
        "min_ms": round(seconds * 1e3, 2),
        "extra_mb": extra,
        "outputs_mb": round(outputs, 1),
    }
    print("  {case}: {min_ms} ms, {extra_mb} MB, of which outputs {outputs_mb}".format(**row), file=sys.stderr, flush=True)
    return row


def operations(name: str, batch: Batch) -> int:
    """Operations in matrix products of one forward and backward.

    As torch counts them; a custom op hides its products from that, so those of m2po are the formula over the rows it reports,
    which tests/test_linear_loss.py holds against torch's count inside the op.
    """
    if name == "m2po":
        work = linear_m2po_loss(batch.hidden, batch.weight, batch.ids, batch.behavior, batch.advantages, batch.mask).work
        assert work is not None
        return Work(*work.tolist()).flops(*batch.weight.shape)
    with FlopCounterMode(display=False) as counter:
        contenders.run(name, batch)
    return counter.get_total_flops()


def extra_memory(name: str, shape: Shape, share: float, device: str) -> float:
    """MB that one forward and backward, gradients included, adds at its peak: of the process on a CPU, of the allocator else."""
    if device == "cpu":
        arguments = ["--child", name, *map(str, shape), str(share)]
        done = subprocess.run(
            [sys.executable, "-m", "bench.linear", *arguments], cwd=machine.ROOT, capture_output=True, text=True, check=True
        )
        return round(float(done.stdout.splitlines()[-1]), 1)
    batch = contenders.make_batch(shape, share, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contenders.run(name, batch)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / MB, 1)


def _child(name: str, shape: Shape, share: float) -> None:
    """Prints the MB of `extra_memory` on a CPU."""
    contenders.run(name, contenders.make_batch(Shape(64, 8, 100, shape.dtype), 0.0, "cpu"))  # loads what is loaded once
    batch = contenders.make_batch(shape, share, "cpu")
    before = reset_peak()
    contenders.run(name, batch)
    print((peak_bytes() - before) / MB)


def _time(name: str, batch: Batch) -> float:
    """Seconds of one forward and backward into fresh gradients."""
    batch.hidden.grad = batch.weight.grad = None
    if batch.hidden.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    contenders.run(name, batch)
    if batch.hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.linear", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, rows go nowhere unless --out is given")
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    parser.add_argument("--seconds", type=float, default=90.0, help="time for the rounds of one case")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-linear.jsonl; the file is replaced")
    parser.add_argument("--child", nargs=6, metavar=("NAME", "ROWS", "WIDTH", "VOCAB", "DTYPE", "SHARE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        name, rows, width, vocab, dtype, share = args.child
        _child(name, Shape(int(rows), int(width), int(vocab), dtype), float(share))
        return 0
    names = []
    for name in contenders.NAMES:
        reason = contenders.why_absent(name, args.device)
        if reason is None:
            names.append(name)
        else:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    shape = QUICK if args.quick else CASES[args.device]
    facts = machine.facts(args.device) | {name: machine.version(name) for name in ("trl", "liger-kernel", "cut-cross-entropy")}
    rows: list[dict] = []
    for share in SHARES:
        rows += compare(shape, share, names, 1.0 if args.quick else args.seconds, args.device)
    for n in QUICK_SCALING if args.quick else SCALING[args.device]:
        rows.append(scaling(shape._replace(rows=n), args.device))
    if args.quick and args.out is None:
        return 0
    out = args.out or machine.RESULTS / f"{machine.slug(str(facts['device']))}-linear.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    print(f"{len(rows)} rows written to {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
