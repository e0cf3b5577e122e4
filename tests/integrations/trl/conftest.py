"""Settings that must be made before trl is imported, and the path of what all adapters' tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out")
