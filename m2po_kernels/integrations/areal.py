"""M2PO over whole optimizer batches in AReaL, by its own option `actor.m2_threshold`; see docs/integrations/areal.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import areal.engine
import torch
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.stats import infer_token_denominator
from areal.utils import stats_tracker
from torch import Tensor

from m2po_kernels import Selection, m2po_loss
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs

from .common import MicroBatch, Window, check_version, select_window

# The selection travels with a mini-batch under this key: AReaL splits and packs each [B, T] tensor in it as it does the tokens.
_KEEP = "m2po_keep"


def register() -> None:
    """Lets AReaL's trainers make their FSDP actors with M2PO: they take areal.engine.FSDPPPOActor by name."""
    areal.engine.FSDPPPOActor = M2POFSDPPPOActor


class M2POFSDPPPOActor(FSDPPPOActor):
    """AReaL's FSDP actor; with `actor.m2_threshold` set its PPO update is that of `M2POActor`."""

    def __init__(self, config: Any):
        super().__init__(config)
        if config.m2_threshold is not None:
            self.actor = M2POActor(config, self)


class M2POActor(PPOActor):
    """AReaL's PPO algorithm with the M2PO loss: one selection for each mini-batch, over its data-parallel ranks."""

    def __init__(self, config: Any, engine: Any):
        check_version("areal")
        _check(config)
        super().__init__(config, _Engine(engine, m2_threshold=config.m2_threshold, ratio_cap=config.c_clip))


def _check(config: Any) -> None:
    for name, wanted, why in (
        ("use_sapo_loss", False, "it is another loss"),
        ("importance_sampling_level", "token", "M2PO weighs each token by its own ratio"),
        ("rejection_sampling", None, "it would drop tokens that the selection has counted"),
        ("enable_tree_training", False, "a tree holds tokens once that the selection counts for each sequence"),
    ):
        value = getattr(config, name)
        if value != wanted:
            raise InvalidArgument(f"actor.{name} must be {wanted!r} with actor.m2_threshold, as {why}; got {value!r}")
    if config.recompute_logprob and not config.use_decoupled_loss:
        raise InvalidArgument(
            "actor.recompute_logprob must be False with actor.m2_threshold and without actor.use_decoupled_loss, as it puts "
            "recomputed log-probs in the place of the rollout's; got True"
        )
    if config.m2_threshold is None:
        raise InvalidArgument("actor.m2_threshold must be set, 0.04 in the paper; got None")


class _Engine:
    """The engine of a PPOActor, with M2PO in the place of the loss that `train_batch` is given."""

    def __init__(self, engine: Any, *, m2_threshold: float, ratio_cap: float | None):
        self._engine = engine
        self._m2_threshold = m2_threshold
        self._ratio_cap = ratio_cap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train_batch(
        self, input_: dict[str, Any], loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[[dict[str, Any]], Tensor]
    ) -> dict[str, float]:
        """One optimizer step."""
        if "teacher_logp" in input_:
            raise InvalidArgument("teacher must not be set with actor.m2_threshold, as its loss is not added to M2PO's")
        window = self._select(input_)
        (share,) = window.shares
        return self._engine.train_batch(
            {**input_, _KEEP: window.selection.keep_of(share.part).to(input_["loss_mask"].device)},
            loss_fn=lambda *args, **kwargs: self._loss(window, *args, **kwargs),
            loss_weight_fn=lambda data: _valid(data).count_nonzero(),
        )

    def _select(self, data: dict[str, Any]) -> Window:
        # What it returns is for all tokens on each rank of a tensor, context or pipeline parallel group: those are replicas.
        log_probs = self._engine.forward(input_=data, aggregate_fn=lambda parts: torch.cat(parts, dim=-1))
        # They end with the longest sequence, the batch where it is padded to.
        log_probs = torch.nn.functional.pad(log_probs, (0, data["loss_mask"].shape[1] - log_probs.shape[1]))
        behavior = data.get("logprobs")
        micro_batch = MicroBatch(
            log_probs,
            None if behavior is None else behavior.to(log_probs.device),
            data["advantages"].to(log_probs.device),
            data["loss_mask"].to(log_probs.device),
        )
        try:
            window = select_window([micro_batch], m2_threshold=self._m2_threshold, group=self._engine.data_parallel_group)
        except MissingBehaviorLogProbs as error:
            raise MissingBehaviorLogProbs(
                f"'logprobs' is not in the batch; expected the rollout's from the workflow ({error})"
            ) from None
        stats_tracker.scalar(**window.metrics())
        return window

    def _loss(self, window: Window, log_probs: Tensor, entropy: Tensor, data: dict[str, Any], **vocab: Tensor) -> Tensor:
        """Called as AReaL's grpo_loss_fn is, with a packed micro-batch. It returns a mean: the engine weighs it by the tokens."""
        whole, mask, behavior = window.selection, _valid(data), data["logprobs"]
        out = m2po_loss(
            log_probs,
            behavior,
            data["advantages"],
            mask,
            ratio_cap=self._ratio_cap,
            selection=Selection(data[_KEEP].bool(), whole.metrics, whole.m2_threshold, whole.scope),
            denominator=mask.count_nonzero(),
        )
        stats_tracker.denominator(n_tokens=infer_token_denominator(data, mask), n_valid_tokens=mask)
        stats_tracker.stat(
            new_logp=log_probs.detach(), old_logp=behavior, entropy=entropy.detach().float(), denominator="n_valid_tokens"
        )
        if vocab:
            stats_tracker.stat(**vocab, denominator="n_tokens")
        return out.loss


def _valid(data: dict[str, Any]) -> Tensor:
    """The tokens that are trained on: those with a behaviour log-prob."""
    return data["loss_mask"].bool() & ~data["logprobs"].isnan()
