"""From the rows of bench.real_model to the tables of docs/real-model.md. `python -m bench.real_model_report [ROWS]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from .machine import RESULTS, ROOT
from .report import REAL_MODEL, put_between_markers

PAGE = ROOT / "docs" / "real-model.md"
LABELS = {"m2po": "`linear_m2po_loss`", "trl": "TRL's log-probs", "plain": "plain log-probs"}
Row = dict[str, Any]


def block(rows: list[Row]) -> str:
    """Time and memory of the first update by contender; then every update, with how stale it was."""
    first = rows[0]
    lines = [
        f"Forward + backward of {first['sequences']} sequences ({first['positions']:,} positions of completions, in the first "
        f"update {first['valid']:,} of them valid and {first['with_advantage']:,} with an advantage), H = {first['width']}, "
        f"V = {first['vocab']:,}, fp32, on {first['device']}, {first['threads']} threads; torch {first['torch']}, "
        f"transformers {first['transformers']}{', trl ' + first['trl'] if first['trl'] else ''}, m2po_kernels "
        f"{first['m2po_kernels']} at {first['commit']}; {first['date']}. Times: medians of {first['samples']} by turns. "
        "MB: what one run adds at its peak, gradients included.",
        "",
        "| first update | whole step, ms | over ours | MB | head alone, ms | over ours | MB | gradients off by |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    names = list(dict.fromkeys(row["backend"] for row in reversed(rows)))
    found = {(row["what"], row["update"], row["backend"]): row for row in rows}
    for name in names:
        cells = [LABELS[name]]
        for what in ("step", "head"):
            row, ours = found[what, 0, name], found[what, 0, "m2po"]
            memory = "" if row["extra_mb"] is None else f"{row['extra_mb']:,.0f}"
            cells += [f"{row['median_ms']:,.0f}", f"{row['median_ms'] / ours['median_ms']:.2f}", memory]
        lines.append(_line([*cells, f"{found['step', 0, name]['gradient_error']:.1e}"]))
    lines += [
        "",
        "Over the updates, each of which makes the next batch staler:",
        "",
        _line(
            [
                "update",
                "T",
                "candidates",
                "dropped",
                *(f"{LABELS[n]}, head ms" for n in names),
                "plain / ours",
                "losses differ by",
            ]
        ),
        _line(["---:"] * (6 + len(names))),
    ]
    for update in sorted({row["update"] for row in rows}):
        own = {name: found["head", update, name] for name in names}
        ours, losses = own["m2po"], [row["loss"] for row in own.values()]
        counts = (f"{ours[key]:,}" for key in ("trust_region", "candidates", "dropped"))
        times = (f"{row['median_ms']:,.0f}" for row in own.values())
        ratio = f"{own['plain']['median_ms'] / ours['median_ms']:.2f}"
        lines.append(_line([str(update), *counts, *times, ratio, f"{max(losses) - min(losses):.1e}"]))
    whole = [found["step", u, "plain"]["median_ms"] / found["step", u, "m2po"]["median_ms"] for u in {r["update"] for r in rows}]
    return "\n".join(
        [*lines, "", f"The whole step with plain log-probs takes {median(whole):.2f} times ours, median over the updates."]
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.real_model_report", description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, help=f"default: the one file bench/results/*{REAL_MODEL}.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    files = [args.rows] if args.rows else sorted(RESULTS.glob(f"*{REAL_MODEL}.jsonl"))
    if len(files) != 1:
        parser.error(f"rows: expected one file; found {', '.join(map(str, files)) or 'none'}: run `python -m bench.real_model`")
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    args.page.write_text(put_between_markers(args.page.read_text(), block(rows), str(args.page)))
    print(f"{args.page}: tables replaced", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
