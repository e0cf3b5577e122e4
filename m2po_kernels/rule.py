"""The scalars and the tensors that travel through the ops together: what the caller chose, checked once.

A `Batch` goes to the ops (ops.py) with a star and comes back with a star. A `Rule` goes as a list of floats, a list of integers
and the backend's name: torch looks at each argument of an op several times a call, so that a few of them cost less than a dozen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .errors import InvalidArgument, InvalidType, describe

SCOPES = ("quadrants", "all")
RULES = ("m2po", "clip")
NONFINITE = ("propagate", "drop", "error")
NORMALIZERS = ("valid", "kept", "one")
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
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)

    def args(self) -> tuple[list[float], list[int], str | None]:
        """As the ops take it: the scalars, the choices as places in their tuples and `per_token`, the backend."""
        scalars = [float(getattr(self, name)) for name in _SCALARS]
        choices = [choices.index(getattr(self, name)) for name, choices in _CHOICES.items()]
        return scalars, [*choices, int(self.per_token)], self.backend

    @classmethod
    def of_args(cls, scalars: Sequence[float], choices: Sequence[int], backend: str | None) -> Rule:
        """The rule that `args()` took apart."""
        return _rule_of(tuple(scalars), tuple(choices), backend)


# bindings.cpp reads both in this order.
_SCALARS = ("m2_threshold", "clip_low", "clip_high", "kl_coef", "ratio_cap")
_CHOICES = {"scope": SCOPES, "rule": RULES, "nonfinite": NONFINITE, "normalizer": NORMALIZERS}


@functools.lru_cache(maxsize=64)
def _rule_of(scalars: tuple[float, ...], choices: tuple[int, ...], backend: str | None) -> Rule:
    named: dict[str, Any] = dict(zip(_SCALARS, scalars, strict=True))
    for (name, among), place in zip(_CHOICES.items(), choices[:-1], strict=True):
        named[name] = among[place]
    return Rule(**named, per_token=bool(choices[-1]), backend=backend)


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
