"""Importing the package: what it loads and what it needs, each in a process of its own. How long it takes: bench/memory.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import m2po_kernels

PACKAGE = Path(m2po_kernels.__file__).parent
HEAVY = ("triton", "typer", "rich", "matplotlib", "pyarrow", "safetensors", "numpy.testing")

CALL = """
import torch
lp = torch.tensor([1.0, -1.0, 1.0, -1.0], requires_grad=True)
out = m2po_kernels.m2po_loss(lp, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4))
out.loss.backward()
assert abs(out.loss.item() - 0.5876006) < 1e-6, out.loss
"""


def python(code: str, root: Path = PACKAGE.parent, **environment: str) -> str:
    """Runs `code` in a fresh interpreter that finds the package at `root`; returns what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("M2PO_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(root), **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy():
    """Beyond what `import torch` loads itself."""
    code = f"""
import sys, torch
before = set(sys.modules)
import m2po_kernels
new = set(sys.modules) - before
print([name for name in {HEAVY!r} if any(m == name or m.startswith(name + ".") for m in new)])
print([m for m in new if m.startswith("m2po_kernels.") and m.split(".")[1] in ("cli", "reference", "integrations")])
print(torch.cuda.is_initialized())
"""
    assert python(code).splitlines() == ["[]", "[]", "False"]


def test_import_and_call_without_triton():
    blocked = "import sys; sys.modules['triton'] = None\nimport m2po_kernels\n"
    python(blocked + CALL + "assert sys.modules['triton'] is None")


def test_import_and_call_without_the_extension(tmp_path):
    """A copy of the package without its compiled parts: eager serves, and native says why it does not."""
    shutil.copytree(PACKAGE, tmp_path / "m2po_kernels", ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"))
    checked = f"assert m2po_kernels.__file__.startswith({str(tmp_path)!r})\n"
    code = "import m2po_kernels\nfrom m2po_kernels import dispatch\n" + checked + CALL
    code += "print(dispatch.choose(torch.device('cpu')))\nprint(dispatch.why_not('native'))"
    chosen, reason = python(code, tmp_path).splitlines()
    assert chosen == "eager"
    assert "not built" in reason
    refused = "import m2po_kernels, torch\nx = torch.zeros(2)\ntry:\n    m2po_kernels.select(x, x, x, x)\n"
    refused += "except m2po_kernels.M2POError as error:\n    print(error)"
    message = python(refused, tmp_path, M2PO_BACKEND="native")
    assert "M2PO_BACKEND='native'" in message
    assert reason in message


def test_import_patches_nothing_and_sets_nothing():
    code = """
import os, random, torch
def state():
    settings = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_float32_matmul_precision())
    names = {name: id(value) for name, value in vars(torch.Tensor).items()}
    names |= {name: id(value) for name, value in vars(torch.nn.functional).items()}
    return settings, names, dict(os.environ), torch.random.get_rng_state().tolist()
before = state()
import m2po_kernels
assert state() == before
"""
    python(code)


def test_public_names():
    for name in ("select", "m2po_loss", "grpo_loss", "Selection"):
        assert name in m2po_kernels.__all__
    for name in m2po_kernels.__all__:
        assert hasattr(m2po_kernels, name)
    assert m2po_kernels.__version__.count(".") == 2
