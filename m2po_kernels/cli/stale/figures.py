"""The pictures of a comparison: reward and what the rules leave out for the README, and every curve. A column for each age."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..shared import CliError, need, one_line
from .plan import ARMS
from .report import Comparison, Interval

# Okabe and Ito's colours, told apart by colour-blind readers; on-policy GRPO is black.
COLOURS = {"grpo": "#d55e00", "free": "#999999", "m2po": "#0072b2", "areal": "#cc79a7", "repository": "#009e73"}
BASE = "on-policy GRPO (k = 0)"
BAND_SEEDS = 3  # Student's t for two seeds would fill the panels

# The curves of a panel with their line styles, the label of its axis, and whether that is logarithmic.
Panel = tuple[tuple[tuple[str, str], ...], str, bool]
REWARD: Panel = ((("reward", "-"),), "held-out reward", False)
LOST: Panel = ((("masked", "-"),), "tokens dropped or clipped", False)
ALL: tuple[Panel, ...] = (
    REWARD,
    ((("m2_before", "-"), ("m2_after", "--")), "M2 before (-), after (- -)", True),
    ((("masked", "-"), ("clip_02", ":")), "dropped or clipped (-), clip 0.2 would (·)", False),
    ((("entropy", "-"),), "entropy, nats", False),
    ((("grad_norm", "-"),), "gradient norm", True),
)

LOGARITHMIC = {name for names, _, logarithmic in ALL if logarithmic for name, _ in names}


def summary(comparison: Comparison, path: Path) -> None:
    """Reward, and the share of the valid tokens that the rule drops or clips."""
    _draw(comparison, (REWARD, LOST), path)


def curves(comparison: Comparison, path: Path) -> None:
    """Everything."""
    _draw(comparison, ALL, path)


def _draw(comparison: Comparison, panels: tuple[Panel, ...], path: Path) -> None:
    matplotlib = need("matplotlib")
    matplotlib.use("Agg")
    pyplot = need("matplotlib.pyplot")
    ages = comparison.staleness
    size = (3.3 * len(ages) + 0.8, 2.4 * len(panels) + 0.9)
    figure, axes = pyplot.subplots(
        len(panels), len(ages), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for line, (names, label, logarithmic) in zip(axes, panels, strict=True):
        for axis, age in zip(line, ages, strict=True):
            for name, style in names:
                _panel(axis, comparison, age, name, style)
            if logarithmic:
                axis.set_yscale("log")
            if 0 < age < comparison.facts["updates"]:
                axis.axvline(age, color="#bbbbbb", lw=0.8, ls=(0, (1, 2)))
            axis.grid(True, which="major", color="#dddddd", lw=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(label, fontsize=9)
        if (label, logarithmic) == REWARD[1:]:
            line[0].set_ylim(0, 1)
    for axis, age in zip(axes[0], ages, strict=True):
        axis.set_title(f"rollouts {age} updates old" if age else "fresh rollouts (k = 0)", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("updates", fontsize=9)
    handles = [pyplot.Line2D([], [], color=COLOURS[arm], lw=1.8, label=comparison.label(arm)) for arm in ARMS]
    handles.insert(0, pyplot.Line2D([], [], color="black", lw=1.4, label=BASE))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    seeds = len(comparison.seeds)
    bands = "95 % confidence bands" if seeds >= BAND_SEEDS else f"no bands with fewer than {BAND_SEEDS}"
    figure.suptitle(f"Training on stale rollouts: mean of {seeds} seeds, {bands}", fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, format="png", metadata={"Software": None})
    except OSError as error:
        raise CliError(f"cannot write the plot {path}: {one_line(error)}") from error
    finally:
        pyplot.close(figure)


def _panel(axis: Any, comparison: Comparison, age: int, name: str, style: str) -> None:
    for arm in ARMS:
        if comparison.of(arm, age) and (arm, age) != ("grpo", 0):
            _curve(axis, comparison, comparison.curve(arm, age, name), name, COLOURS[arm], style, arm == "m2po")
    if comparison.of("grpo", 0):
        _curve(axis, comparison, comparison.curve("grpo", 0, name), name, "black", style, False)


def _curve(axis: Any, comparison: Comparison, points: list[Interval], name: str, colour: str, style: str, in_front: bool) -> None:
    every, updates = comparison.facts["point_every"], comparison.facts["updates"]
    # An evaluation stands at the updates made before it, a mean over updates at their middle.
    evaluated = len(points) == updates // every + 1
    x = [i * every if evaluated else (i + 0.5) * every for i in range(len(points))]
    mean = [point.mean for point in points]
    known = len(comparison.seeds) >= BAND_SEEDS
    half = [point.half if known and not math.isnan(point.half) else 0.0 for point in points]
    z = 3 if in_front else 2
    axis.plot(x, mean, color=colour, ls=style, lw=1.6 if in_front else 1.2, zorder=z)
    # On a logarithmic axis a band that reaches 0 ends at a tenth of the mean.
    floor = 0.1 if name in LOGARITHMIC else 0.0
    low = [max(m - h, floor * m) for m, h in zip(mean, half, strict=True)]
    high = [m + h for m, h in zip(mean, half, strict=True)]
    axis.fill_between(x, low, high, color=colour, alpha=0.14, lw=0, zorder=z - 1)
