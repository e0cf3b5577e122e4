from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # paper.py


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny

    path = tmp_path_factory.mktemp("swift")
    tiny.build(path)
    return path


@pytest.fixture(scope="session")
def run_job(folder: Path) -> Callable[..., dict[str, list[Any]]]:
    """Runs job.py on `ranks` processes; returns for each case what each rank wrote."""

    def run(cases: dict[str, Any], ranks: int = 1) -> dict[str, list[Any]]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launcher, str(HERE / "job.py"), str(folder), json.dumps(cases)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return {name: [torch.load(folder / name / f"{rank}.pt", weights_only=False) for rank in range(ranks)] for name in cases}

    return run
