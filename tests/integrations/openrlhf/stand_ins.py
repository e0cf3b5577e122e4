"""Stand-ins for what OpenRLHF imports at its top and what does not run on a CPU."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MISSING = ("deepspeed", "flash_attn", "vllm")


class _Anything(ModuleType):
    """A module of which every attribute is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds the packages of MISSING and whatever is asked for in them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in MISSING or name.startswith("flash_attn.ops"):  # for whose kernels OpenRLHF has others
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    sys.meta_path.insert(0, _StandIns())
