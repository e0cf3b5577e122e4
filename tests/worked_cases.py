"""The hand-made cases of the contract (docs/semantics.md): inputs and the right answers, written down independently of the code.

The figures hold for float32 log-probs; in another dtype the right answer is the oracle's of the rounded inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from helpers import Tokens


@dataclass(frozen=True)
class Case:
    """d is passed as log_probs against behaviour log-probs of 0, unless `behavior` is given (then d is the log_probs)."""

    name: str
    tau: float
    d: list
    advantages: list
    keep: list
    behavior: list | None = None
    valid: list | None = None
    loss: float | None = None
    grad: list | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def tokens(self, dtype=torch.float32, device="cpu") -> Tokens:
        d = torch.tensor(self.d, dtype=torch.float64).to(dtype)
        behavior = torch.zeros_like(d) if self.behavior is None else torch.tensor(self.behavior, dtype=torch.float64).to(dtype)
        valid = torch.ones(d.shape, dtype=torch.bool) if self.valid is None else torch.tensor(self.valid, dtype=torch.bool)
        return Tokens(d, behavior, torch.tensor(self.advantages, dtype=dtype), valid).to(device)


E = math.exp
D_T1 = [0.1, 0.1, 0.1, 0.6] + [0.05] * 8
D_T2 = [0.19] * 4 + [0.21] * 4

CASES = [
    Case("T1", 0.04, D_T1, [1.0] * 12, [1] * 12, loss=-1.1289834, metrics={"m2_before": 0.0341667, "dropped_tokens": 0}),
    Case("T2", 0.04, D_T2, [1.0] * 8, [1, 1, 1, 1, 0, 1, 1, 1], metrics={"dropped_tokens": 1, "m2_cut": 0.0441}),
    Case(
        "T3",
        0.04,
        [1.0, -1.0, 1.0, -1.0],
        [1.0, 1.0, -1.0, -1.0],
        [0, 1, 1, 0],
        loss=0.5876006,
        grad=[0, -0.0919699, 0.6795705, 0],
        metrics={"trust_region_fraction": 0.5, "m2_after": 0.0, "masked_fraction": 0.5},
    ),
    Case("T4", 0.25, [0.5, 0.5], [1.0, 1.0], [1, 1], metrics={"m2_before": 0.25, "m2_after": 0.25, "m2_cut": math.inf}),
    Case("T5", 0.04, [1.0], [1.0], [0], loss=0.0, grad=[0.0], metrics={"m2_before": 1.0, "m2_after": 0.0, "m2_cut": 1.0}),
    Case("T6", 0.04, [1e-7, 1.0], [1.0, 1.0], [1, 0], loss=-0.5 * E(1e-7), grad=[-0.5 * E(1e-7), 0]),
    Case("T7", 0.0, [0.1, 0.2], [1.0, 1.0], [0, 0], loss=0.0, grad=[0.0, 0.0]),
    Case(
        "T8",
        0.04,
        [[0.6, 0.6, 0.6]],
        [[0.0, 1.0, 1.0]],
        [[1, 0, 0]],
        loss=0.0,
        grad=[[0.0, 0.0, 0.0]],
        metrics={"trust_region_fraction": 2 / 3, "dropped_tokens": 2},
    ),
    Case("T9", 0.04, [200.0, 0.0], [1.0, 1.0], [0, 1], valid=[0, 1], loss=-1.0, grad=[0.0, -1.0], metrics={"ratio_max": 1.0}),
    Case(
        "T10",
        0.04,
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0],
        [1, 1, 0],
        behavior=[0.0, 0.0, -200.0],
        valid=[1, 1, 0],
        loss=-1.0,
        grad=[-0.5, -0.5, 0.0],
    ),
    Case("T11", 0.1, [0.31622776], [1.0], [0], loss=0.0, grad=[0.0]),
    Case("T12", 0.04, [100.0, 0.1], [0.0, 1.0], [1, 1], loss=-E(0.1) / 2, grad=[0.0, -E(0.1) / 2]),
]

# data/smollm2_rollouts.safetensors at tau = 0.04: set of log-probs, size of T, candidates, dropped, m2_before, m2_after, loss.
ROLLOUTS = [
    ("log_probs_bf16_step0", 1504, 1, 0, 0.00173436, 0.00173436, -0.03291796),
    ("log_probs_step1", 1651, 215, 1, 0.05508296, 0.03984268, -0.04337934),
    ("log_probs_step4", 1809, 827, 425, 0.45250816, 0.03995009, -0.04872054),
    ("log_probs_step16", 2003, 1503, 1227, 3.45332879, 0.03997021, -0.02935070),
]
