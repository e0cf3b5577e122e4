"""The Triton backend in its interpreter: in a process of its own, as TRITON_INTERPRET is read when a kernel is defined.

`TRITON_INTERPRET=1 pytest -k cpu-triton` runs the whole suite on it; here are what that does not see (several blocks, bytes,
launches) and a first look at what it does. Compiled code: test_triton_compiled.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import random_tokens

from m2po_kernels import dispatch, m2po_loss, select
from m2po_kernels.backends import triton as backend_module
from m2po_kernels.errors import BackendUnavailable

HERE = Path(__file__).resolve().parent
CASES = (
    "masks_and_cuts",
    "equal_values",
    "options",
    "rows_with_a_stride",
    "slack",
    "bytes_per_token",
    "launches",
    "fp64_is_declined",
)

pytestmark = pytest.mark.skipif(not backend_module._is_installed(), reason="the package triton is not installed")


@pytest.mark.parametrize("case", CASES)
def test_in_the_interpreter(case):
    ran = subprocess.run(
        [sys.executable, str(HERE / "triton_cases.py"), case],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]


def test_why_not_names_the_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in str(dispatch.why_not("triton", "cpu"))
    assert "mps" in str(dispatch.why_not("triton", "mps"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpret" in str(dispatch.why_not("triton", "cuda"))


def test_a_declined_call_goes_to_the_next_backend_unless_forced(monkeypatch):
    for module in (backend_module, dispatch.load("native")):
        monkeypatch.setattr(module, "why_not", lambda device: None)
    monkeypatch.setattr(dispatch, "ORDER", {"cpu": ("triton", "eager"), "*": ("eager",)})
    tokens = random_tokens((3, 9), dtype=torch.float64)
    assert select(*tokens).keep.shape == (3, 9)
    with pytest.raises(BackendUnavailable, match=r"'triton'.*float64"):
        m2po_loss(*tokens, backend="triton")
