"""`m2po stale`: the command. Runs what is not there yet, then writes rows, pictures and table."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from ..shared import progress_bar, stderr_console, stdout_console
from . import figures, report, runs
from .plan import ARMS, FULL, QUICK
from .report import Comparison


def stale(
    quick: Annotated[bool, typer.Option("--quick", help="A shorter training on fewer seeds and ages: under 3 minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds; default 5, with --quick 2.", min=1)] = None,
    workers: Annotated[int | None, typer.Option(help="Processes, one thread each; default: cores, at most 8.", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for rows.jsonl, stale.png and curves.png; default: out/stale, with --quick out/stale/quick."),
    ] = None,
    runs_dir: Annotated[Path, typer.Option("--runs", help="Folder for finished runs, which are not run again.")] = Path(
        "out/stale/runs"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the finished runs of this comparison first.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report", help="Train nothing: pictures and table from the rows.jsonl in --out.")
    ] = False,
    into: Annotated[Path | None, typer.Option(help="Put the table into this Markdown page, between its markers.")] = None,
) -> None:
    """Train a small transformer on rollouts from k updates ago: GRPO, no trust region, M2PO and two variants, side by side.

    Needs the extra 'stale' (transformers). Interrupted, it goes on where it stopped. All of it takes under half an hour on 2
    cores.
    """
    if out is None:  # a quick try must not take the place of a whole comparison
        out = Path("out/stale/quick" if quick else "out/stale")
    rows = out / "rows.jsonl"
    if report_only:
        comparison = report.load(rows)
    else:
        comparison = _run(quick, seeds, workers, runs_dir, fresh)
        report.save(comparison, rows)
    figures.summary(comparison, out / "stale.png")
    figures.curves(comparison, out / "curves.png")
    if into is not None:
        report.put_into(into, report.table(comparison))
    _print(comparison)
    places = [rows, out / "stale.png", out / "curves.png", *([into] if into is not None else [])]
    stdout_console().print(f"written: {', '.join(map(str, places))}", markup=False)


def _run(quick: bool, seeds: int | None, workers: int | None, folder: Path, fresh: bool) -> Comparison:
    plan = QUICK if quick else FULL
    if seeds is not None:
        plan = replace(plan, seeds=seeds)
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
    start = time.perf_counter()
    first: int | None = None  # how many were done when this session began
    console = stderr_console()
    with progress_bar() as progress:
        task = progress.add_task("warm starts and runs", total=None)

        def finished(done: int, total: int, line: str) -> None:
            nonlocal first
            minutes = (time.perf_counter() - start) / 60
            first = done - 1 if first is None else first
            left = minutes / (done - first) * (total - done)
            progress.update(task, completed=done, total=total)
            shown = progress.console if console.is_terminal else console
            shown.print(f"[{done}/{total}] {line}; {left:.1f} minutes left at this rate", markup=False, soft_wrap=True)

        made = runs.run_all(plan, folder, workers, fresh, finished)
    facts = {
        **runs.facts(plan, workers),
        **plan.values(),
        "core_minutes": round(sum(result.seconds for result in made) / 60, 1),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return Comparison(facts, [result.row for result in made])


def _print(comparison: Comparison) -> None:
    from rich.table import Table

    table = Table(title=f"Stale rollouts, {len(comparison.seeds)} seeds (± 95 %)", title_justify="left")
    heads = ["k", "rule", "reward", "- on-policy", "lost", "M2", "after", "left out", "clip .2", "entropy", "norm"]
    for heading in heads:
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for staleness in comparison.staleness:
        for arm in ARMS:
            if comparison.of(arm, staleness):
                table.add_row(*report.cells(comparison, arm, staleness))
        table.add_section()
    stdout_console().print(table)
    heads, rows = report.differences(comparison)
    title = "Reward at the end: M2PO minus the others, paired by seed (*: the interval does not reach 0)"
    table = Table(title=title, title_justify="left")
    for heading in heads:
        table.add_column(heading, justify="right")
    for cells, beyond in rows:
        table.add_row(*(f"{cell} *" if mark else cell for cell, mark in zip(cells, beyond, strict=True)))
    stdout_console().print(table)
