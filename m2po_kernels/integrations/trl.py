"""M2PO in TRL: `M2POConfig` and `M2POTrainer` in place of GRPOConfig and GRPOTrainer. docs/integrations/trl.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from m2po_kernels import loss_scale, m2po_loss
from m2po_kernels.errors import InvalidType, MissingBehaviorLogProbs, describe

from .common import MicroBatch, Window, check_version, check_window_end, select_window, steps_of_window
from .transformers import add_linear_head
from .trl_config import M2POConfig, check_logprobs_mode
from .trl_rows import IMAGES, loss_of_rows, model_inputs, spread, valid

__all__ = ["M2POConfig", "M2POTrainer"]


class M2POTrainer(GRPOTrainer):
    """GRPOTrainer with M2PO: one selection over all micro-batches and ranks of an optimizer step, made before its first one.

    Needs args, an M2POConfig, and the rollout engine's log-probs: use_vllm=True, or a rollout_func that returns them.
    """

    _tag_names = ("trl", "m2po")
    _name = "M2PO"

    def __init__(self, model: Any, reward_funcs: Any = None, args: M2POConfig | None = None, *more: Any, **kwargs: Any):
        check_version("trl")
        if not isinstance(args, M2POConfig):
            raise InvalidType(f"args must be an M2POConfig; got {describe(args)}")
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        if args.use_vllm and args.vllm_mode == "server":
            check_logprobs_mode(self.vllm_generation, self.accelerator)
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
        if self.model.training and self._step not in self._steps:
            uses = self.args.steps_per_generation * self.num_iterations
            self._steps = steps_of_window(self._step, self.current_gradient_accumulation_steps, uses)
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        place = check_window_end(self._steps, self._step, self.accelerator.sync_gradients) if training else 0
        n = len(self._steps) if training else 1
        log_probs = aux_loss = None
        window = self._window
        if place == 0:
            window, log_probs, aux_loss = self._select(model, inputs)
            self._window = window if training else self._window
        assert window is not None
        share = window.shares[place]
        terms: dict[str, Any] = {
            "behavior_log_probs": share.behavior_log_probs,
            "advantages": inputs["advantages"],
            "mask": share.mask,
            "selection": window.selection,
            "part": share.part,
            "ref_log_probs": inputs.get("ref_per_token_logps"),
            "kl_coef": self.beta,
            "ratio_cap": self.args.delta,
        }
        rows = None if log_probs is not None else self._rows(inputs, window.selection.keep_of(share.part))
        if log_probs is None and self.args.linear_log_probs:
            given = model_inputs(inputs, rows) | ({"output_router_logits": True} if self.aux_loss_enabled else {})
            keep = inputs["completion_ids"].shape[1]
            head = partial(loss_of_rows, rows=rows, **terms, logits_to_keep=keep)
            with self.accelerator.autocast():
                out = model(**given, labels=given["input_ids"], fused_lm_head=True, head=head)
            loss, aux_loss = out.loss, out.aux_loss
        else:
            if log_probs is None:
                log_probs, _, aux_loss = self._log_probs(model, inputs, rows, compute_aux_loss=self.aux_loss_enabled)
            loss = m2po_loss(log_probs, **terms).loss
        loss = loss * loss_scale(self._group)  # gradients are averaged over the ranks
        if self.aux_loss_enabled:  # as GRPOTrainer does it
            assert aux_loss is not None
            loss = loss + self.router_aux_loss_coef * aux_loss / n
            everywhere = self.accelerator.gather_for_metrics(aux_loss.detach())
            self._metrics["train" if training else "eval"]["aux_loss"].append(everywhere.mean().item())
        return loss

    def _select(self, model: Any, inputs: dict[str, Any]) -> tuple[Window, Tensor | None, Tensor | None]:
        """The selection over the window that starts with micro-batch `inputs`; of that one, log-probs and load-balancing loss.

        Its log-probs have a gradient, so that it goes through the model once. None of both if TRL's own from generation are
        current, as no step was made since.
        """
        micro_batches, fresh = [inputs], False
        if self.model.training:
            per_generation = self.args.steps_per_generation
            micro_batches = [self._buffered_inputs[step % per_generation] for step in self._steps]
            fresh = self._step % (per_generation * self.num_iterations) == 0
        if fresh and inputs.get("old_per_token_logps") is not None:
            return self._window_of(micro_batches, [(given["old_per_token_logps"], None) for given in micro_batches]), None, None
        others = [self._now(given) for given in micro_batches[1:]]  # first, while no graph takes memory
        # Where the model is sharded all ranks must go through it equally often, so with all sequences at once.
        at_once = self.is_fsdp_enabled or self.is_deepspeed_enabled or not self.model.training
        rows = None if at_once else self._rows(inputs, valid(inputs))
        rest = None if rows is None else self._now(inputs, ~rows)
        log_probs, entropy, aux_loss = self._log_probs(
            model, inputs, rows, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        assert entropy is not None
        if rest is not None:
            log_probs, entropy = log_probs + rest[0], entropy + rest[1]
        return self._window_of(micro_batches, [(log_probs, entropy), *others]), log_probs, aux_loss

    @torch.no_grad()
    def _window_of(self, micro_batches: list[dict[str, Any]], current: list[tuple[Tensor, Tensor | None]]) -> Window:
        """One selection from current log-probs, its metrics and those of the entropies into TRL's."""
        batches, sums = [], torch.zeros(4, device=self.accelerator.device)
        for inputs, (log_probs, entropy) in zip(micro_batches, current, strict=True):
            mask = valid(inputs)
            batches.append(MicroBatch(log_probs, inputs.get("sampling_per_token_logps"), inputs["advantages"], mask))
            if entropy is not None:
                sums[:2] += torch.stack([(entropy * mask).sum(), mask.sum()])
            if self.beta != 0.0:
                q = torch.where(mask, inputs["ref_per_token_logps"] - log_probs, 0)
                sums[2:] += torch.stack([(q.expm1() - q).sum(), mask.sum()])
        settings: dict[str, Any] = {"m2_threshold": self.args.m2_threshold, "scope": self.args.scope}
        try:
            window = select_window(batches, **settings, group=self._group)
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

    def _rows(self, inputs: dict[str, Any], tokens: Tensor) -> Tensor | None:
        """Which sequences can have a gradient, bool [B]: those with an advantage at one of `tokens`. None: all of them."""
        if self.beta != 0.0 or self.aux_loss_enabled or any(inputs.get(name) is not None for name in IMAGES):
            return None
        rows = (tokens & (inputs["advantages"].reshape(len(tokens), -1) != 0)).any(1)
        rows[0] |= ~rows.any()  # at least one: DDP and FSDP wait for each rank's gradient
        return None if rows.all() else rows

    @torch.no_grad()
    def _now(self, inputs: dict[str, Any], rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy without a gradient, in the way GRPOTrainer takes them at generation."""
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            log_probs, entropy, _ = self._log_probs(self.model, inputs, rows, compute_entropy=True)
        assert entropy is not None
        return log_probs, entropy

    def _log_probs(
        self, model: Any, inputs: dict[str, Any], rows: Tensor | None, **what: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropy and load-balancing loss by the model's head, of sequences `rows`; 0 in the others."""
        counts = {name: inputs.get(name) for name in ("num_images", "num_tiles")}
        keep = inputs["completion_ids"].shape[1]
        log_probs, entropy, aux_loss = self._get_per_token_logps_and_entropies(
            model, logits_to_keep=keep, **model_inputs(inputs, rows), **counts, **what
        )
        return spread(log_probs, rows), None if entropy is None else spread(entropy, rows), aux_loss
