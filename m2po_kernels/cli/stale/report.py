"""From the rows of a comparison to figures per rule and age, and to the table. No training here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..shared import CliError
from .plan import ARMS

BEGIN, END = "<!-- stale:begin -->", "<!-- stale:end -->"
LAST = 4  # the reward at the end is the mean over this many last points
# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Interval(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval (Student's t; NaN for one seed)."""

    mean: float
    half: float


@dataclass(frozen=True)
class Comparison:
    """facts: versions, machine, plan. rows: one per run, as train.train returns them."""

    facts: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def staleness(self) -> list[int]:
        return sorted({row["staleness"] for row in self.rows})

    @property
    def seeds(self) -> list[int]:
        return sorted({row["seed"] for row in self.rows})

    def label(self, arm: str) -> str:
        """What tables and pictures call a rule."""
        return ARMS[arm].format_map(self.facts)

    def of(self, arm: str, staleness: int) -> list[dict[str, Any]]:
        """The rows of one rule and age, by seed."""
        return sorted((r for r in self.rows if (r["arm"], r["staleness"]) == (arm, staleness)), key=lambda r: r["seed"])

    def curve(self, arm: str, staleness: int, name: str) -> list[Interval]:
        """Over seeds, at every point. A value that was not finite counts as missing."""
        return [interval(values) for values in zip(*(row[name] for row in self.of(arm, staleness)), strict=True)]


def save(comparison: Comparison, path: Path) -> None:
    """JSON lines: the facts, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [comparison.facts, *comparison.rows]))


def load(path: Path) -> Comparison:
    """What `save` wrote."""
    try:
        facts, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise CliError(f"cannot read {path}: expected the rows that m2po stale writes; got {error}") from error
    return Comparison(facts, rows)


def interval(values: Sequence[float | None]) -> Interval:
    known = [value for value in values if value is not None]
    if not known:
        return Interval(math.nan, math.nan)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Interval(mean, math.nan)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    quantile = STUDENT[len(known) - 2] if len(known) - 2 < len(STUDENT) else 2.2
    return Interval(mean, quantile * deviation / math.sqrt(len(known)))


def paired(comparison: Comparison, arm: str, staleness: int, other: str, other_staleness: int) -> Interval:
    """The reward at the end of a rule and age minus that of another, seed by seed; NaN if they share no seed."""
    ends = {row["seed"]: at_end(row) for row in comparison.of(other, other_staleness)}
    return interval([at_end(row) - ends[row["seed"]] for row in comparison.of(arm, staleness) if row["seed"] in ends])


def differences(comparison: Comparison) -> tuple[list[str], list[tuple[list[str], list[bool]]]]:
    """M2PO minus each other rule of the same age, and minus on-policy GRPO: heads, then a row for every age.

    With each row which of its cells are beyond the interval: it does not reach 0.
    """
    others = [arm for arm in ARMS if arm != "m2po"]
    rows = []
    for staleness in comparison.staleness:
        # At k = 0 GRPO is on-policy GRPO: one cell holds it.
        own = [paired(comparison, "m2po", staleness, arm, staleness) for arm in others if (arm, staleness) != ("grpo", 0)]
        found = [paired(comparison, "m2po", staleness, "grpo", 0), *([] if staleness else [interval([])]), *own]
        cells = ["" if math.isnan(value.mean) else _pm(value, "+") for value in found]
        rows.append(([str(staleness), *cells], [False, *(abs(value.mean) > value.half for value in found)]))
    return ["k", "on-policy GRPO", *map(comparison.label, others)], rows


def table(comparison: Comparison) -> str:
    """Markdown: where and how it was measured, a row for every age and rule, and M2PO beside the others."""
    facts = comparison.facts
    head = [
        "k",
        "rule",
        "reward at the end",
        "against on-policy GRPO",
        "lost since its best",
        "M2 before",
        "M2 after",
        "dropped or clipped",
        "clip 0.2 would",
        "entropy at the end",
        f"gradient norm, largest mean of {facts['point_every']} updates",
    ]
    lines = [
        f"{len(comparison.seeds)} seeds, {facts['updates']} updates; torch {facts['torch']}, "
        f"transformers {facts['transformers']}, m2po_kernels {facts['m2po_kernels']} ({facts['backend']}), {facts['device']}, "
        f"{facts['workers']} workers, {facts['core_minutes']:.0f} minutes of one core; {facts['date']}.",
        "",
        _line(head),
        _line(["---:", "---", *["---:"] * (len(head) - 2)]),
    ]
    for staleness in comparison.staleness:
        lines += [_line(cells(comparison, arm, staleness)) for arm in ARMS if comparison.of(arm, staleness)]
    head, rows = differences(comparison)
    lines += [
        "",
        "Reward at the end, M2PO minus the other rule at the same k (first column: minus on-policy GRPO), paired by seed, with "
        "95 % intervals. Bold: the interval does not reach 0.",
        "",
        _line(head),
        _line(["---:"] * len(head)),
        *(_line([f"**{cell}**" if beyond else cell for cell, beyond in zip(*row, strict=True)]) for row in rows),
    ]
    return "\n".join(lines)


def cells(comparison: Comparison, arm: str, staleness: int) -> list[str]:
    """One row of the table: means over seeds; 95 % intervals where there is a plus-minus sign."""
    rows = comparison.of(arm, staleness)
    ends = [at_end(row) for row in rows]
    against = paired(comparison, arm, staleness, "grpo", 0)
    is_base = (arm, staleness) == ("grpo", 0)
    return [
        str(staleness),
        "on-policy GRPO" if is_base else comparison.label(arm),
        _pm(interval(ends)),
        "" if is_base or math.isnan(against.mean) else _pm(against, "+"),
        # The best is at least the end, so this is never below 0.
        f"{interval([best(row) - end for row, end in zip(rows, ends, strict=True)]).mean:.3f}",
        _small(average(rows, "m2_before")),
        _small(average(rows, "m2_after")),
        f"{100 * average(rows, 'masked'):.2f} %",
        f"{100 * average(rows, 'clip_02'):.2f} %",
        f"{interval([row['entropy'][-1] for row in rows]).mean:.3f}",
        _small(interval([max((v for v in row["grad_norm"] if v is not None), default=None) for row in rows]).mean),
    ]


def at_end(row: dict[str, Any]) -> float:
    """Mean evaluated reward over the last points."""
    last = row["reward"][-LAST:]
    return sum(last) / len(last)


def best(row: dict[str, Any]) -> float:
    """The largest mean evaluated reward over as many points in a row."""
    reward = row["reward"]
    return max(sum(reward[i : i + LAST]) / len(reward[i : i + LAST]) for i in range(max(len(reward) - LAST, 0) + 1))


def put_into(page: Path, block: str) -> None:
    """Replaces what stands between the marker comments of a Markdown page."""
    try:
        text = page.read_text()
    except OSError as error:
        raise CliError(f"--into: cannot read {page}: {error.strerror}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise CliError(f"--into: expected one line {BEGIN} and after it one line {END} in {page}")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}")


def average(rows: list[dict[str, Any]], name: str) -> float:
    """Over seeds and points."""
    return interval([value for row in rows for value in row[name]]).mean


def _pm(value: Interval, sign: str = "") -> str:
    return f"{value.mean:{sign}.3f}" + ("" if math.isnan(value.half) else f" ± {value.half:.3f}")


def _small(value: float) -> str:
    return f"{value:.3g}"


def _line(values: list[str]) -> str:
    return f"| {' | '.join(values)} |"
