"""The table of docs/variants.md: what M2PO, and what ships under its name elsewhere, do to the recorded rollouts.

Computed with the oracle, not timed; the same on every machine. `python -m bench.tables` puts it into the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from m2po_kernels.cli.cases import ROLLOUT_FIGURES
from m2po_kernels.cli.rollouts import bundled
from m2po_kernels.reference import areal_mask, log_ratio, repository_clip_bounds, select_sorted, trust_region

TAU = 0.04
PARTS = 4  # micro-batches
PPO_CLIP = (0.2, 0.2)


class Batch(NamedTuple):
    """Tokens [B, T]: log-ratio d, v = d * d, A, which are valid, and T."""

    d: Tensor
    v: Tensor
    advantages: Tensor
    valid: Tensor
    region: Tensor


def block() -> str:
    """A line for each set of current log-probs."""
    batches = {figures.column: _batch(figures.column) for figures in ROLLOUT_FIGURES}
    sequences, valid = len(batches["log_probs_step1"].d), int(batches["log_probs_step1"].valid.sum())
    head = [
        "optimizer steps",
        "T",
        "Algorithm 1",
        "AReaL's mask",
        "repository's clip",
        "its bounds on the ratio",
        "PPO's clip 0.2",
    ]
    lines = [
        f"Of {valid:,} valid tokens, how many are dropped or clipped at tau = {TAU}; in brackets the same done in {PARTS} "
        f"micro-batches of {sequences // PARTS} sequences.",
        "",
        _line(head),
        _line(["---:"] * len(head)),
    ]
    for column, batch in batches.items():
        counts = [f"{whole:,} ({parts:,})" for whole, parts in _counts(batch)]
        low, high = repository_clip_bounds(batch.v, batch.region, TAU)
        bounds = "none" if math.isinf(high) else f"{1 - low:.3f} to {1 + high:.3f}"
        steps = column.removeprefix("log_probs_").removeprefix("step").replace("bf16_step0", "0, in bf16")
        ppo = f"{_clipped(batch, PPO_CLIP):,}"
        lines.append(_line([steps, f"{int(batch.region.sum()):,}", *counts, bounds, ppo]))
    (own, _), (areal, areal_parts), (repository, _) = _counts(batches["log_probs_step4"])
    lines += [
        "",
        f"So after 4 steps the repository's clip takes the gradient of {repository:,} tokens where Algorithm 1 drops {own:,}, "
        f"and AReaL's mask drops {areal:,} of the whole batch but {areal_parts:,} in {PARTS} micro-batches.",
    ]
    return "\n".join(lines)


def _counts(batch: Batch) -> list[tuple[int, int]]:
    """Of each rule: in the whole batch, and in its micro-batches."""
    return [_both(count, batch) for count in (_algorithm_1, _areal, _repository)]


def _batch(column: str) -> Batch:
    log_probs, behavior, advantages, mask = bundled(column)
    d, v = log_ratio(log_probs, behavior)
    advantages, valid = advantages[:, None].expand_as(d), mask != 0
    return Batch(d, v, advantages, valid, trust_region(d, advantages, valid))


def _both(count: Callable[[Batch], int], batch: Batch) -> tuple[int, int]:
    """Of the whole, and (summed) of its micro-batches."""
    parts = [Batch(*tensors) for tensors in zip(*(t.chunk(PARTS) for t in batch), strict=True)]
    return count(batch), sum(map(count, parts))


def _algorithm_1(batch: Batch) -> int:
    return int((batch.valid & ~select_sorted(batch.v, batch.region, batch.valid, TAU)).sum())


def _areal(batch: Batch) -> int:
    return int((batch.valid & ~areal_mask(batch.v, batch.valid, TAU)).sum())


def _repository(batch: Batch) -> int:
    return _clipped(batch, repository_clip_bounds(batch.v, batch.region, TAU))


def _clipped(batch: Batch, bounds: tuple[float, float]) -> int:
    """Tokens whose gradient PPO's clip to [1 - low, 1 + high] takes."""
    low, high = bounds
    ratio = batch.d.double().exp()
    up = (batch.advantages > 0) & (ratio > 1 + high)
    down = (batch.advantages < 0) & (ratio < 1 - low)
    return int((batch.valid & (up | down)).sum())


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
