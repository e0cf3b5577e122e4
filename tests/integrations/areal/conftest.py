"""Stand-ins for what AReaL imports at its top and what neither a CPU nor these tests need."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # AReaL compiles its log-softmax; eager gives the same in less time


sys.path.insert(0, str(Path(__file__).parents[1]))  # paper.py


class _Anything(ModuleType):
    """A module of which every attribute is there."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for missing in ("torch_memory_saver", "wandb", "swanlab", "trackio"):
    sys.modules[missing] = _Anything(missing)
