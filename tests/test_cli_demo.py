"""`m2po demo` and `m2po bench`."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import PNG, fails, flipped, invoke, mutate

from m2po_kernels import dispatch, reference
from m2po_kernels.cli import bench as bench_command
from m2po_kernels.cli.cases import ROLLOUT_FIGURES
from m2po_kernels.cli.demo import SORT_BASED, sort_based_loss, sort_based_mask
from m2po_kernels.cli.rollouts import bundled


def test_demo(tmp_path, monkeypatch) -> None:
    from m2po_kernels.cli import demo as demo_command

    # One long batch is timed by a user; here a short one shows the same lines.
    monkeypatch.setattr(demo_command, "N_SYNTHETIC", 1 << 14)
    monkeypatch.setattr(demo_command, "N_TIMED", 1)
    picture = tmp_path / "out" / "demo.png"
    result = invoke("demo", "--out", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(PNG)
    for figures in ROLLOUT_FIGURES:
        assert f"{figures.loss:.8f}" in result.stdout
    for name in dispatch.BACKENDS:
        assert name in result.stdout
    assert SORT_BASED in result.stdout


def test_demo_times_no_backend_that_is_wrong(tmp_path, monkeypatch) -> None:
    mutate(monkeypatch, "select", flipped)
    monkeypatch.setenv("M2PO_BACKEND", "eager")
    assert "eager on rollouts, step 4: its mask differs from the oracle's" in fails("demo", "--out", tmp_path / "p.png")


@pytest.mark.parametrize("figures", ROLLOUT_FIGURES, ids=lambda figures: figures.column)
def test_sort_based_way_on_the_rollouts(figures) -> None:
    batch = bundled(figures.column)
    right = reference.m2po_oracle(*batch)
    assert torch.equal(sort_based_mask(*batch), right.keep)
    assert float(sort_based_loss(*batch)) == pytest.approx(float(right.loss), abs=1e-7)


def test_bench_runs_pytest_in_the_folder(tmp_path) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "test_it.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    assert invoke("bench", "--bench-dir", folder, "--filter", "one").exit_code == 0
    assert invoke("bench", "--bench-dir", folder).exit_code == 1


def test_bench_outside_a_checkout(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench_command, "__file__", str(tmp_path / "site-packages" / "m2po_kernels" / "cli" / "bench.py"))
    assert "no bench/ beside the package" in fails("bench")
