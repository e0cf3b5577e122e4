"""M2PO in ms-swift's GRPO trainer. A plugin file for `--external_plugins` calls `register()`; see docs/integrations/swift.md."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.trainers import TrainerFactory, disable_gradient_checkpointing
from torch import Tensor

from m2po_kernels import M2Accumulator, loss_scale
from m2po_kernels.errors import InvalidArgument

from .common import Window, check_version, check_window_end, steps_of_window
from .swift_step import EXPECTED, UNSEEN, check_options, loss_of, select
from .transformers import add_linear_head

# What each option must be, and why, besides those of both trainers.
_EXPECTED: dict[str, tuple[Any, str]] = {
    "min_p": (0.0, UNSEEN),
    "structured_outputs_regex": (None, UNSEEN),
    "sdar_loss_coef": (0.0, "its loss is not added to M2PO's"),
    "chord_sft_dataset": ([], "its loss is not added to M2PO's"),
    "use_liger_kernel": (False, "its loss does not give the log-probs that M2PO starts from"),
}
_IGNORED = -100  # the label of a position that is not scored


def register(*, m2_threshold: float = 0.04, scope: str = "quadrants", linear_log_probs: bool = False) -> None:
    """Lets `swift rlhf --rlhf_type grpo` train with M2PO. For the plugin file of `--external_plugins`.

    linear_log_probs: log-probs from hidden states by `add_linear_head`, without logits; False: by the model's own head.
    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    M2Accumulator(m2_threshold=m2_threshold, scope=scope)  # raises now, not at the first step
    M2POTrainer.settings = {"m2_threshold": m2_threshold, "scope": scope}
    M2POTrainer.linear_log_probs = linear_log_probs
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{M2POTrainer.__name__}"


class M2POTrainer(GRPOTrainer):
    """ms-swift's GRPO trainer with the M2PO loss: one selection for each optimizer step, over its micro-batches and ranks."""

    settings: ClassVar[dict[str, Any]] = {}
    linear_log_probs = False

    def __init__(self, *args: Any, **kwargs: Any):
        check_version("ms-swift")
        options = kwargs["args"]
        check_options(options, EXPECTED | _EXPECTED)
        if (size := kwargs["template"].sequence_parallel_size) != 1:
            raise InvalidArgument(
                f"sequence_parallel_size must be 1 for M2PO, as which ranks hold the same tokens is not known here; got {size}"
            )
        uses = options.steps_per_generation * options.num_iterations
        if uses % options.gradient_accumulation_steps:
            raise InvalidArgument(
                f"gradient_accumulation_steps must divide steps_per_generation * num_iterations = {uses}, or an optimizer step "
                f"needs a generation that is still to come; got {options.gradient_accumulation_steps}"
            )
        super().__init__(*args, **kwargs)
        if self.temperature != 1.0 and not (options.use_vllm and self.vllm_version_ge_0_10_2):
            raise InvalidArgument(
                "temperature must be 1.0 unless use_vllm is true and vLLM 0.10.2 or newer, as other engines report the "
                f"log-probs from before it is applied; got {self.temperature}"
            )
        self.request_config.logprobs = True  # which ms-swift asks of vLLM alone
        if self.linear_log_probs:
            head = {"temperature": self.temperature, "entropy": self.compute_entropy}
            add_linear_head(self.model, **head)
            if self.ref_model is not None:
                add_linear_head(self.accelerator.unwrap_model(self.ref_model), **head)
        self._steps = range(0)  # of the window that is being trained on, as self._step counts them
        self._window: Window | None = None
        self._log_probs: Tensor | None = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        micro_batch = super()._prepare_inputs(inputs)
        if self.model.training and self._step not in self._steps:
            self._select()
        return micro_batch

    def _select(self) -> None:
        """Makes the window of the optimizer step that begins here."""
        n, per_generation = self.current_gradient_accumulation_steps, self.args.steps_per_generation
        uses = per_generation * self.num_iterations
        self._steps = steps_of_window(self._step, n, uses)
        moved = self._step % uses != 0  # else the weights are those that the log-probs of the generation were computed with
        micro_batches = (self._buffered_inputs[step % per_generation] for step in self._steps)
        self._window = select(((m["grpo_batch"], self._current(m, moved)) for m in micro_batches), self, group=_world())
        for name, value in self._window.metrics().items():
            self._metrics["train"][name].append(value)

    @torch.no_grad()
    def _current(self, micro_batch: dict[str, Any], moved: bool) -> Tensor:
        batch = micro_batch["grpo_batch"]
        if not moved:
            return batch.old_per_token_logps
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                self.model, micro_batch["model_inputs"], batch, origin_data=micro_batch.get("_origin_data")
            )[0]

    def _get_logps_via_local_forward(
        self, model: Any, model_inputs: dict[str, Any], logits_to_keep: int, input_ids: Tensor, compute_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not self.linear_log_probs:
            return super()._get_logps_via_local_forward(model, model_inputs, logits_to_keep, input_ids, compute_entropy)
        first = input_ids.shape[1] - logits_to_keep
        labels = input_ids.clone()
        labels[:, :first] = _IGNORED
        out = model(**model_inputs, labels=labels, fused_lm_head=True)
        return out.log_probs[:, first - 1 :], out.entropy[:, first - 1 :] if compute_entropy else None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropies = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._log_probs = log_probs  # for the loss below
        return log_probs, entropies

    def _compute_loss_and_metrics(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> tuple[Tensor, Any]:
        """The parent's forward and metrics; in training, the M2PO loss of its log-probs in place of its own."""
        loss, metrics = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        log_probs, self._log_probs = self._log_probs, None
        if not self.model.training:
            return loss, metrics
        assert self._window is not None
        assert log_probs is not None
        place = check_window_end(self._steps, self._step, self.accelerator.sync_gradients)
        loss = loss_of(log_probs, grpo_batch, self._window, self._window.shares[place], self)
        return loss * loss_scale(_world(), micro_batches=len(self._steps)), metrics

    def _compute_loss_chunked(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.model.training:
            raise InvalidArgument(
                "per_device_train_batch_size must be at least the number of samples that the multi_turn_scheduler returns for a "
                f"micro-batch, as M2PO does not split one; got {self.args.per_device_train_batch_size}"
            )
        return super()._compute_loss_chunked(*args, **kwargs)


def _world() -> Any:
    """All ranks: accelerate averages gradients over them, and without sequence parallelism each has its own samples."""
    return dist.group.WORLD if dist.is_initialized() else None
