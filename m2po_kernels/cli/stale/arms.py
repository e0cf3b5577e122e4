"""The rules that are compared: each makes a loss from one optimizer batch and says which tokens it neither drops nor clips.

In all of them d is the log-ratio of the current policy to the engine's log-probs of when the tokens were written, A the
group-relative advantage, and the loss a mean over the valid tokens of the optimizer batch, but for AReaL's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...loss import grpo_loss, m2po_loss
from ...selection import select
from .plan import Plan


class Batch(NamedTuple):
    """One optimizer batch. [B, R], and [B] for the advantages."""

    log_probs: Tensor  # fp32, with gradient
    behavior_log_probs: Tensor  # fp32, from the engine's bf16 copy k updates ago
    proximal_log_probs: Tensor  # fp32, from the trainer's weights at the start of this step
    advantages: Tensor
    mask: Tensor  # bool

    def micro_batches(self, size: int) -> Iterator[Batch]:
        for parts in zip(*(tensor.split(size) for tensor in self), strict=True):
            yield Batch(*parts)


class Outcome(NamedTuple):
    """What a rule made of a batch."""

    loss: Tensor  # 0-d, to be differentiated
    kept: Tensor  # bool [B, R]: the valid tokens that were neither dropped nor clipped; those with A = 0 are among them


Arm = Callable[[Batch, Plan], Outcome]


def grpo(batch: Batch, plan: Plan) -> Outcome:
    """PPO's clip around the behaviour policy."""
    lp, behavior, _, advantages, mask = batch
    out = grpo_loss(lp, behavior, advantages, mask, clip_low=plan.clip, clip_high=plan.clip)
    return Outcome(out.loss, mask & ~clipped(lp.detach() - behavior, advantages, plan.clip, plan.clip))


def free(batch: Batch, plan: Plan) -> Outcome:
    """Importance sampling with nothing clipped and nothing dropped."""
    lp, behavior, _, advantages, mask = batch
    return Outcome(m2po_loss(lp, behavior, advantages, mask, m2_threshold=math.inf).loss, mask)


def m2po(batch: Batch, plan: Plan) -> Outcome:
    """Algorithm 1 over the whole optimizer batch."""
    lp, behavior, _, advantages, mask = batch
    selection = select(lp, behavior, advantages, mask, m2_threshold=plan.m2_threshold)
    return Outcome(m2po_loss(lp, behavior, advantages, mask, selection=selection).loss, selection.keep)


def areal(batch: Batch, plan: Plan) -> Outcome:
    """AReaL 1.0.4: masked per micro-batch by behaviour against proximal log-probs, whatever the sign of A; decoupled PPO.

    The ratio that is clipped is that to the proximal policy; the step from there to the behaviour policy is a fixed
    importance weight, which the advantage carries here. Each micro-batch is divided by the tokens it kept and counts by
    those it had.
    """
    losses, kept = [], []
    for part in batch.micro_batches(plan.micro_batch):
        lp, behavior, proximal, advantages, mask = part
        step = proximal - behavior
        chosen = reference.areal_mask(step.square(), mask, plan.m2_threshold)
        weighted = advantages[:, None] * torch.where(chosen, step, 0.0).exp()
        out = grpo_loss(lp, proximal, weighted, chosen, clip_low=plan.clip, clip_high=plan.clip)
        losses.append(out.loss * (mask.sum() / batch.mask.sum()))
        kept.append(chosen & ~clipped(lp.detach() - proximal, advantages, plan.clip, plan.clip))
    return Outcome(torch.stack(losses).sum(), torch.cat(kept))


def repository(batch: Batch, plan: Plan) -> Outcome:
    """The paper's repository: per micro-batch, PPO's clip with bounds solved from the threshold; at least 0.3 and 0.5."""
    losses, kept = [], []
    valid = batch.mask.sum()
    for part in batch.micro_batches(plan.micro_batch):
        lp, behavior, _, advantages, mask = part
        d = lp.detach() - behavior
        bounds = reference.repository_clip_bounds(d.square(), trust_region(d, advantages, mask), plan.m2_threshold)
        out = grpo_loss(lp, behavior, advantages, mask, clip_low=bounds[0], clip_high=bounds[1], denominator=valid)
        losses.append(out.loss)
        kept.append(mask & ~clipped(d, advantages, *bounds))
    return Outcome(torch.stack(losses).sum(), torch.cat(kept))


LOSSES: dict[str, Arm] = {"grpo": grpo, "free": free, "m2po": m2po, "areal": areal, "repository": repository}


def trust_region(d: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """T, bool [B, R]: the valid tokens that move further in the direction that their advantage rewards."""
    return mask & (advantages[:, None].sign() * d.sign() > 0)


def clipped(d: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """bool [B, R]: where PPO's clip to [1 - low, 1 + high] takes the gradient."""
    signs = advantages[:, None].sign()
    above = (signs > 0) & (d > math.log1p(high))
    below = (signs < 0) & (d < (math.log1p(-low) if low < 1 else -math.inf))
    return above | below
