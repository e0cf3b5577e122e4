"""M2PO in ms-swift's Megatron GRPO trainer. A plugin file calls `register()`; see docs/integrations/swift.md."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import swift.megatron.trainers as trainers
import torch
from megatron.core import mpu
from swift.megatron.trainers import MegatronGRPOTrainer
from swift.rlhf_trainers.utils import pad_logps_back_to_batch

from m2po_kernels import M2Accumulator, m2po_loss, megatron_loss_scale
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs

from .common import MicroBatch, Share, Window, check_version, select_window
from .swift import EXPECTED, check_options, missing

_EXPECTED_HERE = {
    "router_replay_mode": ("disabled", "the log-probs for the selection are computed without it"),
    "calculate_per_token_loss": (False, "its loss is multiplied for a schedule that divides by micro-batches"),
}


def register(*, m2_threshold: float = 0.04, scope: str = "quadrants") -> None:
    """Lets `megatron rlhf --rlhf_type grpo` train with M2PO. For the plugin file of `--external_plugins`.

    ms-swift looks its trainer up by name in swift.megatron.trainers, so this puts ours there.
    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    M2Accumulator(m2_threshold=m2_threshold, scope=scope)  # raises now, not at the first step
    M2POMegatronTrainer.m2_threshold, M2POMegatronTrainer.scope = m2_threshold, scope
    trainers.MegatronGRPOTrainer = M2POMegatronTrainer


class M2POMegatronTrainer(MegatronGRPOTrainer):
    """ms-swift's Megatron GRPO trainer with the M2PO loss: one selection for each optimizer step, over data-parallel ranks."""

    m2_threshold = 0.04
    scope = "quadrants"

    def __init__(self, args: Any, template: Any, **kwargs: Any):
        check_version("ms-swift")
        check_options(args, EXPECTED)
        check_options(args, _EXPECTED_HERE)
        super().__init__(args, template, **kwargs)
        if self.temperature != 1.0 and not self.vllm_version_ge_0_10_2:
            raise InvalidArgument(
                "temperature must be 1.0 unless vLLM is 0.10.2 or newer, as older ones report the log-probs from before it is "
                f"applied; got {self.temperature}"
            )
        self._window: Window | None = None
        self._shares: dict[int, Share] = {}  # by id of the GRPOBatch: with pipelines the losses come in the schedule's order

    def _on_train_step_batch(self, encoded_batches: list[dict[str, Any]]) -> None:
        super()._on_train_step_batch(encoded_batches)
        if not mpu.is_pipeline_last_stage():
            return  # only the last stage has log-probs, and a loss
        # Right after a generation the weights are those that its log-probs were computed with.
        moved = self._step % self.steps_per_generation != 0
        try:
            # Tensor-parallel ranks, and context-parallel ones after ms-swift has put the log-probs together, hold the same
            # tokens: each selects over its own data-parallel group, and all get the same selection.
            self._window = select_window(
                (self._micro_batch(data, moved) for data in encoded_batches),
                m2_threshold=self.m2_threshold,
                scope=self.scope,
                group=mpu.get_data_parallel_group(),
                replicated_over=mpu.get_tensor_and_context_parallel_group(),
            )
        except MissingBehaviorLogProbs as error:
            raise missing(error) from None
        self._shares = {id(data["grpo_batch"]): s for data, s in zip(encoded_batches, self._window.shares, strict=True)}
        for name, value in self._window.metrics().items():
            self._metrics["train"][name].append(value)

    def _micro_batch(self, data: dict[str, Any], moved: bool) -> MicroBatch:
        batch = data["grpo_batch"]
        log_probs = batch.old_per_token_logps
        if moved:
            inputs = {name: value for name, value in data.items() if name != "grpo_batch"}
            log_probs, _ = self.compute_per_token_logps(
                self.unwrapped_models[0], iter([deepcopy(inputs)]), temperature=self.temperature
            )
            if self.template.padding_free:
                size, length = batch.completion_mask.shape
                log_probs, _ = pad_logps_back_to_batch(
                    logps_rmpad=log_probs, logits_to_keep=length, batch_size=size, seq_lengths=batch.seq_lengths
                )
        mask = batch.completion_mask
        if self.overlong_filter:
            mask = mask & ~batch.truncated_mask[:, None]
        return MicroBatch(log_probs, batch.rollout_per_token_logps, batch.advantages, mask)

    def loss_func(self, output_tensor: torch.Tensor, data: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The parent's metrics; in training, the M2PO loss in place of its own."""
        loss, report = super().loss_func(output_tensor, data)
        if not self.unwrapped_models[0].training:
            return loss, report
        assert self._window is not None
        batch = data["grpo_batch"]
        share = self._shares[id(batch)]
        out = m2po_loss(
            output_tensor,
            share.behavior_log_probs,
            batch.advantages,
            share.mask,
            ref_log_probs=batch.ref_per_token_logps,
            kl_coef=0.0 if self.kl_in_reward else self.beta,
            ratio_cap=self.args.delta,
            selection=self._window.selection,
            part=share.part,
        )
        # Of a loss with two results the schedule takes the context-parallel size itself.
        loss = out.loss * megatron_loss_scale(
            num_microbatches=self.args.num_microbatches, data_parallel_size=mpu.get_data_parallel_world_size()
        )
        return loss, {**report, **self._all_reduce_metric({"loss": loss.detach().clone()})}
