"""What travels to the ops together: the tensors and the scalars of a call that starts from hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import FLOAT_DTYPES
from ..logits_args import LogitsArgs
from ..rule import check_number


class Inputs(NamedTuple):
    """The tensors of one call. hidden is [M, H]: all positions; N of them have a token."""

    hidden: Tensor
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    lora_a: Tensor | None  # [r, H]
    lora_b: Tensor | None  # [V, r]
    token_ids: Tensor  # int32 or int64 [N]
    temperatures: Tensor | None  # [N]
    rows: Tensor | None  # bool [N]: which tokens are computed; None: all


N_INPUTS = len(Inputs._fields)
PARAMETERS = Inputs._fields[:5]  # those that may get a gradient


@dataclass(frozen=True)
class LinearArgs:
    """The scalars. `args()` packs them for the ops, `of_args` unpacks them."""

    temperature: float = 1.0  # 1 where per-token temperatures are given
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    lora_scale: float = 1.0
    vocab_size: int = 1  # of the whole vocabulary; ids and columns from here on do not exist
    vocab_start: int = 0  # the id of the weight's first row
    tokens: int = 1  # a sequence has this many tokens,
    positions: int = 1  # this many positions in hidden,
    first: int = 0  # and its first token goes with this one of them
    max_workspace_bytes: int = 1
    with_entropy: bool = False
    entropy_grad: bool = False
    gather_rows: bool = True
    reduce_hidden: bool = False
    dtype: torch.dtype = torch.float32  # of the products
    wanted: tuple[bool, ...] = field(default=(False,) * len(PARAMETERS))  # which of PARAMETERS get a gradient
    group: str | None = None  # the name of the process group over which the vocabulary is split
    backend: str | None = None

    def __post_init__(self) -> None:
        LogitsArgs(self.temperature, self.logit_scale, self.logit_softcap)  # checks them
        check_number("lora_scale", self.lora_scale, "finite", lambda x: -math.inf < x < math.inf)

    def args(self) -> tuple[list[float], list[int], list[int], str | None, str | None]:
        """As the ops take them: numbers, sizes (which torch.compile may leave open), choices, group, backend."""
        numbers = [float(getattr(self, name)) for name in _NUMBERS]
        choices = [int(getattr(self, name)) for name in _SWITCHES]
        wanted = [int(want) for want in self.wanted]
        sizes = [getattr(self, name) for name in _SIZES]
        return numbers, sizes, [*choices, FLOAT_DTYPES.index(self.dtype), *wanted], self.group, self.backend

    @classmethod
    def of_args(
        cls, numbers: Sequence[float], sizes: Sequence[int], choices: Sequence[int], group: str | None, backend: str | None
    ) -> LinearArgs:
        """What `args()` took apart."""
        n = len(_SWITCHES)
        named: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
        named.update(zip(_SIZES, sizes, strict=True))
        named.update(zip(_SWITCHES, map(bool, choices[:n]), strict=True))
        return cls(
            **named,
            dtype=FLOAT_DTYPES[choices[n]],
            wanted=tuple(map(bool, choices[n + 1 :])),
            group=group,
            backend=backend,
        )

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of log-probs and of the sums of gradients: fp32, or fp64 for fp64 products."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def local_vocab(self, weight: Tensor) -> int:
        """How many of the weight's rows belong to the vocabulary; the others are padding."""
        return max(0, min(weight.shape[0], self.vocab_size - self.vocab_start))

    def of_logits(self, columns: int) -> LogitsArgs:
        """The scalars of a chunk of logits."""
        scaling = (self.temperature, self.logit_scale, self.logit_softcap)
        return LogitsArgs(*scaling, columns, with_entropy=self.with_entropy, entropy_grad=self.entropy_grad)


_NUMBERS = ("temperature", "logit_scale", "logit_softcap", "lora_scale")
_SIZES = ("vocab_size", "vocab_start", "tokens", "positions", "first", "max_workspace_bytes")
_SWITCHES = ("with_entropy", "entropy_grad", "gather_rows", "reduce_hidden")
