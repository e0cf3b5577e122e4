"""One optimizer step on verl's engines: the trainer's own loss function, called twice for each micro-batch.

A policy loss of verl sees one micro-batch. So an engine calls a `Step` in place of the loss function: first without gradient,
where the policy loss within it hands over what the selection needs, then to train. Nothing of verl is imported here: policy
losses for other trainers on its engines ask `current_step` too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from m2po_kernels import m2po_loss
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs
from m2po_kernels.integrations.common import MicroBatch, Share, Window, select_window

VENDOR = "m2po"  # of VERL_ENGINE_VENDOR
ROWS = "m2po_rows"  # field of the batch: the place of each sequence in it, by which its micro-batches are told apart


class Step:
    """Collects the micro-batches of one optimizer step, selects over them, then gives each its loss.

    loss_function: verl's or another trainer's; within it the policy loss finds this step by `current_step`.
    scale: the ranks over whose gradients the engine averages although each has its own share of the batch.
    has_behavior: whether this rank has the rollout engine's log-probs at all.
    """

    def __init__(self, loss_function: Callable, *, scale: int, has_behavior: bool):
        self._loss_function = loss_function
        self._scale = scale
        self._has_behavior = has_behavior
        self._rows: tuple[int, ...] = ()  # of the micro-batch at hand
        self._settings: dict[str, Any] = {}
        self._collected: dict[tuple[int, ...], MicroBatch] = {}
        self._shares: dict[tuple[int, ...], Share] = {}
        self._window: Window | None = None
        self._metrics: dict[str, float] = {}

    def __call__(self, **arguments: Any) -> Any:
        """The engine's call of a loss function for one micro-batch, `data`."""
        self._rows = tuple(arguments["data"][ROWS].tolist())
        if self._window is None and self._has_behavior:
            self._has_behavior = _old_is_rollout(arguments["data"])
        token = _STEP.set(self)
        try:
            return self._loss_function(**arguments)
        finally:
            _STEP.reset(token)

    def loss(
        self, log_probs: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, **settings: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """The M2PO loss of the micro-batch at hand, and the metrics of the whole step; zero and none while collecting.

        settings: m2_threshold and scope.
        """
        if self._window is None:
            if self._rows in self._collected:
                raise InvalidArgument(
                    "the loss function asked twice for the M2PO loss of one micro-batch, as verl's distillation does; "
                    "expected one call"
                )
            self._settings = settings
            self._collected[self._rows] = MicroBatch(log_probs.detach(), behavior, advantages, mask)
            return log_probs.new_zeros(()), {}
        if self._rows not in self._shares:
            raise InvalidArgument(
                f"use_dynamic_bsz split the batch otherwise than for the selection: sequences {list(self._rows)} are no "
                f"micro-batch of {[list(rows) for rows in self._shares]}; set actor.use_dynamic_bsz=False"
            )
        share = self._shares[self._rows]
        out = m2po_loss(
            log_probs, share.behavior_log_probs, advantages, share.mask, selection=self._window.selection, part=share.part
        )
        return out.loss * self._scale, self._metrics

    def select(self, group: Any, replicated_over: Any) -> None:
        """Makes the selection of the step. Raises MissingBehaviorLogProbs on all ranks of `group` if one of them has none."""
        if not self._collected:
            raise InvalidArgument(
                f"VERL_ENGINE_VENDOR is {VENDOR}, but the loss is not M2PO: set actor.policy_loss.loss_mode=m2po, or unset "
                "the variable"
            )
        micro_batches = self._collected.values()
        try:
            self._window = select_window(
                micro_batches if self._has_behavior else (m._replace(behavior_log_probs=None) for m in micro_batches),
                group=group,
                replicated_over=replicated_over,
                **self._settings,
            )
        except MissingBehaviorLogProbs as error:
            raise MissingBehaviorLogProbs(
                "old_log_probs are not the rollout engine's on at least one rank: recomputed, or rollout_log_probs are missing. "
                "Set algorithm.rollout_correction.bypass_mode=True and actor_rollout_ref.rollout.calculate_log_probs=True "
                "(Trinity-RFT: algorithm.bypass_old_logprobs: true)"
            ) from error
        self._shares = dict(zip(self._collected, self._window.shares, strict=True))
        self._collected = {}
        self._metrics = self._window.metrics()


_STEP: ContextVar[Step] = ContextVar("m2po_step")


def current_step() -> Step:
    """The step within whose loss function this is called; InvalidArgument under an engine that makes none."""
    step = _STEP.get(None)
    if step is None:
        raise InvalidArgument(
            "the M2PO loss needs an engine that selects over the whole batch: set the environment variable "
            f"VERL_ENGINE_VENDOR={VENDOR} for all workers, with verl >= 0.9 and actor.strategy fsdp, fsdp2 or megatron"
        )
    return step


def _old_is_rollout(micro_batch: Any) -> bool:
    """Whether the old log-probs of all valid tokens are those that the rollout engine gave, or NaN where it gave NaN."""
    fields = micro_batch.select("old_log_probs", "rollout_log_probs", "response_mask").to_padded_tensor()
    old, rollout = fields["old_log_probs"], fields["rollout_log_probs"]
    same = (old == rollout) | (old.isnan() & rollout.isnan()) | (fields["response_mask"] == 0)
    return bool(same.all())
