"""Two processes under DDP with gloo: one selection over both, and what is missing on one is refused by both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LAYOUTS
from test_trainer import TOLERANCE


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("ranks.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(out)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
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
