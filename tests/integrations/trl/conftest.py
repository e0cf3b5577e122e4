"""Settings that must be made before trl is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out")
