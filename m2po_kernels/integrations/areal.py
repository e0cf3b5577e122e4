"""M2PO over whole optimizer batches in AReaL, by its own option `actor.m2_threshold`; see docs/integrations/areal.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import areal.engine
import torch
from areal.api.alloc_mode import ModelAllocation
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.trainer import PPOTrainer
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.ppo.stats import infer_token_denominator
from areal.utils import stats_tracker
from torch import Tensor

from m2po_kernels import M2Accumulator, Selection, m2po_loss
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs

from .common import MicroBatch, Window, check_version, select_window

# What an option must be with actor.m2_threshold, and why.
_ACTOR = {
    "use_sapo_loss": (False, "it is another loss"),
    "importance_sampling_level": ("token", "M2PO weighs each token by its own ratio"),
    "rejection_sampling": (None, "it would drop tokens that the selection has counted"),
    "enable_tree_training": (False, "a tree holds tokens once that the selection counts for each sequence"),
    "use_decoupled_loss": (False, "M2PO has no proximal policy"),
    "recompute_logprob": (False, "it puts recomputed log-probs in the place of the rollout's"),
    "eps_clip": (0.2, "M2PO selects tokens and clips nothing, so leave it out"),
    "eps_clip_higher": (None, "M2PO selects tokens and clips nothing, so leave it out"),
}
# What changes the distribution that is sampled from, and is not in the log-probs that are trained on.
_SAMPLER = {"greedy": False, "use_beam_search": False, "top_p": 1.0, "top_k": int(1e8), "frequency_penalty": 0.0}
# The selection travels with a mini-batch under this key: AReaL splits and packs each [B, T] tensor in it as it does the tokens.
_KEEP = "m2po_keep"


def register(*, scope: str = "quadrants") -> None:
    """Lets AReaL's PPOTrainer make its FSDP actors with M2PO: it takes areal.engine.FSDPPPOActor by name.

    A PPOTrainer whose configuration sets actor.m2_threshold for anything else is refused.
    scope: as in `select`. Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    M2Accumulator(scope=scope)  # raises now, not at the first step
    areal.engine.FSDPPPOActor = {actor.scope: actor for actor in (M2POFSDPPPOActor, M2POAllFSDPPPOActor)}[scope]
    PPOTrainer.__init__ = _make_trainer


_make_unchecked = PPOTrainer.__init__


@wraps(_make_unchecked)
def _make_trainer(self: PPOTrainer, config: Any, *args: Any, **kwargs: Any) -> None:
    _check_experiment(config)
    _make_unchecked(self, config, *args, **kwargs)


class M2POFSDPPPOActor(FSDPPPOActor):
    """AReaL's FSDP actor; with `actor.m2_threshold` set its PPO update is that of `M2POActor`."""

    scope = "quadrants"

    def __init__(self, config: Any):
        super().__init__(config)
        if config.m2_threshold is not None:
            self.actor = M2POActor(config, self, scope=self.scope)


class M2POAllFSDPPPOActor(M2POFSDPPPOActor):
    """With scope="all". It has a name of its own because that is all that the workers of a single controller are told."""

    scope = "all"


class M2POActor(PPOActor):
    """AReaL's PPO algorithm with the M2PO loss: one selection for each mini-batch, over its data-parallel ranks."""

    def __init__(self, config: Any, engine: Any, *, scope: str = "quadrants"):
        check_version("areal")
        _check_actor(config)
        settings = {"m2_threshold": config.m2_threshold, "scope": scope}
        super().__init__(config, _Engine(engine, settings, ratio_cap=config.c_clip))


def _check_actor(config: Any) -> None:
    if config.m2_threshold is None:
        raise InvalidArgument("actor.m2_threshold must be set, 0.04 in the paper; got None")
    M2Accumulator(m2_threshold=config.m2_threshold)  # checks it
    _check("actor.", config, _ACTOR)
    if config.c_clip is not None and not config.c_clip > 1:
        raise InvalidArgument(f"actor.c_clip must be > 1, as it caps the ratio, or None; got {config.c_clip!r}")


def _check_experiment(config: Any) -> None:
    actor, sampler = config.actor, config.gconfig
    if actor.m2_threshold is None:
        return
    backends = {name: ModelAllocation.from_str(getattr(config, name).backend, name=name).backend for name in ("actor", "rollout")}
    if backends["actor"] != "fsdp":
        raise InvalidArgument(
            "actor.backend must be fsdp with actor.m2_threshold, as the engines of others would do AReaL's own masking; got "
            f"{backends['actor']!r}"
        )
    _check_actor(actor)
    _check("", config, {"teacher": (None, "its loss is not added to M2PO's")})
    _check("gconfig.", sampler, {name: (x, "the log-probs that are trained on are without it") for name, x in _SAMPLER.items()})
    _check("gconfig.", sampler, {"temperature": (actor.temperature, "that is actor.temperature")})
    if backends["rollout"] == "vllm":
        _check("gconfig.", sampler, {"temperature": (1.0, "vLLM in AReaL reports the log-probs from before it")})


def _check(group: str, config: Any, expected: dict[str, tuple[Any, str]]) -> None:
    for name, (wanted, why) in expected.items():
        value = getattr(config, name)
        if value != wanted:
            raise InvalidArgument(f"{group}{name} must be {wanted!r} with actor.m2_threshold, as {why}; got {value!r}")


class _Engine:
    """The engine of a PPOActor, with M2PO in the place of the loss that `train_batch` is given."""

    def __init__(self, engine: Any, settings: dict[str, Any], *, ratio_cap: float | None):
        self._engine = engine
        self._settings = settings
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
        self._engine.eval()  # as AReaL does for log-probs
        # What it returns is for all tokens on each rank of a tensor, context or pipeline parallel group: those are replicas.
        log_probs = self._engine.forward(input_=data, aggregate_fn=lambda parts: torch.cat(parts, dim=-1))
        self._engine.train()
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
            window = select_window([micro_batch], group=self._engine.data_parallel_group, **self._settings)
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
