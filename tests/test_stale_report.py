"""`m2po stale`: the table, the pictures and what docs/stale.md says of them."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from cli_helpers import PNG, ROOT, fails, invoke
from test_stale import FACTS, TINY

from m2po_kernels.cli.stale import figures, report, train
from m2po_kernels.cli.stale.plan import ARMS, FULL


def made_up() -> report.Comparison:
    """Two seeds; rewards rise by rule."""
    rows = []
    for number, planned in enumerate(replace(TINY, seeds=2).runs()):
        end = 0.5 + 0.01 * (number % len(ARMS)) + 0.02 * planned.seed
        row = {"arm": planned.arm, "staleness": planned.staleness, "seed": planned.seed, "skipped_updates": 0}
        row |= {name: [0.5, 0.25] for name in train.TRAINED}
        row |= {name: [0.3, 0.4, end] for name in train.EVALUATED}
        rows.append(row)
    return report.Comparison(FACTS, rows)


def test_how_far_the_end_is_below_the_best():
    """And the gradient norm is one of a point, a mean over updates: the heading says so."""
    row = made_up().rows[0]
    row |= {"reward": [0.1, 0.9, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5], "grad_norm": [1.0, 7.0, 3.0]}
    comparison = report.Comparison(FACTS, [row])
    assert report.best(row) - report.at_end(row) == pytest.approx(0.4)
    assert report.cells(comparison, row["arm"], row["staleness"])[4] == "0.400"
    assert report.cells(comparison, row["arm"], row["staleness"])[-1] == "7"
    heads = next(line for line in report.table(comparison).splitlines() if line.startswith("| k |"))
    assert "| lost since its best |" in heads
    assert heads.endswith(f"| gradient norm, largest mean of {TINY.point_every} updates |")
    page = (ROOT / "docs" / "stale.md").read_text()
    assert page.index('"lost since its best"') < page.index(report.BEGIN)  # a column that no reader can guess is explained
    assert f"the largest of the {FULL.updates // FULL.point_every} points" in page


def test_intervals():
    found = report.interval([1.0, 2.0, 3.0, None])
    assert found.mean == 2
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(report.interval([1.0]).half)
    assert math.isnan(report.interval([None]).mean)


def test_report_writes_pictures_and_the_table(tmp_path):
    report.save(made_up(), tmp_path / "rows.jsonl")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    result = invoke("stale", "--report", "--out", tmp_path, "--into", page)
    assert result.exit_code == 0, result.output
    for name in ("stale.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nold\n" not in text
    body = [line for line in text.split("\n\nReward at the end, M2PO minus")[0].splitlines() if line.startswith("| ")][2:]
    assert len(body) == len(TINY.staleness) * len(ARMS)
    assert "| dropped or clipped |" in text
    assert "without gradient" not in text
    assert body[0].startswith("| 0 | on-policy GRPO | 0.403 ± 0.042 |  |")
    assert body[2].startswith("| 0 | M2PO | 0.410 ± 0.042 | +0.007 ± 0.000 |")


def test_bands_on_a_logarithmic_axis_are_cut_off_not_made_up():
    """A band goes down to mean minus half its width, and to nothing above that where this is below 0."""
    bands = []

    class Axis:
        def plot(self, *args, **kwargs): ...

        def fill_between(self, x, low, high, **kwargs):
            bands.append((low, high))

    rows = [{"arm": "m2po", "staleness": 4, "seed": seed, "grad_norm": [norm, 1.0]} for seed, norm in enumerate((1.0, 1.0, 8.0))]
    comparison = report.Comparison(FACTS, rows)
    points = comparison.curve("m2po", 4, "grad_norm")
    assert points[0].mean - points[0].half < 0
    figures._curve(Axis(), comparison, points, "black", "-", False)
    edges = figures._edges(comparison, [4], ["grad_norm"])
    ((low, high),) = bands
    assert low[0] < edges[0] < points[1].mean == low[1]
    assert high[0] == points[0].mean + points[0].half < edges[1]


def test_m2po_beside_the_others():
    """Paired by seed: what all rules of a seed share is no part of the interval. Bold where it leaves out 0."""
    comparison = made_up()
    heads, rows = report.differences(comparison)
    assert heads == ["k", "on-policy GRPO", "GRPO, clip 0.2", "no trust region", "AReaL's variant", "paper repository's clip"]
    found = {cells[0]: dict(zip(heads, zip(cells, beyond, strict=True), strict=True)) for cells, beyond in rows}
    # One seed is 0.02 above the other under every rule; its mean over the last points is a third of that above.
    assert found["4"]["GRPO, clip 0.2"] == ("+0.007 ± 0.000", True)
    assert found["4"]["paper repository's clip"] == ("-0.007 ± 0.000", True)
    assert found["0"]["GRPO, clip 0.2"] == ("", False)
    assert found["0"]["on-policy GRPO"] == ("+0.007 ± 0.000", True)
    (row,) = (row for row in comparison.rows if (row["arm"], row["staleness"], row["seed"]) == ("areal", 4, 1))
    row["reward"] = [0.3, 0.4, 0.9]
    heads, rows = report.differences(comparison)
    assert rows[1][1][heads.index("AReaL's variant")] is False
    assert "| **+0.007 ± 0.000** |" in report.table(comparison)


def test_what_the_page_says_of_the_differences():
    """The sentences under the table of docs/stale.md hold for the rows, and so do those under README's picture."""
    comparison = report.load(ROOT / "examples" / "stale_rollouts" / "results" / "rows.jsonl")

    def minus(arm: str, staleness: int, base: int | None = None) -> tuple[float, bool]:
        value = report.paired(comparison, "m2po", staleness, arm, staleness if base is None else base)
        return round(value.mean, 3), abs(value.mean) > value.half

    assert [minus("grpo", k) for k in (0, 16, 64, 256)] == [(0.005, True), (0.024, True), (0.032, True), (0.142, True)]
    assert [minus("free", k) for k in (16, 64, 256)] == [(0.015, True), (0.017, False), (-0.037, True)]
    assert not any(minus("areal", k)[1] for k in (0, 16, 64, 256))
    assert [minus("repository", k)[1] for k in (0, 16, 64, 256)] == [False, False, False, True]
    assert minus("repository", 256)[0] == 0.058
    assert [minus("grpo", k, 0) for k in (16, 64, 256)] == [(-0.023, True), (-0.036, True), (-0.054, True)]
    assert sum(cell != "" for cells, _ in report.differences(comparison)[1] for cell in cells[1:]) == 19
    ends = {arm: report.interval([report.at_end(row) for row in comparison.of(arm, 256)]).mean for arm in ARMS}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"M2PO ends at {ends['m2po']:.2f}, GRPO's clip at {ends['grpo']:.2f}, " in readme
    assert f"no trust region at all (grey) above both at {ends['free']:.2f}" in readme
    for k in comparison.staleness:
        clip, own = (report.average(comparison.of(arm, k), "masked") for arm in ("grpo", "m2po"))
        assert own < clip


def test_the_page_holds_the_table_of_the_rows():
    """docs/stale.md is what `m2po stale --report --out examples/stale_rollouts/results --into docs/stale.md` makes of it."""
    page = (ROOT / "docs" / "stale.md").read_text()
    block = page.split(report.BEGIN)[1].split(report.END)[0].strip()
    rows = ROOT / "examples" / "stale_rollouts" / "results" / "rows.jsonl"
    assert block == (report.table(report.load(rows)) if rows.is_file() else "")  # empty until there are rows


def test_errors_say_what_is_missing(tmp_path, monkeypatch):
    assert "cannot read" in fails("stale", "--report", "--out", tmp_path)
    report.save(made_up(), tmp_path / "rows.jsonl")
    (tmp_path / "page.md").write_text("no markers")
    assert "expected one line" in fails("stale", "--report", "--out", tmp_path, "--into", tmp_path / "page.md")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "m2po-kernels[stale]" in fails("stale", "--quick", "--out", tmp_path, "--runs", tmp_path / "runs")
