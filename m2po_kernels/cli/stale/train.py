"""One run: train on rollouts from k updates ago under one rule, and what every point of its curves holds."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from .arms import LOSSES, Batch, clipped, trust_region
from .plan import Plan, Run
from .policy import Engine, Rollouts, evaluate, generator, response_log_probs
from .task import Task

# What clip_02 counts, whatever the plan's own clip is: PPO's usual one, as the loss's metric clip_fraction does.
USUAL_CLIP = 0.2
# Means over the updates of a point, then what the evaluation at its end found.
TRAINED = ("train_reward", "m2_before", "m2_after", "masked", "clip_02", "train_entropy", "grad_norm")
EVALUATED = ("reward", "entropy", "response_tokens")


def train(model: Any, plan: Plan, run: Run) -> dict[str, Any]:
    """Trains `model` in place. Returns the row of the run: one list per name above, one value per point.

    The rollouts of step s come from the weights of step s - k / updates_per_step, or the initial ones where there is no such
    step; they are written when those weights are there, and wait in a queue.
    """
    task = Task(plan.levels)
    engine = Engine(model, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.0, fused=True)
    n_steps, lag = plan.updates // plan.updates_per_step, run.staleness // plan.updates_per_step
    queue: deque[Rollouts] = deque()
    curves: dict[str, list[Any]] = {name: [] for name in (*TRAINED, *EVALUATED, "reward_by_level")}
    _add_evaluation(curves, plan, engine, run.seed)
    window: list[dict[str, float]] = []
    skipped = 0
    for step in range(n_steps):
        engine.load(model)
        # The first step writes for all steps that the initial policy serves; later ones for the step that is `lag` ahead.
        for due in range(lag + 1) if step == 0 else [step + lag]:
            if due < n_steps:
                queue.append(_collect(plan, engine, run.seed, due))
        rollouts = queue.popleft()
        advantages = group_advantages(rollouts.rewards, plan.group)
        proximal = None
        if run.arm == "areal":
            with torch.no_grad():
                proximal = response_log_probs(model, rollouts.prompts, rollouts.responses)[0]
        size = plan.prompts_per_update * plan.group
        for first in range(0, len(rollouts.rewards), size):
            rows = slice(first, first + size)
            own = None if proximal is None else proximal[rows]
            figures = _update(model, optimizer, plan, run.arm, rollouts.rows(rows), advantages[rows], own)
            skipped += not math.isfinite(figures["grad_norm"])
            window.append(figures)
            if len(window) == plan.point_every:
                engine.load(model)
                for name in TRAINED:
                    curves[name].append(sum(figures[name] for figures in window) / len(window))
                _add_evaluation(curves, plan, engine, run.seed)
                window.clear()
    return {
        "arm": run.arm,
        "staleness": run.staleness,
        "seed": run.seed,
        "plan": plan.digest(),
        "skipped_updates": skipped,
        "weights_sha256": fingerprint(model),
        **{name: _rounded(values) for name, values in curves.items()},
    }


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """fp32 [N]: (reward - mean) / (standard deviation + 1e-6) over each prompt's `group` responses, which follow each other."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-6)).flatten()


def fingerprint(model: Any) -> str:
    """SHA-256 of all weights: equal only if every bit of them is."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _collect(plan: Plan, engine: Engine, seed: int, step: int) -> Rollouts:
    """The rollouts that `step` trains on: prompts and random numbers depend on seed and step alone, not on rule or age."""
    prompts = engine.task.prompts(plan.prompts_per_update * plan.updates_per_step, generator(seed, 4, step))
    return engine.sample(prompts.repeat_interleave(plan.group, 0), generator(seed, 5, step))


def _update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    arm: str,
    rollouts: Rollouts,
    advantages: Tensor,
    proximal: Tensor | None,
) -> dict[str, float]:
    log_probs, entropy = response_log_probs(model, rollouts.prompts, rollouts.responses)
    behavior, mask = rollouts.log_probs, rollouts.mask
    batch = Batch(log_probs, behavior, behavior if proximal is None else proximal, advantages, mask)
    loss, kept = LOSSES[arm](batch, plan)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm))
    if math.isfinite(norm):  # else the update is skipped, as trainers do
        optimizer.step()
    optimizer.zero_grad()
    d = (log_probs.detach() - behavior).double()
    region = trust_region(d, advantages, mask)
    valid = mask.sum()
    return {
        "train_reward": float(rollouts.rewards.mean()),
        "m2_before": _mean_square(d, region),
        "m2_after": _mean_square(d, region & kept),
        "masked": float(1 - kept.sum() / valid),
        "clip_02": float((clipped(d, advantages, USUAL_CLIP, USUAL_CLIP) & mask).sum() / valid),
        "train_entropy": float(entropy[mask].mean()),
        "grad_norm": norm,
    }


def _mean_square(d: Tensor, where: Tensor) -> float:
    """0 over nothing."""
    return float(d[where].square().sum() / where.sum().clamp(min=1))


def _add_evaluation(curves: dict[str, list[Any]], plan: Plan, engine: Engine, seed: int) -> None:
    found = evaluate(plan, engine, seed)
    curves["reward"].append(float(found.rewards.mean()))
    curves["entropy"].append(float(found.entropy[found.mask].mean()))
    curves["response_tokens"].append(float(found.mask.sum(1).double().mean()))
    # Prompt i is of level i modulo their number.
    n_levels = len(plan.levels)
    curves["reward_by_level"].append([float(found.rewards[level::n_levels].mean()) for level in range(n_levels)])


def _rounded(values: list[Any]) -> list[Any]:
    """Six digits for reading; null for what is not finite. weights_sha256 is what tells runs apart to the last bit."""
    return [_rounded(value) if isinstance(value, list) else _six_digits(value) for value in values]


def _six_digits(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
