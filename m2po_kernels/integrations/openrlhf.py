"""M2PO in OpenRLHF's PPO trainer on Ray. An entry script calls `register()`; see docs/integrations/openrlhf.md."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import ray
import torch
from openrlhf.models.utils import masked_mean
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from torch import Tensor

from m2po_kernels import M2Accumulator, loss_scale, m2po_loss
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs

from .common import MicroBatch, Share, Window, check_version, select_window

_REPLACED = "M2PO takes the place of the correction, so leave it out"
# What each option must be, and why.
_EXPECTED = {
    "actor.policy_loss_type": ("ppo", "M2PO weighs each token by its own ratio"),
    "actor.loss_agg_mode": ("token-mean", "M2PO divides by the tokens of the optimizer step"),
    "actor.eps_clip_low_high": ((0.2, 0.2), "M2PO selects tokens and clips nothing, so leave it and actor.eps_clip out"),
    "algo.advantage.is_correction_mode": ("mask", _REPLACED),
    "algo.advantage.is_correction_gating": ("ratio", _REPLACED),
    "algo.advantage.is_correction_threshold": ((0.5, 5.0), _REPLACED),
    "rollout.top_p": (1.0, "the log-probs that are trained on are without it"),
    "train.dynamic_batch_enable": (False, "its optimizer steps are not fetched whole"),
}


def register(*, m2_threshold: float = 0.04, scope: str = "quadrants") -> None:
    """Lets `openrlhf.cli.train_ppo_ray` train its actor with M2PO, if that module is run after this call, in this process.

    It takes PolicyModelActor from openrlhf.trainer.ray.ppo_actor by name, so this puts ours there.
    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    M2Accumulator(m2_threshold=m2_threshold, scope=scope)  # raises now, not at the first step
    parent = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class  # Ray refuses to inherit from what ray.remote returns

    # Made here, so that Ray sends it to the workers by value, with m2_threshold and scope.
    class M2POPolicyModelActor(parent):  # type: ignore[valid-type, misc]
        def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            ppo_actor.ActorPPOTrainer = partial(M2POTrainer, m2_threshold=m2_threshold, scope=scope)  # in this worker alone
            return super().init_model_from_pretrained(*args, **kwargs)

    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(M2POPolicyModelActor)


def _check_options(options: Any) -> None:
    for path, (wanted, why) in _EXPECTED.items():
        value = attrgetter(path)(options)
        value = tuple(value) if isinstance(value, list) else value
        if value != wanted:
            raise InvalidArgument(f"--{path} must be {wanted!r} for M2PO, as {why}; got {value!r}")
    if options.algo.advantage.is_correction_level != "token":
        error = MissingBehaviorLogProbs if options.algo.advantage.is_correction_level == "off" else InvalidArgument
        raise error(
            "--algo.advantage.is_correction_level must be 'token' for M2PO: if it is 'off' vLLM is not asked for log-probs (the "
            f"correction itself is replaced by M2PO); got {options.algo.advantage.is_correction_level!r}"
        )
    samples = options.rollout.batch_size * options.rollout.n_samples_per_prompt
    if samples % options.train.batch_size:
        raise InvalidArgument(
            f"--train.batch_size must divide rollout.batch_size * rollout.n_samples_per_prompt = {samples} for M2PO, or "
            f"DeepSpeed mixes two rollouts in one optimizer step; got {options.train.batch_size}"
        )


class _Buffer(NaiveReplayBuffer):
    """Notes what was fetched: the trainer fetches all micro-batches of an optimizer step before it trains on the first."""

    fetched: list[Any]

    def collate_fn(self, batch: Any) -> Any:
        experience = super().collate_fn(batch)
        self.fetched.append(experience)
        return experience


