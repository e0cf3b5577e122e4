"""M2PO in ms-swift's Megatron GRPO trainer. A plugin file calls `register()`; see docs/integrations/swift.md."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import swift.megatron.trainers as trainers
from megatron.core import mpu
from swift.megatron.trainers import MegatronGRPOTrainer
from swift.rlhf_trainers.utils import pad_logps_back_to_batch
from torch import Tensor

from m2po_kernels import M2Accumulator, megatron_loss_scale
from m2po_kernels.errors import InvalidArgument

from .common import Share, Window, check_version
from .swift_step import EXPECTED, check_options, loss_of, select

_EXPECTED = {
    "router_replay_mode": ("disabled", "the log-probs for the selection are computed without it"),
    "calculate_per_token_loss": (False, "its loss is multiplied for a schedule that divides by micro-batches"),
}


def register(*, m2_threshold: float = 0.04, scope: str = "quadrants") -> None:
    """Lets `megatron rlhf --rlhf_type grpo` train with M2PO. For the plugin file of `--external_plugins`.

    ms-swift looks its trainer up by name in swift.megatron.trainers, so this puts ours there.
    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    M2Accumulator(m2_threshold=m2_threshold, scope=scope)  # raises now, not at the first step
    M2POMegatronTrainer.settings = {"m2_threshold": m2_threshold, "scope": scope}
    trainers.MegatronGRPOTrainer = M2POMegatronTrainer


class M2POMegatronTrainer(MegatronGRPOTrainer):
    """ms-swift's Megatron GRPO trainer with the M2PO loss: one selection for each optimizer step, over data-parallel ranks."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, args: Any, template: Any, **kwargs: Any):
        check_version("ms-swift")
        check_options(args, EXPECTED | _EXPECTED)
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
        # Right after a generation the weights are those that its log-probs were computed with.
        moved = self._step % self.steps_per_generation != 0
        # A forward goes through all stages of a pipeline, each of which waits for the one before it: none may leave it out.
        current = [(data["grpo_batch"], self._current(data, moved)) for data in encoded_batches]
        if not mpu.is_pipeline_last_stage():
            return  # only the last stage has log-probs, and a loss
        # Tensor-parallel ranks, and context-parallel ones after ms-swift has put the log-probs together, hold the same tokens:
        # each selects over its own data-parallel group, and all get the same selection.
        self._window = select(
            current,
            self,
            group=mpu.get_data_parallel_group(),
            replicated_over=mpu.get_tensor_and_context_parallel_group(),
        )
        self._shares = {id(data["grpo_batch"]): s for data, s in zip(encoded_batches, self._window.shares, strict=True)}
        for name, value in self._window.metrics().items():
            self._metrics["train"][name].append(value)

    def _current(self, data: dict[str, Any], moved: bool) -> Tensor | None:
        """Current log-probs; None on all stages of a pipeline but the last."""
        batch = data["grpo_batch"]
        if not moved:
            return batch.old_per_token_logps
        inputs = {name: value for name, value in data.items() if name != "grpo_batch"}
        log_probs, _ = self.compute_per_token_logps(
            self.unwrapped_models[0], iter([deepcopy(inputs)]), temperature=self.temperature
        )
        if self.template.padding_free:
            size, length = batch.completion_mask.shape
            log_probs, _ = pad_logps_back_to_batch(
                logps_rmpad=log_probs, logits_to_keep=length, batch_size=size, seq_lengths=batch.seq_lengths
            )
        return log_probs

    def loss_func(self, output_tensor: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The parent's metrics; in training, the M2PO loss in place of its own."""
        loss, report = super().loss_func(output_tensor, data)
        if not self.unwrapped_models[0].training:
            return loss, report
        assert self._window is not None
        batch = data["grpo_batch"]
        share = self._shares[id(batch)]
        # Of a loss with two results the schedule takes the context-parallel size itself.
        loss = loss_of(output_tensor, batch, self._window, share, self) * megatron_loss_scale(
            num_microbatches=self.args.num_microbatches, data_parallel_size=mpu.get_data_parallel_world_size()
        )
        return loss, {**report, **self._all_reduce_metric({"loss": loss.detach().clone()})}
