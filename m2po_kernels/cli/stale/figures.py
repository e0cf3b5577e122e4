"""The pictures of a comparison: reward and what the rules leave out for the README, and every curve. A column for each age."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..shared import CliError, need, one_line
from .plan import ARMS
from .report import Comparison, Interval, at_end, average, interval

# Okabe and Ito's colours, told apart by colour-blind readers; on-policy GRPO is black.
COLOURS = {"grpo": "#d55e00", "free": "#999999", "m2po": "#0072b2", "areal": "#cc79a7", "repository": "#009e73"}
BASE, BASE_COLOUR = "on-policy GRPO (k = 0)", "black"
MARK = {"color": "#888888", "lw": 1.0, "ls": (0, (1, 2))}  # the vertical line
TINY = 1e-12  # for 0 on a logarithmic axis
BAND_SEEDS = 3  # Student's t for two seeds would fill the panels

# The curves of a panel with their line styles, the label of its axis, and whether that is logarithmic.
Panel = tuple[tuple[tuple[str, str], ...], str, bool]
REWARD: Panel = ((("reward", "-"),), "reward on fixed prompts", False)
LOST: Panel = ((("masked", "-"),), "tokens dropped or clipped", False)
ALL: tuple[Panel, ...] = (
    REWARD,
    ((("m2_before", "-"), ("m2_after", "--")), "M2 before (-), after (- -)", True),
    ((("masked", "-"), ("clip_02", ":")), "dropped or clipped (-),\nclip 0.2 would (·)", False),
    ((("entropy", "-"),), "entropy, nats", False),
    ((("grad_norm", "-"),), "gradient norm", True),
)


def summary(comparison: Comparison, path: Path) -> None:
    """Reward, and the share of the valid tokens that the rule drops or clips: over the updates, then each rule's figure by age.

    Of fresh rollouts there is no column of curves: all rules lie on one line there. The figures by age stand side by side.
    """
    _draw(comparison, (REWARD, LOST), [age for age in comparison.staleness if age] or comparison.staleness, path, by_age=True)


def curves(comparison: Comparison, path: Path) -> None:
    """Everything."""
    _draw(comparison, ALL, comparison.staleness, path, by_age=False)


def _draw(comparison: Comparison, panels: tuple[Panel, ...], ages: list[int], path: Path, *, by_age: bool) -> None:
    matplotlib = need("matplotlib")
    matplotlib.use("Agg")
    pyplot = need("matplotlib.pyplot")
    columns = len(ages) + by_age
    figure, axes = pyplot.subplots(
        len(panels), columns, figsize=(2.8 * columns + 0.8, 2.4 * len(panels) + 1.1),
        sharex="col", sharey="row", squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, (names, label, logarithmic) in zip(axes, panels, strict=True):
        for axis, age in zip(line, ages, strict=False):
            for name, style in names:
                _panel(axis, comparison, age, name, style)
            if _is_marked(comparison, age):
                axis.axvline(age, **MARK)
        if by_age:
            _by_age(line[-1], comparison, names[0][0])
        for axis in line:
            axis.grid(True, which="major", color="#dddddd", lw=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(label, fontsize=9)
        if (label, logarithmic) == REWARD[1:]:
            line[0].set_ylim(top=1)
        if logarithmic:
            line[0].set_yscale("log")
            line[0].set_ylim(*_edges(comparison, ages, [name for name, _ in names]))
    for axis, age in zip(axes[0], ages, strict=False):
        axis.set_title(f"rollouts {age} updates old" if age else "fresh rollouts (k = 0)", fontsize=10)
    for axis in axes[-1][: len(ages)]:
        axis.set_xlabel("updates", fontsize=9)
    handles = [pyplot.Line2D([], [], color=COLOURS[arm], lw=1.8, label=comparison.label(arm)) for arm in ARMS]
    handles.insert(0, pyplot.Line2D([], [], color=BASE_COLOUR, lw=1.4, label=BASE))
    if any(_is_marked(comparison, age) for age in ages):
        handles.append(pyplot.Line2D([], [], label="the initial policy's rollouts end", **MARK))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    seeds = len(comparison.seeds)
    bands = "95 % confidence bands" if seeds >= BAND_SEEDS else f"no bands with fewer than {BAND_SEEDS}"
    cut = ", cut off at the lower edge of logarithmic axes" if any(panel[2] for panel in panels) and seeds >= BAND_SEEDS else ""
    figure.suptitle(f"Training on stale rollouts: mean of {seeds} seeds, {bands}{cut}", fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, format="png", metadata={"Software": None})
    except OSError as error:
        raise CliError(f"cannot write the plot {path}: {one_line(error)}") from error
    finally:
        pyplot.close(figure)


def _is_marked(comparison: Comparison, age: int) -> bool:
    """Whether a curve holds the update from which on rollouts are of trained weights."""
    return 0 < age < comparison.facts["updates"]


def _panel(axis: Any, comparison: Comparison, age: int, name: str, style: str) -> None:
    for arm in ARMS:
        if comparison.of(arm, age) and (arm, age) != ("grpo", 0):
            _curve(axis, comparison, comparison.curve(arm, age, name), COLOURS[arm], style, arm == "m2po")
    if comparison.of("grpo", 0):
        _curve(axis, comparison, comparison.curve("grpo", 0, name), BASE_COLOUR, style, False)


def _curve(axis: Any, comparison: Comparison, points: list[Interval], colour: str, style: str, in_front: bool) -> None:
    every, updates = comparison.facts["point_every"], comparison.facts["updates"]
    # An evaluation stands at the updates made before it, a mean over updates at their middle.
    evaluated = len(points) == updates // every + 1
    x = [i * every if evaluated else (i + 0.5) * every for i in range(len(points))]
    mean = [point.mean for point in points]
    half = [_half(comparison, point) for point in points]
    z = 3 if in_front else 2
    axis.plot(x, mean, color=colour, ls=style, lw=1.6 if in_front else 1.2, zorder=z)
    # No figure here can be below 0. A logarithmic axis has no 0: there the band is cut off where the axis ends (_edges).
    low = [max(m - h, TINY) for m, h in zip(mean, half, strict=True)]
    high = [m + h for m, h in zip(mean, half, strict=True)]
    axis.fill_between(x, low, high, color=colour, alpha=0.14, lw=0, zorder=z - 1)


def _edges(comparison: Comparison, ages: list[int], names: list[str]) -> tuple[float, float]:
    """Of a logarithmic axis: all means, and the bands above them; below the least mean a quarter of it as room for bands."""
    drawn = [(arm, age) for arm in ARMS for age in ages if comparison.of(arm, age)]
    points = [point for arm, age in drawn for name in names for point in comparison.curve(arm, age, name)]
    known = [point for point in points if point.mean > 0]
    if not known:
        return TINY, 1.0
    return min(point.mean for point in known) / 4, 1.2 * max(point.mean + _half(comparison, point) for point in known)


def _by_age(axis: Any, comparison: Comparison, name: str) -> None:
    """A dot with its interval for each rule and age, side by side: the reward at the end, or the mean over the training."""
    ages, evaluated = comparison.staleness, name == "reward"
    for place, age in enumerate(ages):
        for i, arm in enumerate(ARMS):
            rows = comparison.of(arm, age)
            value = interval([at_end(row) if evaluated else average([row], name) for row in rows])
            colour = BASE_COLOUR if (arm, age) == ("grpo", 0) else COLOURS[arm]
            x = place + 0.15 * (i - (len(ARMS) - 1) / 2)
            axis.errorbar(x, value.mean, yerr=_half(comparison, value), color=colour, marker="o", ms=4, lw=1.4)
    axis.set_xticks(range(len(ages)), [f"k = {age}" for age in ages])
    axis.set_title("at the end" if evaluated else "mean over the training", fontsize=10)


def _half(comparison: Comparison, value: Interval) -> float:
    """What is drawn of an interval: nothing for too few seeds."""
    return 0.0 if len(comparison.seeds) < BAND_SEEDS or math.isnan(value.half) else value.half
