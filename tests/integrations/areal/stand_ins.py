"""Stand-ins for what AReaL imports at its top and what neither a CPU nor these tests need."""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MISSING = ("torch_memory_saver", "wandb", "swanlab", "trackio")


class _Anything(ModuleType):
    """A module of which every attribute is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds the packages of MISSING and whatever is asked for in them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # AReaL compiles its log-softmax; eager gives the same in less time
    sys.meta_path.insert(0, _StandIns())
