"""verl's own actor worker without Ray: configured, fed as its trainers feed it, and watched before each optimizer step."""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import verl
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from tiny import Sequence
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding

# What docs/integrations/verl.md says to set.
M2PO = (
    "algorithm.rollout_correction.bypass_mode=True",
    "actor_rollout_ref.actor.policy_loss._target_=m2po_kernels.integrations.verl.M2POPolicyLossConfig",
    "actor_rollout_ref.actor.policy_loss.loss_mode=m2po",
    "+actor_rollout_ref.actor.policy_loss.m2_threshold=0.04",
    "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}",
    "+actor_rollout_ref.actor.policy_loss.rollout=${actor_rollout_ref.rollout}",
)
# What it says to set for log-probs from hidden states.
HEAD = (
    "actor_rollout_ref.model.use_fused_kernels=True",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend=m2po",
)
COEFFICIENTS = {"kl": 0.3, "entropy": 0.2}
TERMS = (
    "actor_rollout_ref.actor.use_kl_loss=True",
    f"actor_rollout_ref.actor.kl_loss_coef={COEFFICIENTS['kl']}",
    f"actor_rollout_ref.actor.entropy_coeff={COEFFICIENTS['entropy']}",
)
_SMALL = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.total_training_steps=100",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "++actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
)


@dataclass
class Step:
    """The weights before an optimizer step, and the gradient that it takes."""

    weights: dict[str, torch.Tensor]
    gradient: dict[str, torch.Tensor]


def join(rank: int, size: int, store: pathlib.Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def compose(model_path: str, *overrides: str, m2po: tuple[str, ...] = M2PO):
    """The configuration of verl's main_ppo with these command line arguments, resolved as it does."""
    folder = pathlib.Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = hydra_compose(
            "ppo_trainer", overrides=[*m2po, *_SMALL, f"actor_rollout_ref.model.path={model_path}", *overrides]
        )
    OmegaConf.resolve(config)
    return config


def make_actor(config) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    watch(worker.actor.engine)
    return worker


def watch(engine) -> None:
    """Keeps weights and gradient of each optimizer step in engine.steps."""
    step, engine.steps = engine.optimizer_step, []

    def whole(tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    def watched():
        parameters = dict(engine.module.named_parameters())
        engine.steps.append(Step({n: whole(p) for n, p in parameters.items()}, {n: whole(p.grad) for n, p in parameters.items()}))
        return step()

    engine.optimizer_step = watched


def restart(worker: ActorRolloutRefWorker) -> None:
    """Weights and optimizer as at the beginning."""
    worker.actor.reset()
    worker.actor.engine.steps.clear()


def _nested(tensors):
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)


def nested_batch(sequences: list[Sequence], *, reference: bool = False) -> TensorDict:
    """As verl's main_ppo hands it to its workers: everything nested. reference: with the rollout policy as reference policy."""
    whole = [torch.cat([s.prompt, s.response]) for s in sequences]
    fields = {
        "input_ids": _nested(whole),
        "position_ids": _nested(torch.arange(len(tokens)) for tokens in whole),
        "prompts": _nested(s.prompt for s in sequences),
        "responses": _nested(s.response for s in sequences),
        "response_mask": _nested(s.mask.long() for s in sequences),
        "advantages": _nested(s.advantages for s in sequences),
        "rollout_log_probs": _nested(s.behavior for s in sequences),
        "old_log_probs": _nested(s.behavior for s in sequences),
    }
    if reference:
        fields["ref_log_prob"] = fields["old_log_probs"]
    return TensorDict({**fields, "loss_mask": fields["response_mask"]}, batch_size=[len(sequences)])


def padded_batch(sequences: list[Sequence]) -> TensorDict:
    """As verl's main_ppo_v0 and Trinity-RFT hand it to their workers: prompts padded left, the rest right."""
    n, prompt, response = len(sequences), max(len(s.prompt) for s in sequences), max(len(s.response) for s in sequences)
    fields = {
        "input_ids": torch.zeros(n, prompt + response, dtype=torch.long),
        "attention_mask": torch.zeros(n, prompt + response, dtype=torch.long),
        "response_mask": torch.zeros(n, response, dtype=torch.long),
        "advantages": torch.zeros(n, response),
        "rollout_log_probs": torch.zeros(n, response),
    }
    for i, s in enumerate(sequences):
        there = slice(prompt - len(s.prompt), prompt + len(s.response))
        fields["input_ids"][i, there] = torch.cat([s.prompt, s.response])
        fields["attention_mask"][i, there] = 1
        for name, value in [("response_mask", s.mask), ("advantages", s.advantages), ("rollout_log_probs", s.behavior)]:
            fields[name][i, : len(s.response)] = value
    fields["position_ids"] = (fields["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    fields["prompts"], fields["responses"] = fields["input_ids"][:, :prompt], fields["input_ids"][:, prompt:]
    fields["old_log_probs"] = fields["rollout_log_probs"].clone()
    return left_right_2_no_padding(TensorDict(fields, batch_size=[n]))


def update(
    worker: ActorRolloutRefWorker,
    batch: TensorDict,
    *,
    mini_batch: int,
    epochs: int = 1,
    entropy: bool = False,
    temperature: float = 1.0,
    **layout,
) -> dict:
    """Optimizer steps over mini-batches of `mini_batch` sequences of all ranks; layout: how verl splits each. The metrics."""
    settings = {
        "temperature": temperature,
        "calculate_entropy": entropy,
        "distillation_use_topk": False,
        "distillation_only": False,
        "global_batch_size": mini_batch,
        "mini_batch_size": mini_batch,
        "epochs": epochs,
        "seed": 1,
        "dataloader_kwargs": {"shuffle": False},
    }
    tu.assign_non_tensor(batch, **settings, **layout)
    return tu.get(worker.update_actor(batch), "metrics")
