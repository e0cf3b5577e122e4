"""A tiny model, its tokenizer, rollouts that are stale on purpose, and a trainer that keeps what it trained on."""

from __future__ import annotations

import hashlib
from typing import Any

import qwen2
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback

from m2po_kernels.integrations.trl import M2POConfig, M2POTrainer

TAU = 0.04
STALENESS = 0.4  # standard deviation of behaviour log-probs around the current ones


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model() -> Qwen2ForCausalLM:
    return qwen2.tiny(98)


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) + 0.01 * len(text) for text in completions]


def tied(completions: list[str], **_: Any) -> list[float]:
    """The same for all four completions of every other prompt, which then have no advantage."""
    return [float(i % 4) * (i % 8 < 4) for i in range(len(completions))]


def rollout(prompts: list[str], trainer: M2POTrainer) -> dict[str, Any]:
    """Completions that depend on prompt, place, step and rank alone, so that a restarted run sees the same ones."""
    tokens = trainer.processing_class
    result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for place, prompt in enumerate(prompts):
        seed = f"{prompt} {place} {trainer.state.global_step} {trainer.accelerator.process_index}"
        generator = torch.Generator().manual_seed(int(hashlib.md5(seed.encode()).hexdigest()[:8], 16))
        ids = tokens(prompt).input_ids
        n = int(torch.randint(3, 9, (1,), generator=generator))
        completion = torch.randint(3, len(tokens), (n,), generator=generator)
        with torch.no_grad():
            policy = trainer.accelerator.unwrap_model(trainer.model)
            logits = policy(torch.tensor([ids + completion.tolist()])).logits[0, len(ids) - 1 : -1]
        scaled = logits.float() / trainer.temperature
        current = scaled.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        result["prompt_ids"].append(ids)
        result["completion_ids"].append(completion.tolist())
        result["logprobs"].append((current + STALENESS * torch.randn(n, generator=generator)).tolist())
    return result


def turns(prompts: list[str], trainer: M2POTrainer) -> dict[str, Any]:
    """The same with tokens of an environment amid each completion, which the policy did not sample."""
    result = rollout(prompts, trainer)
    result["env_mask"] = [[int(i % 3 != 1) for i in range(len(ids))] for ids in result["completion_ids"]]
    for row, given in zip(result["logprobs"], result["env_mask"], strict=True):
        row[:] = [x if own else 0.0 for x, own in zip(row, given, strict=True)]
    return result


def unscored(prompts: list[str], trainer: M2POTrainer) -> dict[str, Any]:
    """The same with a token in each completion for which the engine gave NaN; TRL hands that on as None."""
    result = rollout(prompts, trainer)
    for row in result["logprobs"]:
        row[1] = None
    return result


def config(out: str, layout: tuple[int, int, int, int] = (4, 2, 2, 1), steps: int = 3, **options: Any) -> M2POConfig:
    """layout: per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation, num_iterations."""
    batch, accumulation, per_generation, iterations = layout
    given = {
        "output_dir": out, "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation, "num_iterations": iterations, "num_generations": 4,
        "max_completion_length": 8, "max_steps": steps, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False,
        "save_strategy": "no", "learning_rate": 1e-2, "max_grad_norm": 0.0, "optim": "sgd", "disable_tqdm": True,
        "gradient_checkpointing": False, "m2_threshold": TAU,
    }  # fmt: skip
    return M2POConfig(**given | options)


class Recorded(M2POTrainer):
    """Keeps each micro-batch of an optimizer step, and checks the gradient that the step is about to use."""

    def __init__(
        self, args: M2POConfig, check: Any = None, rollout_func: Any = rollout, policy: Any = None, rewards: Any = reward,
        **kwargs: Any,
    ):  # fmt: skip
        super().__init__(
            model() if policy is None else policy, rewards, args, train_dataset=dataset(), processing_class=tokenizer(),
            rollout_func=rollout_func, **kwargs,
        )  # fmt: skip
        self.seen: list[dict[str, Any]] = []
        if check is not None:
            self.add_callback(_BeforeStep(self, check))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.model.training:
            self.seen.append(inputs)
        return super()._compute_loss(model, inputs)


class _BeforeStep(TrainerCallback):
    def __init__(self, trainer: Recorded, check: Any):
        self.trainer, self.check = trainer, check

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.check(self.trainer, self.trainer.seen)
        self.trainer.seen = []


def gradient(policy: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters()]).double()
