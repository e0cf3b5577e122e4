"""The scalars of a call that starts from logits: what the caller chose, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .rule import check_number


@dataclass(frozen=True)
class LogitsArgs:
    """How logits become log-probs: z = softcap(logit_scale * x) / temperature. Field order is the op schemas' (ops_logits.py)."""

    temperature: float = 1.0  # 1 where per-token temperatures are given
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    vocab_size: int = 1  # columns from here on are padding: never read, gradient 0
    shift: int = 0  # 1: row t goes with the token at t + 1, the last row of each sequence with none
    with_entropy: bool = False
    entropy_grad: bool = False

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "> 0 and finite", lambda x: 0 < x < math.inf)
        check_number("logit_scale", self.logit_scale, "finite", lambda x: -math.inf < x < math.inf)
        check_number("logit_softcap", self.logit_softcap, "> 0 and finite, or None", lambda x: 0 <= x < math.inf)

    def args(self) -> tuple[object, ...]:
        """The fields in the order of the op schemas."""
        return tuple(getattr(self, f.name) for f in fields(self))
