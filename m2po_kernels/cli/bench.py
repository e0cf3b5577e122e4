"""`m2po bench`: runs the repository's benchmark cases, which are no part of the installed package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from .shared import CliError


def bench(
    filter_: Annotated[
        str | None, typer.Option("--filter", "-k", help="Run only the cases that match this pytest expression.")
    ] = None,
    bench_dir: Annotated[
        Path | None, typer.Option("--bench-dir", help="The benchmark folder; default: bench/ of the checkout.")
    ] = None,
) -> None:
    """Run the benchmark cases of a checkout (pytest on bench/). The exit code is pytest's."""
    folder = _find(bench_dir)
    if importlib.util.find_spec("pytest") is None:
        raise CliError("pytest is not installed; run: pip install 'm2po-kernels[bench]'")
    command = [sys.executable, "-m", "pytest", str(folder), *(["-k", filter_] if filter_ is not None else [])]
    raise typer.Exit(subprocess.run(command, cwd=folder.parent, check=False).returncode)


def _find(given: Path | None) -> Path:
    if given is not None:
        if not given.is_dir():
            raise CliError(f"--bench-dir: {given} is not a folder")
        return given.resolve()
    root = Path(__file__).resolve().parents[2]
    # pyproject.toml tells a checkout from a site-packages folder that happens to hold a bench/ of someone else's.
    if not ((root / "bench").is_dir() and (root / "pyproject.toml").is_file()):
        raise CliError(f"no bench/ beside the package in {root}: run from a checkout of the repository, or give --bench-dir")
    return root / "bench"
