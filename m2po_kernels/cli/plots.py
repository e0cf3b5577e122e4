"""The picture of `m2po inspect`: log-ratios by quadrant with the cut, and M2 and dropped share against the threshold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .shared import CliError, need, one_line
from .staleness import Staleness

UP, DOWN, CUT, DROPPED = "#1f6fb4", "#d1622b", "#222222", "#7a3b8f"
N_BINS = 120
N_TAUS = 200


def save_plot(staleness: Staleness, title: str, path: Path) -> None:
    """Writes the PNG. Raises CliError if it cannot be written."""
    matplotlib = need("matplotlib")
    matplotlib.use("Agg")
    pyplot = need("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    _draw_log_ratios(left, staleness)
    _draw_thresholds(right, staleness)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise CliError(f"cannot write the plot {path}: {one_line(error)}") from error
    finally:
        pyplot.close(figure)


def _draw_log_ratios(axes: Any, staleness: Staleness) -> None:
    d, advantages = staleness.d.double(), staleness.advantages
    # All but the outermost 1e-4 of the tokens lie within. (kthvalue: torch.quantile takes 2^24 values at most.)
    inner = float(d.abs().kthvalue(math.ceil(0.9999 * d.numel())).values) if d.numel() else 1.0
    reach = max(inner * 1.05, 1e-6)
    edges = torch.linspace(-reach, reach, N_BINS + 1, dtype=torch.float64)
    inside = d.clamp(-reach, reach)  # what lies beyond counts in the outermost bins
    quadrants = [
        (advantages > 0, d > 0, UP, True, "A > 0, d > 0  (in T)"),
        (advantages < 0, d < 0, DOWN, True, "A < 0, d < 0  (in T)"),
        (advantages > 0, d < 0, UP, False, "A > 0, d < 0"),
        (advantages < 0, d > 0, DOWN, False, "A < 0, d > 0"),
    ]
    top = 1.0
    for sign, side, color, in_region, label in quadrants:
        chosen = sign & side
        counts = torch.histogram(inside[chosen], bins=edges).hist
        style: dict[str, Any] = {"fill": True, "alpha": 0.55} if in_region else {"lw": 1.3}
        axes.stairs(counts.tolist(), edges.tolist(), color=color, label=f"{label}: {int(chosen.sum()):,}", **style)
        top = max(top, float(counts.max()))
    cut = math.sqrt(float(staleness.metrics["m2_cut"]))
    if math.isfinite(cut):
        cut_label = f"cut: |d| ≥ {cut:.3g} in T is dropped ({int(staleness.metrics['dropped_tokens']):,})"
        axes.axvline(-cut, color=CUT, ls="--", lw=1.2)
        axes.axvline(cut, color=CUT, ls="--", lw=1.2, label=cut_label)
    else:
        axes.plot([], [], " ", label=f"nothing dropped at M2 threshold {staleness.m2_threshold:g}")
    axes.set(
        ylim=(0.7, top * 30),  # room for the legend above the bars; before yscale, which would look for positive data
        yscale="log",
        xlim=(-reach, reach),
        xlabel="d = log π_current - log π_behavior (nats; outermost bins: and beyond)",
        ylabel="valid tokens with A ≠ 0 per bin",
        title=f"Log-ratios by quadrant, threshold {staleness.m2_threshold:g}",
    )
    axes.legend(fontsize=8, loc="upper center", ncols=2, framealpha=0.95)
    _tidy(axes)


def _draw_thresholds(axes: Any, staleness: Staleness) -> None:
    before = float(staleness.metrics["m2_before"])
    listed = [row for row in staleness.rows if 0 < row.m2_threshold < math.inf]
    finite = before if math.isfinite(before) and before > 0 else 1.0
    low = min([row.m2_threshold for row in listed] + [finite]) / 2
    high = max([row.m2_threshold for row in listed] + [finite]) * 2
    taus = torch.logspace(math.log10(low), math.log10(high), N_TAUS, dtype=torch.float64)
    after, dropped = _curve(staleness, taus)
    share = axes.twinx()
    (m2_line,) = axes.plot(taus.tolist(), after.tolist(), color=UP, lw=1.8, label="M2 after dropping")
    (share_line,) = share.plot(taus.tolist(), (100 * dropped).tolist(), color=DROPPED, lw=1.8, ls="-.", label="dropped share")
    axes.plot([r.m2_threshold for r in listed], [max(r.m2_after, low / 10) for r in listed], "o", color=UP, ms=4)
    share.plot([r.m2_threshold for r in listed], [100 * r.dropped_share for r in listed], "s", color=DROPPED, ms=4)
    lines = [m2_line, share_line]
    if math.isfinite(before) and before > 0:
        lines.append(axes.axhline(before, color="#888888", ls=":", lw=1.2, label=f"M2 before: {before:.4g}"))
    if 0 < staleness.m2_threshold < math.inf:
        label = f"threshold {staleness.m2_threshold:g}"
        lines.append(axes.axvline(staleness.m2_threshold, color=CUT, ls="--", lw=1.2, label=label))
    positive = [value for value in after.tolist() if value > 0]
    top = max([*positive, finite]) * 2
    # A decade at least, so that some tick is labelled.
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min([*positive, finite, top / 10]) / 2, top))
    axes.set(xlabel="M2 threshold τ", title="What a threshold would do")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_ylabel("M2 over T (mean of d²)", color=UP)
    share.set_ylabel("dropped, % of valid tokens", color=DROPPED)
    share_top = max(float(100 * dropped.max()) * 1.15, 1.0)
    share.set_ylim(-0.02 * share_top, share_top)
    axes.legend(handles=lines, fontsize=8, loc="center right", framealpha=0.95)
    _tidy(axes)
    share.spines["top"].set_visible(False)


def _curve(staleness: Staleness, taus: Tensor) -> tuple[Tensor, Tensor]:
    """(M2 after, dropped / valid) for each tau, from one sort: the running mean of ascending v never falls."""
    d, advantages = staleness.d.double(), staleness.advantages
    v = torch.sort((d * d)[d * advantages.sign() > 0]).values
    running = v.cumsum(0) / torch.arange(1, v.numel() + 1, dtype=torch.float64)
    kept = torch.searchsorted(running, taus, right=True)
    padded = torch.cat([torch.zeros(1, dtype=torch.float64), running])
    return padded[kept], (v.numel() - kept) / max(int(staleness.metrics["valid_tokens"]), 1)


def _tidy(axes: Any) -> None:
    axes.grid(True, which="major", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.title.set_fontsize(10)
