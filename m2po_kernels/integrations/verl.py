"""M2PO in verl: the policy loss "m2po", its options, and engines that select over a mini-batch before they train on it.

A policy loss of verl sees one micro-batch; its engine's `train_batch` gets the batch of one optimizer step.
docs/integrations/verl.md
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine, EngineRegistry, MegatronEngineWithLMHead

from m2po_kernels.errors import InvalidArgument
from m2po_kernels.integrations.common import check_sampler, check_version
from m2po_kernels.integrations.verl_head import LinearHeadEngine, asked_for
from m2po_kernels.integrations.verl_step import ROWS, VENDOR, Step, current_step

# Of other losses: M2PO selects tokens, and clips, smooths and penalizes nothing.
_UNUSED_OF_ACTOR = (
    "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "loss_scale_factor",
)  # fmt: skip
_UNUSED_OF_POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")


@dataclass
class M2POPolicyLossConfig(PolicyLossConfig):
    """`actor.policy_loss` with `_target_: m2po_kernels.integrations.verl.M2POPolicyLossConfig`.

    m2_threshold, scope: as in `m2po_kernels.m2po_loss`.
    rollout_correction, rollout: give them `${algorithm.rollout_correction}` and `${actor_rollout_ref.rollout}`. A loss sees no
        other part of the configuration, and must know whether the old log-probs that it gets are those of the rollout engine,
        and of which distribution.
    """

    m2_threshold: float = 0.04
    scope: str = "quadrants"
    rollout: Any = None

    def __post_init__(self) -> None:
        if self.loss_mode != "m2po":
            raise InvalidArgument(f"actor.policy_loss.loss_mode must be m2po with this _target_; got {self.loss_mode}")
        if not self.rollout_correction.get("bypass_mode"):
            raise InvalidArgument(
                "actor.policy_loss.rollout_correction.bypass_mode is not True: old_log_probs would be recomputed ones; set "
                "algorithm.rollout_correction.bypass_mode=True and "
                "+actor_rollout_ref.actor.policy_loss.rollout_correction='${algorithm.rollout_correction}'"
            )
        for name in ("rollout_is", "rollout_rs"):
            if self.rollout_correction.get(name) is not None:
                raise InvalidArgument(
                    f"algorithm.rollout_correction.{name} must be null: M2PO corrects by the ratio itself and drops tokens "
                    f"itself; got {self.rollout_correction.get(name)}"
                )
        if self.rollout is None:
            raise InvalidArgument(
                "actor.policy_loss.rollout must be the options of the rollout, as some of them make another distribution of it; "
                "set +actor_rollout_ref.actor.policy_loss.rollout='${actor_rollout_ref.rollout}'"
            )
        check_sampler(self.rollout, "actor_rollout_ref.rollout")
        if self.rollout.get("name") == "vllm" and self.rollout.get("logprobs_mode") != "processed_logprobs":
            raise InvalidArgument(
                "actor_rollout_ref.rollout.logprobs_mode must be processed_logprobs with M2PO, those of the distribution that is "
                f"sampled from; got {self.rollout.get('logprobs_mode')}"
            )
        _warn_of_unused(self, PolicyLossConfig, _UNUSED_OF_POLICY_LOSS, "policy_loss.")


def _warn_of_unused(config: Any, declared: type, names: tuple[str, ...], prefix: str = "") -> None:
    """Names, once, the options of other losses that are set to something else than verl's default."""
    defaults = {field.name: field.default for field in fields(declared)}
    changed = [f"{prefix}{name}={config.get(name)}" for name in names if config.get(name) != defaults[name]]
    if changed:
        _warn_once(f"actor_rollout_ref.actor: {', '.join(changed)} has no effect with M2PO, which selects tokens and clips none")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@register_policy_loss("m2po")
def m2po_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's policy loss "m2po"; the arguments are verl's. KL and entropy terms are added by verl."""
    options = config.policy_loss
    if not isinstance(options, M2POPolicyLossConfig):
        raise InvalidArgument(
            "actor.policy_loss._target_ must be m2po_kernels.integrations.verl.M2POPolicyLossConfig with loss_mode=m2po; "
            f"got {type(options).__module__}.{type(options).__qualname__}"
        )
    if loss_agg_mode != "token-mean":
        raise InvalidArgument(f"actor.loss_agg_mode must be token-mean, the paper's denominator, with M2PO; got {loss_agg_mode}")
    if rollout_is_weights is not None:
        raise InvalidArgument(
            "rollout_is_weights are in the batch: set algorithm.rollout_correction.rollout_is=null, as M2PO has the ratio already"
        )
    _warn_of_unused(config, ActorConfig, _UNUSED_OF_ACTOR)
    return current_step().loss(
        log_prob, old_log_prob, advantages, response_mask, m2_threshold=options.m2_threshold, scope=options.scope
    )


class _SelectingEngine(BaseEngine):
    """What turns an engine of verl into one that selects over the mini-batch of an optimizer step before it trains on it."""

    def __init__(self, *args: Any, **kwargs: Any):
        check_version("verl")
        super().__init__(*args, **kwargs)

    def train_batch(self, data: Any, loss_function: Callable) -> Any:
        data = data.copy()  # shallow: what is added is for this step alone
        data[ROWS] = torch.arange(len(data))
        has_behavior = {"old_log_probs", "rollout_log_probs"} <= set(data.keys())
        if not has_behavior:  # this rank, too, must come to where all raise, and verl's loss functions read the field
            data["old_log_probs"] = torch.zeros_like(data["response_mask"], dtype=torch.float32)
        step = Step(loss_function, scale=self.get_data_parallel_size(), has_behavior=has_behavior)
        without_gradient = data.copy()
        tu.assign_non_tensor(without_gradient, calculate_entropy=False, calculate_sum_pi_squared=False)
        self.infer_batch(without_gradient, step)
        if self._has_losses():
            step.select(self.get_data_parallel_group(), self._replicas())
        return super().train_batch(data, step)

    def _has_losses(self) -> bool:
        """Whether the loss function is called on this rank."""
        return True

    def _replicas(self) -> Any:
        """The ranks that compute the same log-probs as this one, for M2PO_CHECK=1."""
        return None


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=VENDOR)
class M2POFSDPEngine(_SelectingEngine, LinearHeadEngine):
    def _replicas(self) -> Any:
        return self.ulysses_parallel_group  # each of them gathers the log-probs of whole sequences


if MegatronEngineWithLMHead is not None:
    from megatron.core import parallel_state

    @EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor=VENDOR)
    class M2POMegatronEngine(_SelectingEngine, MegatronEngineWithLMHead):
        def __init__(self, model_config: Any, *args: Any, **kwargs: Any):
            if asked_for(model_config):
                raise InvalidArgument(
                    "actor_rollout_ref.model.fused_kernel_options.impl_backend must not be m2po with actor.strategy=megatron, "
                    "whose engine has no place for another head; got m2po"
                )
            super().__init__(model_config, *args, **kwargs)

        def train_batch(self, data: Any, loss_function: Callable) -> Any:
            if self.engine_config.dynamic_context_parallel:
                raise InvalidArgument(
                    "actor.megatron.dynamic_context_parallel must be False with M2PO: with it, which ranks hold the same tokens "
                    "changes from one micro-batch to the next; got True"
                )
            return super().train_batch(data, loss_function)

        def _has_losses(self) -> bool:
            return parallel_state.is_pipeline_last_stage(ignore_virtual=True)
