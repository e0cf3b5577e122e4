"""OpenRLHF's own trainer, buffer and model on a CPU, with a strategy that does to gradients what DeepSpeed does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils import Experience
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from m2po_kernels.integrations.openrlhf import M2POTrainer

NOISE = 0.4
VOCABULARY = 40


def arguments(**changed: Any) -> SimpleNamespace:
    """OpenRLHF's own defaults, as its train_ppo_ray parses them, but for what M2PO needs. changed: "group.option" -> value."""
    values = {
        "actor.eps_clip_low_high": (0.2, 0.2),
        "actor.dual_clip": None,
        "actor.loss_agg_mode": "token-mean",
        "actor.policy_loss_type": "ppo",
        "actor.aux_loss_coef": 0,
        "actor.entropy_coef": None,
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "algo.advantage.is_correction_threshold": [0.5, 5.0],
        "algo.kl.use_loss": False,
        "algo.kl.init_coef": 0.0,
        "algo.kl.estimator": "k3",
        "algo.kl.unbiased_gradient": False,
        "ds.packing_samples": False,
        "ds.tensor_parallel_size": 1,
        "rollout.batch_size": 12,
        "rollout.n_samples_per_prompt": 1,
        "rollout.top_p": 1.0,
        "train.batch_size": 6,
        "train.dynamic_batch_enable": False,
        "train.max_epochs": 1,
        "train.colocate_all": True,
        "train.async_enable": False,
        "vllm.sync_backend": "gloo",
        **changed,
    }
    args = SimpleNamespace()
    for path, value in values.items():
        *groups, name = path.split(".")
        at = args
        for group in groups:
            if not hasattr(at, group):
                setattr(at, group, SimpleNamespace())
            at = getattr(at, group)
        setattr(at, name, value)
    return args


class Strategy:
    """What the trainer uses of DeepspeedStrategy: losses divided by the accumulation, gradients averaged over the ranks."""

    ring_attn_group = None

    def __init__(self, args: Any, accumulated_gradient: int):
        self.args = args
        self.accumulated_gradient = accumulated_gradient
        self.ds_device_mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=("dp", "sp", "tp"))
        self.done = 0
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def is_rank_0(self) -> bool:
        return False  # no progress bar

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str) -> None:
        self.done += 1
        if self.done % self.accumulated_gradient:
            return
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()

    def get_grad_norm(self, model: Any) -> float:
        return 0.0

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        names = sorted(values)
        tensor = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        dist.all_reduce(tensor)
        return dict(zip(names, (tensor / dist.get_world_size()).tolist(), strict=True))


def actor() -> Actor:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    made = Actor(Qwen2ForCausalLM(config))
    made.packing_samples = False  # which it sets for a model that it loads itself
    return made


def experiences(model: Actor, n: int, *, seed: int, unscored: int = 0, missing: bool = False) -> Iterator[Experience]:
    """Rollouts of one sequence each, of different lengths, with current log-probs and those of a stale engine."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: tuple[int, ...] = (1,)) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    for _ in range(n):
        prompt, answer = int(integers(2, 5)), int(integers(4, 10))
        sequences = integers(1, VOCABULARY, (1, prompt + answer))
        attention_mask = torch.ones_like(sequences)
        action_mask = torch.zeros(1, prompt + answer - 1, dtype=torch.bool)
        action_mask[:, prompt - 1 :] = True
        with torch.no_grad():
            log_probs = model(sequences, action_mask, attention_mask=attention_mask)
        rollout = log_probs + NOISE * torch.randn(log_probs.shape, generator=generator)
        rollout[:, prompt - 1 : prompt - 1 + unscored] = torch.nan
        advantage = torch.randn((1, 1), generator=generator).expand_as(log_probs).clone()
        yield Experience(
            sequences=sequences,
            attention_mask=attention_mask,
            action_mask=action_mask,
            action_log_probs=log_probs,
            rollout_log_probs=None if missing else rollout,
            advantages=advantage,
            total_length=torch.tensor([float(prompt + answer)]),
            response_length=torch.tensor([float(answer)]),
            prompts=[""],
            labels=[""],
            images=[None],
            mm_train_inputs=[None],
            info={},
        )


@contextlib.contextmanager
def without_cuda(device: Any) -> Iterator[None]:
    """The trainer asks CUDA for its device; it gets this one."""
    with mock.patch("torch.cuda.current_device", return_value=device), mock.patch("torch.cuda.synchronize"):
        yield


def trainer(
    *, accumulated_gradient: int = 3, micro_batch: int = 2, m2_threshold: float = 0.04, **changed: Any
) -> tuple[M2POTrainer, Strategy]:
    strategy = Strategy(arguments(**changed), accumulated_gradient)
    model = actor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with without_cuda(0):  # the buffer makes a torch.device of its number, which nothing here uses
        made = M2POTrainer(
            strategy,
            model,
            ema_model=None,
            actor_optim=optimizer,
            actor_scheduler=schedule,
            micro_train_batch_size=micro_batch,
            buffer_cpu_offload=False,
            dataloader_pin_memory=False,
            m2_threshold=m2_threshold,
        )
    return made, strategy


class Run:
    """One ppo_train over a fresh buffer: what was trained on in each optimizer step, with the gradients."""

    def __init__(self, samples: int, *, seed: int = 1, unscored: int = 0, missing: bool = False, **options: Any):
        self.trainer, self.strategy = trainer(**options)
        made = self.trainer
        self.trained: list[Experience] = []
        self.forwards_in_training: list[bool] = []
        step = made.training_step

        def training_step(experience: Experience, *args: Any) -> Any:
            self.trained.append(experience)
            return step(experience, *args)

        made.training_step = training_step  # type: ignore[method-assign]
        made.actor.model.register_forward_pre_hook(lambda model, _: self.forwards_in_training.append(model.training))
        torch.manual_seed(seed)
        for experience in experiences(made.actor, samples, seed=seed + 100 * dist.get_rank(), unscored=unscored, missing=missing):
            made.replay_buffer.append(experience)
        with without_cuda(torch.device("cpu")):
            self.status = made.ppo_train(0.0)

    def windows(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        """For each optimizer step its micro-batches."""
        n = self.strategy.accumulated_gradient
        names = ("sequences", "attention_mask", "action_mask", "rollout_log_probs", "advantages")
        for i in range(0, len(self.trained), n):
            yield [{name: getattr(e, name) for name in names} for e in self.trained[i : i + n]]
