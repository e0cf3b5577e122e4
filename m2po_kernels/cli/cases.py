"""The worked cases T1 to T12 and the published figures of the bundled rollouts, as data.

The answers come from the definition (docs/semantics.md), worked out by hand, never from this package's code.
Where a case speaks of log-ratios d alone, behaviour log-probs are 0 and log_probs are d rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

Values = tuple[float, ...] | tuple[tuple[float, ...], ...]  # [N], or [B][T]


@dataclass(frozen=True)
class WorkedCase:
    """A small batch and its right answer (token-mean, default options, fp32 inputs).

    All tuples have one shape. keep: M, 1 or 0, 0 where not valid. loss and grad are exact up to the rounding of d to fp32.
    """

    name: str
    shows: str
    log_probs: Values
    behavior_log_probs: Values
    advantages: Values
    mask: Values
    m2_threshold: float
    keep: Values
    loss: float
    grad: Values
    m2_before: float
    m2_after: float

    def tensors(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(log_probs, behavior_log_probs, advantages, mask): rounded to fp32, then to `dtype`; the mask is bool."""
        log_probs, behavior, advantages = (
            torch.tensor(values, dtype=torch.float32, device=device).to(dtype)
            for values in (self.log_probs, self.behavior_log_probs, self.advantages)
        )
        return log_probs, behavior, advantages, torch.tensor(self.mask, device=device) != 0


@dataclass(frozen=True)
class RolloutFigures:
    """What the bundled rollouts give against one set of current log-probs, at m2_threshold 0.04."""

    column: str
    trust_region: int
    candidates: int
    dropped: int
    m2_before: float
    m2_after: float
    loss: float


def _case(
    name: str,
    shows: str,
    d: Sequence[float],
    *,
    keep: Sequence[int],
    loss: float,
    grad: Sequence[float],
    m2: tuple[float, float],
    tau: float = 0.04,
    advantages: Sequence[float] | None = None,
    mask: Sequence[int] | None = None,
) -> WorkedCase:
    ones = (1.0,) * len(d)
    return WorkedCase(
        name,
        shows,
        log_probs=tuple(d),
        behavior_log_probs=(0.0,) * len(d),
        advantages=ones if advantages is None else tuple(advantages),
        mask=ones if mask is None else tuple(mask),
        m2_threshold=tau,
        keep=tuple(keep),
        loss=loss,
        grad=tuple(grad),
        m2_before=m2[0],
        m2_after=m2[1],
    )


_T1 = (0.1, 0.1, 0.1, 0.6, *(0.05,) * 8)

WORKED_CASES: tuple[WorkedCase, ...] = (
    _case(
        "T1",
        "one large log-ratio that the others pay for: all are kept",
        _T1,
        keep=(1,) * 12,
        loss=-1.1289834,
        grad=[-exp(d) / 12 for d in _T1],
        m2=(0.0341667, 0.0341667),
    ),
    _case(
        "T2",
        "of equals the first goes",
        (0.19,) * 4 + (0.21,) * 4,
        keep=(1, 1, 1, 1, 0, 1, 1, 1),
        loss=-(4 * exp(0.19) + 3 * exp(0.21)) / 8,
        grad=[-exp(0.19) / 8] * 4 + [0.0] + [-exp(0.21) / 8] * 3,
        m2=(0.0401, (4 * 0.19**2 + 3 * 0.21**2) / 7),
    ),
    _case(
        "T3",
        "only the two clipping quadrants are in T",
        (1, -1, 1, -1),
        advantages=(1, 1, -1, -1),
        keep=(0, 1, 1, 0),
        loss=0.5876006,
        grad=(0, -0.0919699, 0.6795705, 0),
        m2=(1.0, 0.0),
    ),
    _case(
        "T4",
        "a mean equal to the threshold is kept",
        (0.5, 0.5),
        tau=0.25,
        keep=(1, 1),
        loss=-exp(0.5),
        grad=[-exp(0.5) / 2] * 2,
        m2=(0.25, 0.25),
    ),
    _case("T5", "all of T may go", (1,), keep=(0,), loss=0.0, grad=(0,), m2=(1.0, 0.0)),
    _case(
        "T6",
        "a tiny log-ratio has no slack to give",
        (1e-7, 1),
        keep=(1, 0),
        loss=-exp(1e-7) / 2,
        grad=(-exp(1e-7) / 2, 0),
        m2=((1 + 1e-14) / 2, 1e-14),
    ),
    _case(
        "T7",
        "threshold 0 drops all of T that moved",
        (0.1, 0.2),
        tau=0.0,
        keep=(0, 0),
        loss=0.0,
        grad=(0, 0),
        m2=(0.025, 0.0),
    ),
    WorkedCase(
        "T8",
        "A = 0 is in no quadrant; advantages per token",
        log_probs=((0.6, 0.6, 0.6),),
        behavior_log_probs=((0.0, 0.0, 0.0),),
        advantages=((0.0, 1.0, 1.0),),
        mask=((1, 1, 1),),
        m2_threshold=0.04,
        keep=((1, 0, 0),),
        loss=0.0,
        grad=((0.0, 0.0, 0.0),),
        m2_before=0.36,
        m2_after=0.0,
    ),
    _case(
        "T9",
        "what a masked position holds does not matter: no exp(200)",
        (200, 0),
        mask=(0, 1),
        keep=(0, 1),
        loss=-1.0,
        grad=(0, -1),
        m2=(0.0, 0.0),
    ),
    WorkedCase(
        "T10",
        "the same for behaviour log-probs",
        log_probs=(0.0, 0.0, 0.0),
        behavior_log_probs=(0.0, 0.0, -200.0),
        advantages=(1.0, 1.0, 1.0),
        mask=(1, 1, 0),
        m2_threshold=0.04,
        keep=(1, 1, 0),
        loss=-1.0,
        grad=(-0.5, -0.5, 0.0),
        m2_before=0.0,
        m2_after=0.0,
    ),
    _case(
        "T11",
        "the threshold is a double: v is fp32(0.1), above the double 0.1",
        (0.31622776,),
        tau=0.1,
        keep=(0,),
        loss=0.0,
        grad=(0,),
        m2=(0.1, 0.0),
    ),
    _case(
        "T12",
        "A = 0 contributes 0, whatever d is",
        (100, 0.1),
        advantages=(0, 1),
        keep=(1, 1),
        loss=-exp(0.1) / 2,
        grad=(0, -exp(0.1) / 2),
        m2=(0.01, 0.01),
    ),
)

ROLLOUT_FIGURES: tuple[RolloutFigures, ...] = (
    RolloutFigures("log_probs_bf16_step0", 1504, 1, 0, 0.00173436, 0.00173436, -0.03291796),
    RolloutFigures("log_probs_step1", 1651, 215, 1, 0.05508296, 0.03984268, -0.04337934),
    RolloutFigures("log_probs_step4", 1809, 827, 425, 0.45250816, 0.03995009, -0.04872054),
    RolloutFigures("log_probs_step16", 2003, 1503, 1227, 3.45332879, 0.03997021, -0.02935070),
)
