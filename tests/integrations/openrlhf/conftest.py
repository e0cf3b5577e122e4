"""Stand-ins for what OpenRLHF imports at its top and what does not run on a CPU: DeepSpeed, FlashAttention and vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))  # paper.py


class _Anything(ModuleType):
    """A module of which every attribute is there."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0.99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for missing in (
    "deepspeed",
    "deepspeed.ops",
    "deepspeed.ops.adam",
    "deepspeed.runtime",
    "deepspeed.runtime.zero",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.offload_config",
    "deepspeed.checkpoint",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
    "vllm",
    "vllm.inputs",
):
    sys.modules[missing] = _Anything(missing)
