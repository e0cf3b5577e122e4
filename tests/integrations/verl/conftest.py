"""verl's own actor worker, configured by hydra as its command line does."""

from __future__ import annotations

import fixtures  # first: it sets what verl reads when it is imported
import pytest

model_path, world = fixtures.model_path, fixtures.world


@pytest.fixture(scope="session")
def actor(model_path, world):
    """The worker with M2PO; each test starts it anew by `workers.restart`."""
    return fixtures.workers.make_actor(fixtures.workers.compose(model_path))
