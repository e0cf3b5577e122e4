"""Log-probs of chosen tokens from logits, forward + backward, against the peers: time, and peak memory in a fresh process.

`python -m bench.logits` (about 3 minutes on 2 cores); `--quick` for small shapes. On a CPU; bench.gpu_logits is for GPUs. All
contenders of a case run alternately in one process, after each has been compared with fp64. Rows go to
bench/results/<machine>-logits.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from m2po_kernels import selective_log_softmax
from m2po_kernels.dispatch import why_not

from . import machine
from .memory import MB, peak_bytes, reset_peak

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CASES = [(2048, 49152, "bf16"), (2048, 49152, "fp32"), (512, 151936, "bf16"), (512, 151936, "fp32")]
QUICK_CASES = [(64, 1000, "bf16"), (64, 1000, "fp32")]
NAMES = ("log_softmax", "trl", "eager", "native")

# A log-prob is off by the rounding of a sum (about 2^-20 of it) and of a logit's distance to the maximum (2^-24 of some 20); the
# peers' bf16 paths round the log-prob itself, 2^-9 of up to 20, and torch's fp32 log_softmax was seen to be 2.5e-5 off at
# V = 151,936. A gate against wrong results, not a measure of accuracy.
TOLERANCE = {"bf16": 0.1, "fp32": 1e-4}


def why_absent(name: str, device: str = "cpu") -> str | None:
    """None if the contender runs here, else why not."""
    if name == "log_softmax":
        return None
    if name == "trl":
        try:
            import trl.trainer.utils  # noqa: F401
        except ImportError as error:
            return f"pip install trl ({error})"
        return None
    return why_not(name, device)


def function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """log-probs [N] from logits [N, V] and ids [N], the way of the contender."""
    if name == "log_softmax":
        return lambda x, ids: x.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    if name == "trl":
        from trl.trainer.utils import selective_log_softmax as theirs

        return theirs
    return lambda x, ids: selective_log_softmax(x, ids, inplace=True, backend=name)


def make(rows: int, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits as a language model gives them (spread 3, one column well above the rest), ids, and what flows into the backward."""
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.empty(rows, vocab, dtype=DTYPES[dtype]).normal_(0, 3, generator=generator)
    ids = torch.randint(vocab, (rows,), generator=generator)
    logits[torch.arange(rows), ids] += 10
    return logits, ids, torch.randn(rows, generator=generator)


def step(run: Callable[[Tensor, Tensor], Tensor], logits: Tensor, ids: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
    """One forward + backward: log-probs and d logits (with inplace=True it lies where the logits were)."""
    leaf = logits.detach().requires_grad_()
    log_probs = run(leaf, ids)
    log_probs.backward(flow.to(log_probs.dtype))
    assert leaf.grad is not None
    return log_probs.detach(), leaf.grad


def gate(name: str, rows: int, vocab: int, dtype: str) -> None:
    """Raise unless log-probs and gradient of a few rows agree with fp64."""
    logits, ids, flow = make(min(rows, 64), vocab, dtype)
    leaf = logits.double().requires_grad_()
    want = leaf.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    want.backward(flow.double())
    got, grad = step(function(name), logits.clone(), ids, flow)
    assert leaf.grad is not None
    worst = max(float((got.double() - want.detach()).abs().max()), float((grad.double() - leaf.grad).abs().max()))
    if not worst <= TOLERANCE[dtype]:
        raise AssertionError(f"{name}, {rows} x {vocab} {dtype}: off by {worst}; no time is reported")


def compare(rows: int, vocab: int, dtype: str, names: list[str], seconds: float) -> list[dict]:
    """The rows of one shape."""
    for name in names:
        gate(name, rows, vocab, dtype)
    logits, ids, flow = make(rows, vocab, dtype)
    target = torch.empty_like(logits).copy_(logits)
    times: dict[str, list[float]] = {name: [] for name in ["copy", *names]}
    start = time.perf_counter()
    while len(times["copy"]) < 3 or (time.perf_counter() - start < seconds and len(times["copy"]) < 30):
        for name in times:
            fresh = logits.clone() if name not in ("copy", "log_softmax", "trl") else logits
            begin = time.perf_counter()
            # The result lives until the clock has stopped: freeing it is no part of the call.
            result = target.copy_(logits) if name == "copy" else step(function(name), fresh, ids, flow)
            times[name].append(time.perf_counter() - begin)
            del result
    base = median(times["log_softmax"])
    made = []
    for name, samples in times.items():
        ordered = sorted(samples)
        made.append(
            {
                "case": f"logits/{rows}x{vocab}/{dtype}",
                "backend": name,
                "rows": rows,
                "vocab": vocab,
                "dtype": dtype,
                "samples": len(samples),
                "min_ms": round(ordered[0] * 1e3, 3),
                "median_ms": round(median(samples) * 1e3, 3),
                "p90_ms": round(ordered[int(0.9 * (len(ordered) - 1))] * 1e3, 3),
                "speedup_over_log_softmax": round(base / median(samples), 2),
                "speedup_over_trl": round(median(times["trl"]) / median(samples), 2) if "trl" in times else None,
                "times_copy": round(median(samples) / median(times["copy"]), 2),
                "extra_mb": None if name == "copy" else extra_memory(name, rows, vocab, dtype),
            }
        )
        print("  {case} {backend}: {median_ms} ms, {extra_mb} MB".format(**made[-1]), file=sys.stderr, flush=True)
    return made


def extra_memory(name: str, rows: int, vocab: int, dtype: str) -> float:
    """MB that one forward + backward adds at its peak to the logits, in a fresh process."""
    command = [sys.executable, "-m", "bench.logits", "--child", name, str(rows), str(vocab), dtype]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=True)
    return round(float(done.stdout.splitlines()[-1]), 1)


def child(name: str, rows: int, vocab: int, dtype: str) -> None:
    """Prints the MB of `extra_memory`."""
    run = function(name)
    step(run, *make(2, 64, dtype))  # loads what is loaded once
    logits, ids, flow = make(rows, vocab, dtype)
    before = reset_peak()
    step(run, logits, ids, flow)
    print((peak_bytes() - before) / MB)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.logits", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, rows go nowhere unless --out is given")
    parser.add_argument("--seconds", type=float, default=12.0, help="time for the rounds of one shape")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-logits.jsonl; the file is replaced")
    parser.add_argument("--child", nargs=4, metavar=("NAME", "ROWS", "VOCAB", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        name, rows, vocab, dtype = args.child
        child(name, int(rows), int(vocab), dtype)
        return 0
    names = []
    for name in NAMES:
        reason = why_absent(name)
        if reason is None:
            names.append(name)
        else:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    cases = QUICK_CASES if args.quick else CASES
    shared = machine.facts() | {"trl": machine.version("trl")}
    made = [row | shared for case in cases for row in compare(*case, names, 1.0 if args.quick else args.seconds)]
    if args.quick and args.out is None:
        return 0
    out = args.out or machine.RESULTS / f"{machine.slug(str(shared['device']))}-logits.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in made))
    print(f"{len(made)} rows written to {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
