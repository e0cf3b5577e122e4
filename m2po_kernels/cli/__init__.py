"""The command `m2po`: doctor, check, inspect, demo, bench. Importing this package imports none of the CLI's libraries."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Entry point of `m2po`. Exits 2 with one line if the libraries of the extra `cli` are not installed."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"m2po: {' and '.join(missing)} not installed; run: pip install 'm2po-kernels[cli]'", file=sys.stderr)
        raise SystemExit(2)
    from .app import app

    app(prog_name="m2po")
