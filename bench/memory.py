"""Peak memory of one forward, and what importing the package costs; each in fresh processes. Linux with glibc.

`python -m bench.memory` prints both. Memory: the inputs are made and touched, freed memory goes back to the system, the peak is
reset (5 into /proc/self/clear_refs sets VmHWM to what is resident), then one forward runs. The result is what it added.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .machine import ROOT

MB = 1e6
GRADIENT_BYTES = 4  # a token
CANDIDATE_BYTES = 16  # a candidate in a list: fp32 v, fp32 share of the loss, int64 position
ALLOWANCE = 16 * MB
UNWANTED = ("triton", "typer", "rich", "matplotlib", "pyarrow")

_TIMED_IMPORT = """
import json, sys, time
start = time.perf_counter(); import torch; middle = time.perf_counter(){statement}; end = time.perf_counter()
print(json.dumps([end - start, end - middle, sorted(set({unwanted!r}) & set(sys.modules))]))
"""


def measure_forward(name: str, tokens: int, share: float) -> dict[str, float]:
    """MB that one forward of contender `name` added at its peak, in a fresh process, and the limit it is held to."""
    arguments = ["--child", "--contenders", name, "--tokens", str(tokens), "--share", str(share)]
    return json.loads(_python("-m", "bench.memory", *arguments))


def measure_import(runs: int = 5) -> dict[str, Any]:
    """What `import m2po_kernels` adds to `import torch`: the least of `runs` processes of each kind, alternately.

    added_ms: within one process, the import after torch's; difference_ms: between whole processes; loaded: the modules of
    UNWANTED that it brought in, which must be none.
    """
    alone, added, whole, loaded = [], [], [], set()
    for _ in range(runs):
        alone.append(_timed_import("")[0])
        total, own, modules = _timed_import("; import m2po_kernels")
        whole.append(total)
        added.append(own)
        loaded |= set(modules)
    return {
        "torch_ms": min(alone) * 1e3,
        "added_ms": min(added) * 1e3,
        "difference_ms": (min(whole) - min(alone)) * 1e3,
        "loaded": sorted(loaded),
    }


def _timed_import(statement: str) -> tuple[float, float, list[str]]:
    return tuple(json.loads(_python("-c", _TIMED_IMPORT.format(statement=statement, unwanted=UNWANTED))))


def _python(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(args[:2])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def reset_peak() -> float:
    """Returns freed memory to the system and sets the peak to what is resident, which it returns in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise what comes next could reuse what was freed before, unseen
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> float:
    """The most that was resident since `reset_peak`, in bytes."""
    return _status("VmHWM")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _forward_here(name: str, tokens: int, share: float) -> dict[str, float]:
    from .contenders import make_call
    from .data import make_batch

    # A small forward first: thread stacks and code pages are no part of what a batch costs.
    make_call(name, "forward", make_batch(1 << 12, share)).run()
    batch = make_batch(tokens, share)
    call = make_call(name, "forward", batch)
    before = reset_peak()
    result = call.run()
    peak = peak_bytes() - before
    del result
    limit = GRADIENT_BYTES * tokens + CANDIDATE_BYTES * batch.candidates + ALLOWANCE
    return {"peak_mb": peak / MB, "limit_mb": limit / MB, "bytes_per_token": peak / tokens, "candidates": batch.candidates}


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 if `native` exceeds its memory limit or the import loads what it must not."""
    from .contenders import NAMES, why_not
    from .data import SHARES

    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--tokens", type=int, default=1 << 24)
    parser.add_argument("--share", type=float, choices=SHARES, default=0.005, help="candidates in T")
    parser.add_argument("--runs", type=int, default=5, help="processes of each kind for the import time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(_forward_here(args.contenders[0], args.tokens, args.share)))
        return 0
    failed = False
    for name in args.contenders:
        reason = why_not(name)
        if reason:
            print(f"{name:12} not measured: {reason}")
            continue
        m = measure_forward(name, args.tokens, args.share)
        over = m["peak_mb"] > m["limit_mb"]
        failed |= over and name == "native"
        print(
            f"{name:12} forward of {args.tokens} tokens added {m['peak_mb']:.1f} MB, {m['bytes_per_token']:.2f} B a token; "
            f"limit {m['limit_mb']:.1f} MB: {'over' if over else 'within'}"
        )
    cost = measure_import(args.runs)
    failed |= bool(cost["loaded"])
    print(
        f"import m2po_kernels adds {cost['added_ms']:.1f} ms to import torch ({cost['torch_ms']:.0f} ms); "
        f"loaded of {', '.join(UNWANTED)}: {', '.join(cost['loaded']) or 'none'}"
    )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
