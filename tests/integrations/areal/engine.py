"""AReaL's own FSDP engine and PPO actor on a CPU: its splitting, packing, log-probs, losses and their weights.

Not its FSDP: a rank holds all weights, and gradients are averaged over the ranks by hand.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from areal.api.cli_args import MicroBatchSpec, PPOActorConfig
from transformers import Qwen2Config

from m2po_kernels.integrations.areal import M2POFSDPPPOActor

VOCABULARY = 40
NOISE = 0.4


class Bigrams(torch.nn.Module):
    """A language model that looks at one token: packed sequences need FlashAttention to be kept apart, which has no CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, VOCABULARY)
        )

    def forward(self, input_ids: torch.Tensor, **ignored: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layers(input_ids))


def config(folder: Path, **changed: Any) -> PPOActorConfig:
    Qwen2Config(vocab_size=VOCABULARY).save_pretrained(folder)
    plain = {
        "experiment_name": "test",
        "trial_name": "test",
        "path": str(folder),
        "backend": "fsdp:d1",
        "m2_threshold": 0.04,
        "use_decoupled_loss": False,
        "recompute_logprob": False,
        "kl_ctl": 0.0,
        "ppo_n_minibatches": 2,
        "mb_spec": MicroBatchSpec(n_mbs=1),
    }
    return PPOActorConfig(**{**plain, **changed})


class Engine(M2POFSDPPPOActor):
    """Notes what each optimizer step was given, and the gradient before it."""

    def __init__(self, made: PPOActorConfig, scope: str = "quadrants"):
        self.scope = scope
        super().__init__(made)
        self.model = Bigrams()
        self.device = torch.device("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.dp_group = dist.group.WORLD
        self.parallel_helper = SimpleNamespace(dp_size=dist.get_world_size(), sp_size=1, tp_size=1)
        self.logger = logging.getLogger("engine")
        self.batches: list[dict[str, torch.Tensor]] = []
        self.n_micro_batches: list[int] = []
        self.in_training: list[tuple[str, bool]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def train_batch(self, input_: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        self.in_training.append(("train_batch", self.model.training))
        self.batches.append({name: input_[name].clone() for name in ("input_ids", "logprobs", "loss_mask", "advantages")})
        stats = super().train_batch(input_, loss_fn, loss_weight_fn)
        self.n_micro_batches.append(int(stats["num_micro_batches"]))
        return stats

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.in_training.append(("forward", self.model.training))
        return super().forward(*args, **kwargs)

    def optimizer_step(self) -> dict[str, float]:
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters()})
        self.optimizer.step()
        return {}


def trajectories(engine: Engine, n: int, *, seed: int) -> list[dict[str, Any]]:
    """As a workflow returns them: log-probs of a stale engine, each at its token's own place, and rewards of both signs."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        prompt, length = 3, int(torch.randint(8, 16, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (1, length), generator=generator)
        with torch.no_grad():
            log_probs = engine.model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        noisy = log_probs + NOISE * torch.randn(log_probs.shape, generator=generator)
        loss_mask = torch.ones_like(ids)
        loss_mask[:, :prompt] = 0
        made.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "loss_mask": loss_mask,
                "logprobs": torch.cat([torch.zeros(1, 1), noisy], dim=1) * loss_mask,
                "versions": torch.zeros_like(ids),
                "rewards": torch.tensor([(-1.0) ** i * (0.5 + torch.rand((), generator=generator))]),
            }
        )
    return made


def run(
    folder: Path,
    samples: int = 8,
    *,
    seed: int = 1,
    unscored: bool = False,
    missing: bool = False,
    scope: str = "quadrants",
    **changed: Any,
) -> Engine:
    """A PPO update as AReaL's trainer asks for it."""
    engine = Engine(config(folder, **changed), scope)
    data = engine.compute_advantages(trajectories(engine, samples, seed=seed + 100 * dist.get_rank()))
    for trajectory in data:
        if unscored:
            trajectory["logprobs"][:, 4] = torch.nan
        if missing:
            del trajectory["logprobs"]
    engine.ppo_update(data)
    return engine
