"""Trinity-RFT's loss and batches in verl's actor worker: model, rollouts, worker and platform are those of the tests of verl."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "verl"))

import fixtures
import pytest

model_path, world = fixtures.model_path, fixtures.world


@pytest.fixture(scope="session")
def actor(model_path, world):
    """verl's actor worker as Trinity-RFT configures it; each test starts it anew by `workers.restart` and gives it a loss."""
    return fixtures.workers.make_actor(fixtures.workers.compose(model_path, m2po=()))
