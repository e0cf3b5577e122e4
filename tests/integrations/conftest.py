"""For the tests of every adapter: what they test is the installed package."""

from __future__ import annotations

from pathlib import Path

import torch

import m2po_kernels
from m2po_kernels import dispatch

TREE = Path(__file__).parents[2]


torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_sessionstart() -> None:
    assert Path(m2po_kernels.__file__).parent != TREE / "m2po_kernels", "run tests/integrations/run.sh, not python -m pytest"


def pytest_report_header() -> str:
    """Whether the native backend is among what is tested."""
    return f"m2po_kernels: native backend: {dispatch.why_not('native', torch.device('cpu')) or 'yes'}"
