"""The scalars and the tensors that travel through the ops together: what the caller chose, checked once.

Field order is the op schema's order (ops.py), so that a `Rule` or a `Batch` is passed on with a star and comes back with a star.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from .errors import InvalidArgument, InvalidType, describe

SCOPES = ("quadrants", "all")
NONFINITE = ("propagate", "drop", "error")
REDUCTIONS = ("token-mean", "sequence-mean", "sum", "none")


class Batch(NamedTuple):
    """The tensors of one call. All but the last have the shape of `log_probs` (strided or expanded as they came)."""

    log_probs: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None  # per-token factor 1 / (valid tokens of its sequence), for "sequence-mean"
    keep: Tensor | None = None  # M of a given Selection; None: select here
    denominators: Tensor | None = None  # fp64 [2]: policy term, KL term; None: counted here, as `Rule.normalizer` says


@dataclass(frozen=True)
class Rule:
    """How tokens are masked and weighed. Checked on construction; see docs/semantics.md for the meaning of each."""

    m2_threshold: float = 0.04
    scope: str = "quadrants"
    rule: str = "m2po"  # "m2po": Algorithm 1; "clip": PPO's clip
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    ratio_cap: float = math.inf
    nonfinite: str = "propagate"
    normalizer: str = "valid"  # "valid" or "kept" tokens of this batch, or "one"
    per_token: bool = False  # reduction="none"
    backend: str | None = None

    def __post_init__(self) -> None:
        check_number("m2_threshold", self.m2_threshold, ">= 0 (inf: drop nothing)", lambda x: x >= 0)
        check_number("kl_coef", self.kl_coef, ">= 0 and finite", lambda x: 0 <= x < math.inf)
        check_number("ratio_cap", self.ratio_cap, "> 1, or None", lambda x: x > 1)
        check_number("clip_low", self.clip_low, "in [0, 1] (0.2 means 1 - 0.2)", lambda x: 0 <= x <= 1)
        check_number("clip_high", self.clip_high, ">= 0 (0.2 means 1 + 0.2)", lambda x: x >= 0)
        check_choice("scope", self.scope, SCOPES)
        check_choice("nonfinite", self.nonfinite, NONFINITE)

    def args(self) -> tuple[object, ...]:
        """The fields in the order of the op schemas."""
        return tuple(getattr(self, f.name) for f in fields(self))


def check_number(name: str, value: object, expected: str, ok) -> None:
    """Raise InvalidType unless `value` is a real number, InvalidArgument unless `ok(value)` (NaN never is)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{name} must be a number {expected}; got {describe(value)}")
    if not ok(value):
        raise InvalidArgument(f"{name} must be {expected}; got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidArgument unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}")
