"""M2PO in TRL: `M2POConfig` and `M2POTrainer` in place of GRPOConfig and GRPOTrainer. docs/integrations/trl.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from m2po_kernels import M2Accumulator, linear_m2po_loss, loss_scale, m2po_loss
from m2po_kernels.errors import InvalidArgument, InvalidType, MissingBehaviorLogProbs, describe

from .common import MicroBatch, Window, check_version, select_window
from .transformers import add_linear_head

# Options of GRPO that M2PO has no place for: the one value that leaves each off, and why.
_OFF = {
    "loss_type": ("dapo", "M2PO divides by the tokens of the optimizer batch"),
    "importance_sampling_level": ("token", "M2PO selects tokens"),
    "epsilon": (0.2, "M2PO selects tokens and clips nothing, so leave it out"),
    "epsilon_high": (None, "M2PO selects tokens and clips nothing, so leave it out"),
    "off_policy_mask_threshold": (None, "M2PO selects by itself"),
    "top_entropy_quantile": (1.0, "M2PO selects by itself"),
    "entropy_coef": (0.0, "M2PO has no entropy bonus"),
    "use_adaptive_entropy": (False, "M2PO has no entropy bonus"),
    "use_bias_correction_kl": (False, "the KL term of M2PO is not weighted by the ratio"),
    "vllm_importance_sampling_correction": (False, "M2PO's ratio is to the rollout engine already, and would count twice"),
}
_IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
_CARRIED = "m2po"  # the key under which a micro-batch carries its window and its share of it


@dataclass
class M2POConfig(GRPOConfig):
    """GRPOConfig with M2PO's options. What M2PO has no place for is refused; `delta` caps ratios where A < 0.

    m2_threshold: as in `m2po_loss`.
    linear_log_probs: log-probs and loss from hidden states by this package, through `add_linear_head`; False: by TRL's head.
    """

    m2_threshold: float = field(default=0.04, metadata={"help": "Bound on the mean squared log-ratio of the trust region."})
    linear_log_probs: bool = field(default=True, metadata={"help": "Log-probs and loss by m2po_kernels, not by TRL's head."})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Not with M2PO."})
    vllm_importance_sampling_correction: bool = field(default=False, metadata={"help": "Not with M2PO."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (value, why) in _OFF.items():
            if getattr(self, name) != value:
                raise InvalidArgument(f"{name} must be {value!r}: {why}; got {getattr(self, name)!r}")
        M2Accumulator(m2_threshold=self.m2_threshold)  # checks it
        if self.delta is not None and not self.delta > 1:
            raise InvalidArgument(f"delta must be > 1, as it caps the ratio, or None; got {self.delta!r}")
        uses = self.steps_per_generation * self.num_iterations
        if uses % self.gradient_accumulation_steps:
            raise InvalidArgument(
                f"gradient_accumulation_steps must divide steps_per_generation * num_iterations = {uses}, so that no optimizer "
                f"step needs a generation that is still to come; got {self.gradient_accumulation_steps}"
            )
        if self.parallelism_config is not None and self.parallelism_config.tp_enabled:
            size = self.parallelism_config.tp_size
            raise InvalidArgument(f"parallelism_config must have tp_size=1: every rank must have tokens of its own; got {size}")


class M2POTrainer(GRPOTrainer):
    """GRPOTrainer with M2PO: one selection over all micro-batches and ranks of an optimizer step, made before its first one.

    Needs the rollout engine's log-probs: use_vllm=True, or a rollout_func that returns them.
    """

    _tag_names = ("trl", "m2po")
    _name = "M2PO"

    def __init__(self, model: Any, reward_funcs: Any, args: M2POConfig, *more: Any, **kwargs: Any):
        check_version("trl")
        if not isinstance(args, M2POConfig):
            raise InvalidType(f"args must be an M2POConfig; got {describe(args)}")
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        if args.use_vllm and args.vllm_mode == "server" and self.accelerator.is_main_process:
            check_logprobs_mode(self.vllm_generation.vllm_client.get_server_info())
        if args.linear_log_probs:
            head = {"temperature": self.temperature, "fp32": args.cast_lm_head_to_fp32}
            add_linear_head(self.model, entropy=True, **head)
            if self.ref_model is not None:
                add_linear_head(self.accelerator.unwrap_model(self.ref_model), **head)
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self._steps = range(0)  # of the window that is being trained on, as self._step counts them
        self._window: Window | None = None

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            window = self._select([inputs], fresh=False)
            return inputs | {_CARRIED: (window, window.shares[0])}
        if self._step not in self._steps:
            n, per_generation = self.current_gradient_accumulation_steps, self.args.steps_per_generation
            since_generation = self._step % (per_generation * self.num_iterations)
            if since_generation + n > per_generation * self.num_iterations:
                raise InvalidArgument(
                    f"gradient_accumulation_steps: {n} micro-batches from {since_generation} of steps_per_generation * "
                    f"num_iterations = {per_generation * self.num_iterations} on need a generation that is still to come"
                )
            self._steps = range(self._step, self._step + n)
            micro_batches = [self._buffered_inputs[step % per_generation] for step in self._steps]
            self._window = self._select(micro_batches, fresh=since_generation == 0)
        assert self._window is not None
        return inputs | {_CARRIED: (self._window, self._window.shares[self._steps.index(self._step)])}

    @torch.no_grad()
    def _select(self, micro_batches: list[dict[str, Any]], *, fresh: bool) -> Window:
        """One selection over the window, its metrics into TRL's. fresh: the log-probs that TRL took at generation are current."""
        batches, sums = [], torch.zeros(4, device=self.accelerator.device)
        for inputs in micro_batches:
            log_probs, entropy = inputs.get("old_per_token_logps") if fresh else None, None
            if log_probs is None:
                log_probs, entropy, _ = self._log_probs(self.model, inputs, compute_entropy=True)
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1) != 0
            batches.append(MicroBatch(log_probs, inputs.get("sampling_per_token_logps"), inputs["advantages"], mask))
            if entropy is not None:
                sums[:2] += torch.stack([(entropy * mask).sum(), mask.sum()])
            if self.beta != 0.0:
                q = torch.where(mask, inputs["ref_per_token_logps"] - log_probs, 0)
                sums[2:] += torch.stack([(q.expm1() - q).sum(), mask.sum()])
        try:
            window = select_window(batches, m2_threshold=self.args.m2_threshold, group=self._group)
        except MissingBehaviorLogProbs as error:
            raise MissingBehaviorLogProbs(
                "sampling_per_token_logps is missing: set use_vllm=True, or pass a rollout_func that returns logprobs, as "
                f"generation by transformers has none ({error})"
            ) from None
        totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        logged = window.metrics()
        logged |= {name: total / n for name, total, n in zip(("entropy", "kl"), totals[0::2], totals[1::2], strict=True) if n}
        for name, value in logged.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return window

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        window, share = inputs[_CARRIED]
        ends, n = self.accelerator.sync_gradients, self.current_gradient_accumulation_steps
        if self.model.training and ends != (self._step == self._steps[-1]):
            raise InvalidArgument(
                f"the optimizer step {'ends' if ends else 'goes on'} after micro-batch {self._steps.index(self._step) + 1} of "
                f"the {len(self._steps)} that were selected together; expected gradient_accumulation_steps to be as at the start"
            )
        terms = {
            "behavior_log_probs": share.behavior_log_probs,
            "advantages": inputs["advantages"],
            "mask": share.mask,
            "selection": window.selection,
            "part": share.part,
            "ref_log_probs": inputs.get("ref_per_token_logps"),
            "kl_coef": self.beta,
            "ratio_cap": self.args.delta,
        }
        if self.args.linear_log_probs:
            head = partial(linear_m2po_loss, **terms, logits_to_keep=inputs["completion_ids"].shape[1])
            given = _model_inputs(inputs) | ({"output_router_logits": True} if self.aux_loss_enabled else {})
            with self.accelerator.autocast():
                out = model(**given, labels=given["input_ids"], fused_lm_head=True, head=head)
            loss, aux_loss = out.loss, out.aux_loss
        else:
            log_probs, _, aux_loss = self._log_probs(model, inputs, compute_aux_loss=self.aux_loss_enabled)
            loss = m2po_loss(log_probs, **terms).loss
        loss = loss * loss_scale(self._group)  # gradients are averaged over the ranks
        if self.aux_loss_enabled:  # as GRPOTrainer does it
            loss = loss + self.router_aux_loss_coef * aux_loss / (n if self.model.training else 1)
        return loss

    def _log_probs(self, model: Any, inputs: dict[str, Any], **what: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        counts = {name: inputs.get(name) for name in ("num_images", "num_tiles")}
        keep = inputs["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(model, logits_to_keep=keep, **_model_inputs(inputs), **counts, **what)


def _model_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    whole = {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    }
    return whole | {name: inputs[name] for name in _IMAGES if inputs.get(name) is not None}


def check_logprobs_mode(server_info: dict[str, Any]) -> None:
    """Raises unless the vLLM server's log-probs are those of the distribution that it sampled from."""
    mode = server_info["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise InvalidArgument(f"the vLLM server must run with --logprobs-mode processed_logprobs; it runs with {mode}")
