"""Two processes with gloo: one selection over both under DDP, what is missing on one is refused by both, and FSDP2's heads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LAYOUTS
from test_trainer import TOLERANCE


def run(script: str, out: Path) -> None:
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    run("ranks.py", out)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradient_is_that_of_both_ranks_together(seen, layout, linear):
    for rank in seen:
        case = rank[f"{layout} {linear}"]
        assert len(case["errors"]) == 3
        assert max(case["errors"]) <= TOLERANCE, case["errors"]
        assert max(case["apart"]) > 1e-3  # the negative control


def test_metrics_are_those_of_both_ranks_together(seen):
    for layout in LAYOUTS:
        logged = [row for row in seen[0][f"{layout} True"]["logged"] if "m2/after" in row]
        assert len(logged) == 3
        assert all(row["m2/before"] > 0.04 >= row["m2/after"] for row in logged)


def test_log_probs_missing_on_one_rank_are_refused_on_both(seen):
    for rank in seen:
        assert "set use_vllm=True, or pass a rollout_func that returns logprobs" in rank["missing"]


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "own-head"])
def test_a_rank_without_any_advantage_neither_waits_nor_counts_less(seen, linear):
    for rank in seen:
        case = rank[f"tied {linear}"]
        assert len(case["errors"]) == 3
        assert max(case["errors"]) <= TOLERANCE, case["errors"]


def test_a_server_with_raw_log_probs_is_refused_on_both(seen):
    for rank in seen:
        assert "--logprobs-mode processed_logprobs; it runs with raw_logprobs" in rank["raw"]


def test_weights_under_fsdp2_are_those_of_an_unsplit_run(tmp_path):
    """In fp64, after three steps. A head that is a unit of its own had its gradient from one rank's tokens alone."""
    run("fsdp2.py", tmp_path)
    for rank in range(2):
        seen = json.loads((tmp_path / f"fsdp2-{rank}.json").read_text())
        assert "add the head before fully_shard" in seen.pop("added late")
        assert len(seen) == 8
        assert max(seen.values()) <= 1e-12, seen
