"""select, and loss with gradient, from log-probs on a GPU: all contenders, each batch gated by the oracle first.

`python -m bench.gpu_tokens` (some minutes; with `--budget` the last cases are left out), part of `bench/gpu.sh`. `--quick
--device cpu` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from . import contenders, gate, machine
from .data import FULL_KINDS, TokenBatch, make_batch, make_full_batch
from .device_time import Rows, Work, attempt, copy_ms, measure, say

NAMES = (*contenders.NAMES, "sort_static")
CAPTURABLE = ("cuda", "triton", "sort_static")  # the others ask the device for a size on the way
COMPILED_TOKENS = 1 << 20  # torch.compile takes 10 to 20 s for each length
# The first are the ones that targets are set for: a run that is cut off has them.
CASES: tuple[tuple[int, float | str], ...] = (
    (1 << 20, 0.005),
    (1 << 20, "all"),
    (1 << 20, "equal"),
    (1 << 20, "tied"),
    (1 << 24, 0.005),
    (1 << 24, "equal"),
    (1 << 20, 0.13),
    (1 << 20, 0.75),
    (1 << 16, 0.005),
    (1 << 25, 0.005),
    (1 << 18, 0.005),
    (1 << 22, 0.005),
)
# The least that one sweep moves, in bytes a token: log-prob, behaviour log-prob, advantage (4 each) and mask (1) are read; select
# writes a byte, the backward reads again and writes 4.
BYTES = {"select": 14, "forward": 13, "backward": 17}


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 if anything failed. What could be measured is in the rows all the same."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_tokens", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="2^16 tokens only, rows go nowhere unless --out is given")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each contender and task")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no new batch is begun")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>-gpu-tokens.jsonl; the file is replaced")
    args = parser.parse_args(argv)
    shared = machine.facts(args.device)
    out = args.out or (None if args.quick else machine.RESULTS / f"{machine.slug(str(shared['device']))}-gpu-tokens.jsonl")
    rows = Rows(out, shared)
    names = []
    for name in NAMES:
        reason = None if name == "sort_static" else contenders.why_not(name, args.device)
        if reason is None:
            names.append(name)
        else:
            say(f"{name} is left out: {reason}")
    cases = [(1 << 16, kind) for kind in (0.005, *FULL_KINDS)] if args.quick else CASES
    start, left_out = time.perf_counter(), []
    for tokens, kind in cases:
        if time.perf_counter() - start > args.budget:
            left_out.append(f"{tokens}/{kind}")
            continue
        compare(rows, tokens, kind, names, args.device, args.seconds)
    if left_out:
        say(f"no time for {', '.join(left_out)}")
    return rows.finish()


def compare(rows: Rows, tokens: int, kind: float | str, names: list[str], device: str, seconds: float) -> None:
    """The rows of one batch. kind: a share of data.SHARES, or one of FULL_KINDS."""
    say(f"{tokens} tokens, {kind}: batch, oracle")
    batch = make_full_batch(tokens, kind, device=device) if isinstance(kind, str) else make_batch(tokens, kind, device=device)
    oracle = gate.Oracle.of(batch)
    copies = {what: copy_ms(n * tokens, device) for what, n in BYTES.items()}
    floors = empty_launches(tokens, device, seconds) if "cuda" in names else {}
    for task in ("select", "loss"):
        for name in names:
            if name == "compiled" and tokens != COMPILED_TOKENS:
                continue
            row = {
                "case": f"{task}/{tokens}/{kind}",
                "what": task,
                "tokens": tokens,
                "kind": str(kind),
                "measured_share": round(batch.measured_share, 5),
                "backend": name,
            }
            if name == "cuda":
                row |= floors
            attempt(rows, row, lambda name=name, task=task: _measured(name, task, batch, oracle, copies, device, seconds))


def empty_launches(tokens: int, device: str, seconds: float) -> dict[str, float]:
    """ms of a cooperative launch with the grid of `cuda` that only meets: as often as with nothing to drop, and at most."""
    on = torch.empty(1, device=device)
    work = {n: Work(lambda n=n: torch.ops.m2po_cuda.empty_launch(on, tokens, n)) for n in (1, 5)}
    return {f"empty_{n}_syncs_ms": measure(w, device, seconds)["forward_ms"] for n, w in work.items()}


def _measured(
    name: str, task: str, batch: TokenBatch, oracle: gate.Oracle, copies: dict[str, float], device: str, seconds: float
) -> dict[str, Any]:
    work = work_of(name, task, batch)
    out = work.forward()
    gate.check_result(oracle, out if work.backward is None else (out, work.backward(out)), f"{name} {task}")
    del out
    times = measure(work, device, seconds)
    first = "select" if task == "select" else "forward"
    return {
        **times,
        "forward_percent_of_copy": _percent(copies[first], times["forward_ms"]),
        "backward_percent_of_copy": _percent(copies["backward"], times["backward_ms"]),
    }


def work_of(name: str, task: str, batch: TokenBatch) -> Work:
    """What is timed for `name` doing "select" or "loss" on `batch`."""
    tensors = batch.tensors()
    select, loss = contenders.functions(name, task, tensors)
    if task == "select":
        return Work(lambda: select(*tensors), capturable=name in CAPTURABLE)
    return Work(lambda: loss(*tensors), lambda out: torch.autograd.grad(out, batch.log_probs)[0], capturable=name in CAPTURABLE)


def _percent(copy: float, ms: float | None) -> float | None:
    return None if ms is None else round(100 * copy / ms, 1)


if __name__ == "__main__":
    raise SystemExit(main())
