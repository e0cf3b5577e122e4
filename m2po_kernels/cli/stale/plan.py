"""What is run: sizes and learning rates, the full and the quick comparison, and the list of their runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

# The names of the rules, in the order of tables and pictures, with fields of Plan in braces; arms.py has their losses.
ARMS = {
    "grpo": "GRPO, clip {clip:g}",
    "free": "no trust region",
    "m2po": "M2PO",
    "areal": "AReaL's variant",
    "repository": "paper repository's clip",
}


@dataclass(frozen=True)
class Plan:
    """Every number that a result depends on. Two equal plans give equal bits under one `runs.setting()`."""

    # The model and the task.
    width: int = 64
    layers: int = 2
    heads: int = 4
    levels: tuple[int, ...] = (2, 4, 6, 8)
    # Supervised warm start on solutions with mistakes, so that the policy is unsure of every step, until its sampled
    # responses earn this mean reward. (Solutions with this share of mistakes earn 0.41.)
    warm_mistakes: float = 0.2
    warm_reward: float = 0.35
    warm_learning_rate: float = 1e-3
    warm_batch: int = 256
    warm_check_every: int = 10
    warm_limit: int = 3000
    # Training. One step: rollouts of `prompts_per_update * updates_per_step` prompts, each answered `group` times.
    updates: int = 448
    updates_per_step: int = 4
    prompts_per_update: int = 8
    group: int = 8
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    # The rules: tau, and PPO's clip of the ratio to 1 - clip ... 1 + clip.
    m2_threshold: float = 0.04
    clip: float = 0.2
    # The two variants that select per micro-batch get micro-batches of this many sequences.
    micro_batch: int = 16
    # One point of every curve: the mean over this many updates, and an evaluation at their end.
    point_every: int = 16
    eval_prompts: int = 256
    # The axes of the comparison.
    staleness: tuple[int, ...] = (0, 16, 64, 256)
    seeds: int = 5

    def digest(self) -> str:
        """Tells plans apart, and so the folders of their runs. Axes do not count."""
        return short_hash(json.dumps(self.values(), sort_keys=True).encode())

    def values(self) -> dict[str, Any]:
        """All but the axes."""
        return {name: value for name, value in asdict(self).items() if name not in ("staleness", "seeds")}

    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that an interrupted comparison has whole seeds."""
        return [Run(arm, k, seed) for seed in range(self.seeds) for k in self.staleness for arm in ARMS]


@dataclass(frozen=True)
class Run:
    """One training: a rule, the age of its rollouts in updates, a seed."""

    arm: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        return f"seed{self.seed}-k{self.staleness}-{self.arm}"


def short_hash(data: bytes) -> str:
    """For names of folders."""
    return hashlib.sha256(data).hexdigest()[:12]


FULL = Plan()
# The same training, shorter, on fewer seeds and ages: shows that everything works, decides nothing.
QUICK = Plan(updates=64, staleness=(0, 16, 64), seeds=2, eval_prompts=128)
