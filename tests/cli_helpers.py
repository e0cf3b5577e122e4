"""What the tests of the command line share: a command in this process or in one of its own, and a backend made wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from typer.testing import CliRunner

from m2po_kernels.backends import eager
from m2po_kernels.cli.app import app

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def fails(*args: object) -> str:
    """Runs a command that must fail the way users see it: exit code 2, one line on stderr, nothing on stdout."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("m2po: error: ")
    return lines[0]


def run(*args: object, code: str | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A real process: `python -m m2po_kernels ARGS`, or `python -c CODE`."""
    command = [sys.executable, *(["-c", code] if code is not None else ["-m", "m2po_kernels", *map(str, args)])]
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=whole, check=False, timeout=300)


def mutate(monkeypatch, name: str, change) -> None:
    """The eager backend's function `name` becomes change(original, ...)."""
    original = getattr(eager, name)
    monkeypatch.setattr(eager, name, lambda *args: change(original, *args))


def flipped(original, *args):
    """A `select` whose first token is decided the other way."""
    keep, counts, floats = original(*args)
    if keep.numel():
        keep.view(-1)[0].logical_not_()
    return keep, counts, floats
