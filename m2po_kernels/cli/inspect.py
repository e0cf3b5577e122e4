"""`m2po inspect FILE`: how stale a file of rollouts is, as tables and a picture."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..rule import Rule
from .advice import notes
from .plots import save_plot
from .rollouts import Columns, read_rollouts
from .shared import CliError, number, print_json, progress_bar, share, stdout_console
from .staleness import CLIP, Staleness, measure

_COLUMN = "Name of the column that holds the {}."


def number_option(text: str | float) -> float:
    """The parser of an option that takes any float, inf too."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected a number, got {text!r}") from error


def inspect(
    file: Annotated[Path, typer.Argument(help=".safetensors, .parquet or .jsonl; one sequence per row.")],
    log_probs: Annotated[str, typer.Option(help=_COLUMN.format("current log-probs"))] = "log_probs",
    behavior_log_probs: Annotated[str, typer.Option(help=_COLUMN.format("rollout engine's log-probs"))] = "behavior_log_probs",
    advantages: Annotated[str, typer.Option(help=_COLUMN.format("advantages, per sequence or per token"))] = "advantages",
    mask: Annotated[str, typer.Option(help=_COLUMN.format("mask; parquet and JSON lines may do without"))] = "mask",
    m2_threshold: Annotated[float, typer.Option(help="The M2 threshold tau.", parser=number_option, metavar="NUMBER")] = 0.04,
    plot: Annotated[Path | None, typer.Option(help="Where to write the picture; default: FILE's stem + .png, here.")] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Write no picture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables (not finite: null).")] = False,
) -> None:
    """Say how stale rollouts are: M2, what M2PO would drop at which threshold, what PPO's clip would have clipped.

    docs/rollout-files.md describes the files.
    """
    if plot is not None and no_plot:
        raise CliError("--plot and --no-plot exclude each other")
    Rule(m2_threshold=m2_threshold)  # a bad threshold is an error before the file is read
    with progress_bar() as progress:
        task = progress.add_task(f"reading {file.name}", total=1.0)
        columns = Columns(log_probs, behavior_log_probs, advantages, mask)
        rollouts = read_rollouts(file, columns, lambda done: progress.update(task, completed=done))
        progress.update(task, description="measuring", total=None)
        staleness = measure(rollouts, m2_threshold)
        odd = notes(rollouts, columns)
        picture = None
        if not no_plot:
            picture = Path(f"{file.stem}.png") if plot is None else plot
            progress.update(task, description="drawing")
            save_plot(staleness, f"{file.name}: {log_probs}", picture)
    if as_json:
        print_json({"file": str(file), **as_data(staleness), "notes": odd, "plot": None if picture is None else str(picture)})
        return
    print_staleness(staleness, f"{file.name}: {log_probs} against {behavior_log_probs}")
    for note in odd:
        stdout_console().print(f"note: {note}", markup=False)
    if picture is not None:
        stdout_console().print(f"picture: {picture}", markup=False)


def as_data(staleness: Staleness) -> dict[str, Any]:
    """The measurements as plain data."""
    return {
        "m2_threshold": staleness.m2_threshold,
        "loss": staleness.loss,
        "trust_region_tokens": staleness.trust_region,
        "candidate_tokens": staleness.candidates,
        "metrics": staleness.metrics,
        "thresholds": [asdict(row) for row in staleness.rows],
        "ppo_clip": {
            "clip_low": CLIP,
            "clip_high": CLIP,
            "clipped_positive_advantage": staleness.clipped_up,
            "clipped_negative_advantage": staleness.clipped_down,
            "clipped_share": staleness.clipped_share,
        },
    }


def print_staleness(staleness: Staleness, title: str) -> None:
    """The two tables: the batch, and what each threshold would do."""
    from rich.markup import escape
    from rich.table import Table

    console = stdout_console()
    batch = Table("", "value", "meaning", title=escape(title), title_justify="left")
    batch.columns[1].justify = "right"
    for described in _batch_rows(staleness):
        batch.add_row(*described)
    console.print(batch)

    table = Table(title="What a threshold would do", title_justify="left")
    for heading in ("tau", "candidates", "dropped", "of valid", "M2 after", "largest |d| kept in T"):
        table.add_column(heading, justify="right")
    for row in staleness.rows:
        style = "bold" if row.m2_threshold == staleness.m2_threshold else None
        cells = (f"{row.m2_threshold:g}", f"{row.candidates:,}", f"{row.dropped:,}", share(row.dropped_share))
        table.add_row(*cells, number(row.m2_after), number(row.largest_kept, 4), style=style)
    console.print(table)


def _batch_rows(staleness: Staleness) -> list[tuple[str, str, str]]:
    metrics = staleness.metrics
    of_valid = {name: share(float(metrics[name])) for name in ("trust_region_fraction", "masked_fraction", "clip_fraction")}
    dropped = int(metrics["dropped_tokens"])
    up, down = staleness.clipped_up, staleness.clipped_down
    rows = [
        ("valid tokens", f"{metrics['valid_tokens']:,}", "the mask is not 0"),
        ("T", f"{staleness.trust_region:,}", f"{of_valid['trust_region_fraction']} of valid: A > 0, d > 0 or A < 0, d < 0"),
        ("M2 before", number(float(metrics["m2_before"])), "mean of d² over T"),
        ("M2 after", number(float(metrics["m2_after"])), f"at threshold {staleness.m2_threshold:g}"),
        ("dropped", f"{dropped:,}", f"{of_valid['masked_fraction']} of valid, of {staleness.candidates:,} candidates"),
        ("cut", number(math.sqrt(float(metrics["m2_cut"]))) if dropped else "-", "smallest |d| that is dropped"),
        ("loss", number(staleness.loss, 8), "M2PO, token mean"),
        ("ratio", number(float(metrics["ratio_mean"])), f"mean of exp(d); largest {number(float(metrics['ratio_max']))}"),
        ("approx. KL", number(float(metrics["approx_kl"])), "mean of exp(d) - d - 1"),
        (
            f"PPO clip {CLIP}",
            f"{up + down:,}",
            f"{of_valid['clip_fraction']} of valid would be clipped: {up:,} with A > 0, {down:,} with A < 0",
        ),
    ]
    if metrics["nonfinite_tokens"]:
        rows.append(("not finite", f"{metrics['nonfinite_tokens']:,}", "valid tokens with a NaN or infinity"))
    return rows