class M2POTrainer(ppo_actor.ActorPPOTrainer):
    """OpenRLHF's actor trainer with the M2PO loss: one selection for each optimizer step, over its data-parallel ranks."""

    replay_buffer: Any

    def __init__(self, strategy: Any, *args: Any, m2_threshold: float = 0.04, scope: str = "quadrants", **kwargs: Any):
        check_version("openrlhf")
        _check_options(strategy.args)
        super().__init__(strategy, *args, **kwargs)
        self._settings: dict[str, Any] = {"m2_threshold": m2_threshold, "scope": scope}
        plain = self.replay_buffer
        self.replay_buffer = _Buffer(plain.sample_batch_size, plain.limit, plain.cpu_offload, plain.packing_samples)
        self.replay_buffer.fetched = []
        self.actor_loss_fn = self._loss
        self._fresh = True
        self._window: Window | None = None
        self._share: Share | None = None
        self._metrics: dict[str, Tensor] = {}

    @property
    def _ranks(self) -> Any:
        """Those with different samples; ranks of ring attention or tensor parallelism hold the same log-probs."""
        return self.strategy.ds_device_mesh["dp"]

    @property
    def _accumulated(self) -> int:
        return max(int(self.strategy.accumulated_gradient), 1)

    def ppo_train(self, kl_ctl: float) -> Any:
        found = len(self.replay_buffer) // self.replay_buffer.sample_batch_size % self._accumulated
        if found:
            raise InvalidArgument(
                "--train.batch_size must divide the samples of every rollout, or DeepSpeed mixes two rollouts in one optimizer "
                f"step; the last step of this rollout has {found} of {self._accumulated} micro-batches"
            )
        self._fresh = True  # the weights are those that the action_log_probs of the buffer were computed with
        self.replay_buffer.fetched.clear()
        return super().ppo_train(kl_ctl)

    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: dict[str, Any] | None = None) -> Any:
        if step % self._accumulated == 0:
            self._select()
        assert self._window is not None
        self._share = self._window.shares[step % self._accumulated]
        experience.info.update(self._metrics)  # which the parent logs
        return super().training_step(experience, kl_ctl, step, loss_batch_info)

    def _select(self) -> None:
        """Makes the window of the optimizer step that begins here."""
        experiences, self.replay_buffer.fetched = self.replay_buffer.fetched, []
        device = experiences[0].sequences.device  # the first is where the model is
        try:
            window = select_window((self._micro_batch(e, device) for e in experiences), group=self._ranks, **self._settings)
        except MissingBehaviorLogProbs as error:
            raise MissingBehaviorLogProbs(
                "rollout_log_probs is None; expected --algo.advantage.is_correction_level token, and of an agent log-probs for "
                f"each action token ({error})"
            ) from None
        self._window, self._fresh = window, False
        # Not the cut: OpenRLHF averages over the steps of a rollout, and takes 0 where a step has none.
        self._metrics = {name: torch.tensor(value) for name, value in window.metrics().items() if name != "m2/cut"}

    @torch.no_grad()
    def _micro_batch(self, experience: Any, device: torch.device) -> MicroBatch:
        """Only what the selection needs goes to the device, one micro-batch at a time."""
        log_probs, advantages, mask = (
            t.to(device) for t in (experience.action_log_probs, experience.advantages, experience.action_mask)
        )
        rollout = None if experience.rollout_log_probs is None else experience.rollout_log_probs.to(device)
        if not self._fresh:
            images = {}
            if experience.mm_train_inputs and getattr(self.actor, "is_vlm", False):
                images = merge_mm_train_inputs(experience.mm_train_inputs, device)
            self.actor.eval()  # as OpenRLHF does for log-probs
            log_probs = self.actor(
                experience.sequences.to(device),
                mask,
                attention_mask=experience.attention_mask.to(device),
                ring_attn_group=self.strategy.ring_attn_group,
                **images,
            )
            self.actor.train()
        return MicroBatch(log_probs, rollout, advantages, mask)

    def _loss(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, action_mask: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Called as OpenRLHF's PolicyLoss is. In the place of PPO's clip fraction it returns that of the dropped tokens."""
        assert self._window is not None
        assert self._share is not None
        out = m2po_loss(
            log_probs,
            self._share.behavior_log_probs,
            advantages,
            self._share.mask,
            ratio_cap=self.args.actor.dual_clip,
            selection=self._window.selection,
            part=self._share.part,
        )
        loss = out.loss * loss_scale(self._ranks, micro_batches=self._accumulated)  # DeepSpeed divides by both
        return (
            loss,
            out.metrics.masked_fraction,
            masked_mean((old_log_probs - log_probs).detach(), action_mask, dim=None),
            None,
            None,
        )
