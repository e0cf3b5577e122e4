"""How stale a batch of rollouts is: M2, what M2PO would drop at which threshold, what PPO's clip would have clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..inputs import check_batch, nonfinite_positions
from ..loss import m2po_loss
from ..selection import select
from .rollouts import Rollouts

TAUS = (0.01, 0.02, 0.04, 0.1, 0.2, 0.5, 1.0)
CLIP = 0.2  # PPO's usual clip, both sides


@dataclass(frozen=True)
class ThresholdRow:
    """What one threshold would do. Shares are of the valid tokens."""

    m2_threshold: float
    candidates: int
    dropped: int
    dropped_share: float
    m2_after: float
    largest_kept: float  # the largest |d| left in T


@dataclass(frozen=True)
class Staleness:
    """Everything `m2po inspect` prints and plots about a batch."""

    rollouts: Rollouts
    m2_threshold: float
    metrics: dict[str, float | int]
    trust_region: int
    candidates: int
    loss: float
    rows: tuple[ThresholdRow, ...]
    clipped_up: int  # A > 0 and ratio > 1 + CLIP
    clipped_down: int  # A < 0 and ratio < 1 - CLIP
    d: Tensor  # of the valid tokens with a finite log-ratio
    advantages: Tensor  # of the same tokens

    @property
    def clipped_share(self) -> float:
        """Tokens that PPO's clip takes / valid tokens."""
        return float(self.metrics["clip_fraction"])


def measure(rollouts: Rollouts, m2_threshold: float) -> Staleness:
    """Runs the package's own loss and selection (the backend that a call gets here) at `m2_threshold` and at each of TAUS."""
    out = m2po_loss(*rollouts, m2_threshold=m2_threshold)
    batch, _ = check_batch(*rollouts)
    valid = (batch.mask != 0) & ~nonfinite_positions(batch)
    wide = torch.float64 if batch.log_probs.dtype == torch.float64 else torch.float32
    moved = batch.log_probs.to(wide) - batch.behavior_log_probs.to(wide)
    d, advantages = moved[valid], batch.advantages.to(wide)[valid]
    reach = torch.where(valid & (moved * batch.advantages.sign() > 0), moved.abs(), 0)
    high, low = (torch.tensor([CLIP, -CLIP], dtype=torch.float64).log1p().to(wide)).unbind()
    return Staleness(
        rollouts=rollouts,
        m2_threshold=m2_threshold,
        metrics=out.metrics.to_dict(),
        trust_region=int(out.metrics.trust_region_tokens),
        candidates=int(out.metrics.candidate_tokens),
        loss=out.loss.item(),
        rows=tuple(_row(rollouts, reach, tau) for tau in sorted({*TAUS, m2_threshold})),
        clipped_up=int(((advantages > 0) & (d > high)).sum()),
        clipped_down=int(((advantages < 0) & (d < low)).sum()),
        d=d,
        advantages=advantages,
    )


def _row(rollouts: Rollouts, reach: Tensor, tau: float) -> ThresholdRow:
    """reach: |d| in T, 0 elsewhere."""
    selection = select(*rollouts, m2_threshold=tau)
    kept = torch.where(selection.keep, reach, 0)
    return ThresholdRow(
        m2_threshold=tau,
        candidates=int(selection.metrics.candidate_tokens),
        dropped=int(selection.metrics.dropped_tokens),
        dropped_share=float(selection.metrics.masked_fraction),
        m2_after=float(selection.metrics.m2_after),
        largest_kept=float(kept.max()) if kept.numel() else 0.0,
    )
