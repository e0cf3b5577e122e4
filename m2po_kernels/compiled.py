"""The compiled libraries of the package: whether they were built, and loading them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parent


def build_record() -> dict[str, Any]:
    """What setup.py left of the build; for each library whether it was built, and why or why not."""
    record = _PACKAGE / "_build.json"
    if not record.is_file():
        return {"native": False, "why": "setup.py has not run"}
    return json.loads(record.read_text())


@functools.cache
def load_library(name: str) -> str | None:
    """Loads the library "native" or "cuda" once. None if its ops are there, else the reason why not."""
    record = build_record()
    if not record.get(name):
        return f"the extension was not built: {record.get(f'why_{name}', record['why'])}"
    try:
        torch.ops.load_library(str(_PACKAGE / f"_{name}.so"))
    except OSError as error:
        return f"the extension does not load beside torch {torch.__version__}: {error}"
    return None
