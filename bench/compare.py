"""On a CPU: all contenders alternately, so that the drift of the machine cancels in their ratios; rows to bench/results/.

`python -m bench.compare` (about 6 minutes on 2 cores), `--quick` for a smoke run whose rows go nowhere unless --out is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

from . import contenders, gate, machine, memory
from .contenders import LABELS, NAMES, TASKS, Call
from .data import SHARES, TOKENS, make_batch

Times = dict[tuple[str, str], list[float]]  # (contender, task) -> seconds

MIN_ROUNDS, MAX_ROUNDS = 3, 40
QUICK_CALLS = 3  # runs of a quick call in each of its turns


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1, with no rows, if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2^16 tokens, one second a batch, no compiler")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="N", help="default: 2^16 2^20 2^24")
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=list(SHARES), help="candidates in T")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, metavar="NAME", help=f"default: all of {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=float, help="time for the rounds of one batch; default 40, a quarter of it below 2^24")
    parser.add_argument("--out", type=Path, help="default: bench/results/<machine>.jsonl; the file is replaced")
    args = parser.parse_args(argv)
    names = args.contenders or [name for name in NAMES if not (args.quick and name == "compiled")]
    present = []
    for name in names:
        reason = contenders.why_not(name)
        if reason is None:
            present.append(name)
        elif args.contenders:
            parser.error(f"contender {name} cannot run: {reason}")
        else:
            _say(f"{name} is left out: {reason}")
    shared = machine.facts()
    rows: list[dict] = []
    try:
        for tokens in args.tokens or ((TOKENS[0],) if args.quick else TOKENS):
            seconds = args.seconds or (1.0 if args.quick else 40.0 if tokens >= 1 << 24 else 10.0)
            for share in args.shares:
                rows += compare(tokens, share, present, seconds)
    except gate.GateRed as error:
        _say(f"no rows written: {error}")
        return 1
    if not args.quick:
        rows += _memory_rows(rows, present)
    if args.out is None and args.quick:
        return 0
    out = args.out or machine.RESULTS / f"{machine.slug(str(shared['device']))}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row | shared) + "\n" for row in rows))
    _say(f"{len(rows)} rows written to {out}")
    return 0


def compare(tokens: int, share: float, names: list[str], seconds: float) -> list[dict]:
    """The rows of one batch: each contender and task, gated, then timed in rounds for about `seconds`."""
    case = f"{tokens} tokens, {share:.1%} candidates"
    _say(f"{case}: batch, oracle, gate")
    batch = make_batch(tokens, share)
    oracle = gate.Oracle.of(batch)
    calls: dict[tuple[str, str], Call] = {}
    first: dict[tuple[str, str], float] = {}
    for task in TASKS:
        for name in names:
            if not contenders.has(name, task):
                continue
            call = contenders.make_call(name, task, batch)
            gate.check(oracle, call, f"{name} {task}, {case}")
            calls[name, task], first[name, task] = call, _time(call)
    del oracle
    way, copy = _fastest_copy(contenders.copy_calls(tokens))
    times = _rounds(calls, first, copy, seconds)
    copy_median = median(times["copy", "copy"])
    rows = []
    for (name, task), samples in times.items():
        base = times.get(("sort_based", TASKS.get(task, task)))
        row = {
            "case": f"{task}/{tokens}/{share:g}",
            "what": task,
            "tokens": tokens,
            "share": share,
            "measured_share": round(batch.measured_share, 5),
            "backend": name,
            **_percentiles(samples),
            "speedup_over_sort_based": _round(median(base) / median(samples)) if base else None,
            "times_copy": _round(median(samples) / copy_median),
            "peak_rss_mb": None,
        }
        rows.append(row | {"copy_way": way} if name == "copy" else row)
    for task in TASKS:
        own = [row for row in rows if row["what"] == task]
        _say(f"  {task:24}" + "".join(f"{row['backend']} {row['median_ms']:.2f} ms  " for row in own))
    _say(f"  copy by {way}: {copy_median * 1e3:.2f} ms; {rows[0]['samples']} to {rows[-1]['samples']} samples each")
    return rows


def _rounds(
    calls: dict[tuple[str, str], Call],
    first: dict[tuple[str, str], float],
    copy: Call,
    seconds: float,
) -> Times:
    """Round after round through all calls. Within a task, the quick calls and the copy have a turn after each slow one."""
    times: Times = {key: [] for key in calls}
    times["copy", "copy"] = []
    start, done = time.perf_counter(), 0
    while done < MIN_ROUNDS or (done < MAX_ROUNDS and (time.perf_counter() - start) * (done + 1) / done < seconds):
        for task in TASKS:
            keys = [key for key in calls if key[1] == task]
            slowest = max((first[key] for key in keys), default=0.0)
            slow = [key for key in keys if first[key] > slowest / 10]
            quick = [(key, calls[key]) for key in keys if key not in slow] + [(("copy", "copy"), copy)]
            for key in slow:
                times[key].append(_time(calls[key]))
                for _ in range(QUICK_CALLS):
                    for quick_key, call in quick:
                        times[quick_key].append(_time(call))
        done += 1
    return times


def _fastest_copy(ways: dict[str, Call]) -> tuple[str, Call]:
    """The way whose median of 15 alternate runs is least, as the baseline: the harder one to be measured against."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(15):
        for name, call in ways.items():
            times[name].append(_time(call))
    best = min(ways, key=lambda name: median(times[name]))
    return best, ways[best]


def _time(call: Call) -> float:
    """Seconds of one run. The result lives until the clock has stopped: freeing it is no part of the call."""
    call.reset()
    start = time.perf_counter()
    result = call.run()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def _percentiles(samples: list[float]) -> dict[str, float | int]:
    ordered = sorted(samples)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {
        "samples": len(ordered),
        "min_ms": _round(ordered[0] * 1e3),
        "median_ms": _round(median(ordered) * 1e3),
        "p90_ms": _round(p90 * 1e3),
    }


def _memory_rows(rows: list[dict], names: list[str]) -> list[dict]:
    """Puts the peak of the forward of the largest batches into their rows; returns a row for the import."""
    largest = max(row["tokens"] for row in rows)
    for row in rows:
        if row["what"] == "forward" and row["tokens"] == largest and row["backend"] in names and row["backend"] != "compiled":
            measured = memory.measure_forward(row["backend"], largest, row["share"])
            row["peak_rss_mb"], row["peak_limit_mb"] = round(measured["peak_mb"], 1), round(measured["limit_mb"], 1)
            _say(f"  peak of forward, {LABELS[row['backend']]}, {row['share']:.1%}: {row['peak_rss_mb']} MB")
    cost = memory.measure_import()
    _say(f"  import adds {cost['added_ms']:.1f} ms")
    return [{"case": "import", "what": "import", "backend": None, **cost}]


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
