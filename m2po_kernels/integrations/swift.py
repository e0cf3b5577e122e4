"""M2PO in ms-swift's GRPO trainer. A plugin file for `--external_plugins` calls `register()`; see docs/integrations/swift.md."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.trainers import TrainerFactory, disable_gradient_checkpointing

from m2po_kernels import M2Accumulator, loss_scale, m2po_loss
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs

from .common import MicroBatch, Window, check_version, select_window

# What each option must be, and why. First those that the Megatron trainer has as well.
EXPECTED = {
    "loss_type": ("dapo", "M2PO divides by the tokens of the whole optimizer step, and 'dapo' is the loss that does so"),
    "importance_sampling_level": ("token", "M2PO weighs each token by its own ratio"),
    "rollout_importance_sampling_mode": (None, "M2PO weighs by the ratio to the rollout engine itself"),
    "off_policy_sequence_mask_delta": (None, "it would drop tokens that the selection has counted"),
    "top_entropy_quantile": (1.0, "it would drop tokens that the selection has counted"),
}
_EXPECTED_HERE = {
    "sdar_loss_coef": (0.0, "its loss is not added to M2PO's"),
    "chord_sft_dataset": ([], "its loss is not added to M2PO's"),
    "use_liger_kernel": (False, "its loss does not give the log-probs that M2PO starts from"),
}
_EXPECTED_OF_TEMPLATE = {
    "sequence_parallel_size": (1, "the adapter cannot tell which ranks hold the same tokens"),
}


def register(*, m2_threshold: float = 0.04, scope: str = "quadrants") -> None:
    """Lets `swift rlhf --rlhf_type grpo` train with M2PO. For the plugin file of `--external_plugins`.

    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    M2Accumulator(m2_threshold=m2_threshold, scope=scope)  # raises now, not at the first step
    M2POTrainer.m2_threshold, M2POTrainer.scope = m2_threshold, scope
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{M2POTrainer.__name__}"


def check_options(args: Any, expected: dict[str, tuple[Any, str]]) -> None:
    """Raises InvalidArgument for an option of ms-swift that M2PO cannot go with."""
    for name, (wanted, why) in expected.items():
        value = getattr(args, name)
        if value != wanted:
            raise InvalidArgument(f"{name} must be {wanted!r} for M2PO, as {why}; got {value!r}")


def missing(error: MissingBehaviorLogProbs) -> MissingBehaviorLogProbs:
    """`error`, with what can be done about it in ms-swift."""
    return MissingBehaviorLogProbs(
        "rollout_per_token_logps is None; expected --use_vllm true, and of a multi_turn_scheduler rollout_logprobs that has a "
        f"number for each token of the completion ({error})"
    )


class M2POTrainer(GRPOTrainer):
    """ms-swift's GRPO trainer with the M2PO loss: one selection for each optimizer step, over its micro-batches and ranks."""

    m2_threshold = 0.04
    scope = "quadrants"

    def __init__(self, *args: Any, **kwargs: Any):
        check_version("ms-swift")
        options = kwargs["args"]
        check_options(options, EXPECTED)
        check_options(options, _EXPECTED_HERE)
        check_options(kwargs["template"], _EXPECTED_OF_TEMPLATE)
        per_generation = options.steps_per_generation * options.num_iterations
        if per_generation % options.gradient_accumulation_steps:
            raise InvalidArgument(
                "gradient_accumulation_steps must divide steps_per_generation * num_iterations, or an optimizer step spans "
                f"generations that do not exist yet; got {options.gradient_accumulation_steps} and "
                f"{options.steps_per_generation} * {options.num_iterations}"
            )
        super().__init__(*args, **kwargs)
        if self.temperature != 1.0 and not (options.use_vllm and self.vllm_version_ge_0_10_2):
            raise InvalidArgument(
                "temperature must be 1.0 unless use_vllm is true and vLLM 0.10.2 or newer, as other engines report the "
                f"log-probs from before it is applied; got {self.temperature}"
            )
        self.request_config.logprobs = True  # which ms-swift asks of vLLM alone
        self._window: Window | None = None
        self._log_probs: torch.Tensor | None = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        micro_batch = super()._prepare_inputs(inputs)
        if self.model.training and self._step % self.args.gradient_accumulation_steps == 0:
            self._select()
        return micro_batch

    def _select(self) -> None:
        """Makes the window of the optimizer step that begins here."""
        args, first = self.args, self._step
        steps = range(first, first + args.gradient_accumulation_steps)
        # Right after a generation the weights are those that its log-probs were computed with.
        moved = first % (args.steps_per_generation * self.num_iterations) != 0
        try:
            self._window = select_window(
                (self._micro_batch(self._buffered_inputs[step % args.steps_per_generation], moved) for step in steps),
                m2_threshold=self.m2_threshold,
                scope=self.scope,
                group=_world(),
            )
        except MissingBehaviorLogProbs as error:
            raise missing(error) from None
        for name, value in self._window.metrics().items():
            self._metrics["train"][name].append(value)

    @torch.no_grad()
    def _micro_batch(self, micro_batch: dict[str, Any], moved: bool) -> MicroBatch:
        batch = micro_batch["grpo_batch"]
        log_probs = batch.old_per_token_logps
        if moved:
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                log_probs, _ = self._get_per_token_logps_and_entropies(
                    self.model, micro_batch["model_inputs"], batch, origin_data=micro_batch.get("_origin_data")
                )
        mask = batch.completion_mask
        if self.overlong_filter:
            mask = mask & ~batch.truncated_mask[:, None]
        return MicroBatch(log_probs, batch.rollout_per_token_logps, batch.advantages, mask)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropies = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._log_probs = log_probs  # for the loss below
        return log_probs, entropies

    def _compute_loss_and_metrics(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> tuple[torch.Tensor, Any]:
        """The parent's forward and metrics; in training, the M2PO loss of its log-probs in place of its own."""
        loss, metrics = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        log_probs, self._log_probs = self._log_probs, None
        if not self.model.training:
            return loss, metrics
        assert self._window is not None
        assert log_probs is not None
        share = self._window.shares[self._step % self.args.gradient_accumulation_steps]
        out = m2po_loss(
            log_probs,
            share.behavior_log_probs,
            grpo_batch.advantages,
            share.mask,
            ref_log_probs=grpo_batch.ref_per_token_logps,
            kl_coef=0.0 if self.kl_in_reward else self.beta,
            ratio_cap=self.args.delta,
            selection=self._window.selection,
            part=share.part,
        )
        return out.loss * loss_scale(_world(), micro_batches=self.args.gradient_accumulation_steps), metrics

    def _compute_loss_chunked(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.model.training:
            raise InvalidArgument(
                "per_device_train_batch_size must be at least the number of samples that the multi_turn_scheduler returns for a "
                f"micro-batch, as M2PO does not split one; got {self.args.per_device_train_batch_size}"
            )
        return super()._compute_loss_chunked(*args, **kwargs)


def _world() -> Any:
    """All ranks: accelerate averages gradients over them, and without sequence parallelism each has its own samples."""
    return dist.group.WORLD if dist.is_initialized() else None
