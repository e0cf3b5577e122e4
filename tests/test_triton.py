"""The Triton backend in its interpreter: in a process of its own, as TRITON_INTERPRET is read when a kernel is defined.

What every backend is tested with runs on it there as well: a part of each file by default, all of it in the slow set. The cases
of triton_cases.py are what those tests do not see (several blocks, bytes, launches). Compiled code: test_triton_compiled.py.
"""

from __future__ import annotations

import os
import re
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
# File -> the part of it that runs by default, about a minute in all. The longest left out: rollouts, inductor, 30 x 7001 tokens.
SUITE = {
    "test_worked_cases.py": "not step1 and not step4 and not float16",
    "test_ops.py": "opcheck or given_buffer or second or inputs_are_not_written",
    "test_loss.py": "all_masked or denominator_zero or ratio_cap_is_decided or nonfinite_error_passes",
    "test_packed.py": "given_selection_is_positional or padded_is_packed",
    "test_properties.py": "exact and not literal",
    "test_agreement.py": "part0",
    "test_logits.py": "l1 or l2 or l3 or l4 or rows_without_gradient",
    "test_logits_autograd.py": "saved_for_backward",
}

pytestmark = pytest.mark.skipif(not backend_module._is_installed(), reason="the package triton is not installed")


def interpreted(*command: str) -> str:
    """What `python COMMAND` says under TRITON_INTERPRET=1; it must succeed."""
    ran = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]
    return ran.stdout


@pytest.mark.parametrize("case", CASES)
def test_in_the_interpreter(case):
    interpreted(str(HERE / "triton_cases.py"), case)


def _suite(keyword: str, *files: str) -> None:
    said = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", keyword, *(f"tests/{file}" for file in files))
    passed = re.search(r"(\d+) passed", said)
    assert passed, said[-3000:]
    # The only skips are of fp64, which the kernels decline; a suite that skips itself must not pass.
    assert int(passed.group(1)) >= 2, said[-3000:]


def test_part_of_the_suite_in_the_interpreter():
    parts = " or ".join(f"({file.removesuffix('.py')}.py and ({part}))" for file, part in SUITE.items())
    _suite(f"cpu-triton and ({parts})", *SUITE)


@pytest.mark.slow
@pytest.mark.parametrize("file", SUITE)
def test_the_suite_in_the_interpreter(file):
    _suite("cpu-triton", file)


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
