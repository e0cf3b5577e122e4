"""Trinity-RFT's side of a step: the loss from its configuration, the batch from its experiences."""

from __future__ import annotations

import logging
from typing import Any

import tiny
import torch
import workers
from tensordict import TensorDict
from transformers import PreTrainedModel
from trinity.algorithm import ENTROPY_LOSS_FN, KL_FN
from trinity.common.config import AlgorithmConfig
from trinity.common.experience import Experience
from trinity.trainer.verl.losses import TrinityPolicyLoss, build_trinity_loss
from trinity.trainer.verl.monkey_patch import left_right_2_no_padding
from trinity.trainer.verl.utils import to_data_proto

M2PO = "m2po_kernels.integrations.trinity.M2POPolicyLossFn"
LAYOUTS = {
    "one micro-batch": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 12},
    "micro-batches of 4": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4},
    "micro-batches of 1": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
}


def make_loss(policy_loss_fn: str = M2PO, **arguments: Any) -> TrinityPolicyLoss:
    return build_trinity_loss(
        AlgorithmConfig(
            policy_loss_fn=policy_loss_fn,
            policy_loss_fn_args=arguments,
            kl_loss_fn="none",
            kl_loss_fn_args=KL_FN.get("none").default_args(),
            entropy_loss_fn="none",
            entropy_loss_fn_args=ENTROPY_LOSS_FN.get("none").default_args(),
        )
    )


def make_batch(sequences: list[tiny.Sequence]) -> TensorDict:
    """Up to the call of update_actor as VERLTrainer.train_step does, with bypass_old_logprobs."""
    experiences = [
        Experience(
            tokens=torch.cat([s.prompt, s.response]),
            prompt_length=len(s.prompt),
            logprobs=s.behavior,
            advantages=s.advantages,
            action_mask=s.mask,
            reward=1.0,
        )
        for s in sequences
    ]
    batch = to_data_proto(experiences, pad_token_id=0, model=PreTrainedModel, logger=logging.getLogger(__name__))
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    return left_right_2_no_padding(batch.to_tensordict())


def share(model_path: str, rank: int) -> list[tiny.Sequence]:
    return tiny.rollouts(model_path, 12, seed=20 + rank)


def train(model_path: str, rank: int) -> dict[str, Any]:
    """A step over 24 sequences, half of them on this rank, in each layout."""
    actor, results = workers.make_actor(workers.compose(model_path, m2po=())), {}
    actor.actor.set_loss_fn(make_loss(m2_threshold=0.04))
    for name, layout in LAYOUTS.items():
        workers.restart(actor)
        workers.update(actor, make_batch(share(model_path, rank)), mini_batch=24, **layout)
        (results[name],) = actor.actor.engine.steps
    return results
