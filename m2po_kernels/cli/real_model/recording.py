"""Rollouts of a model, and their log-probs under it after some updates: what a file of `m2po collect` holds."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor

from ... import __version__, linear_log_probs, linear_m2po_loss
from ..shared import CliError
from . import task
from .model import LanguageModel, Sequences, completion_hidden
from .sampling import sample

SCORED_AT_ONCE = 32  # sequences; bounds the activations

Report = Callable[[str, float], None]  # what is going on, and the fraction of it that is done


@dataclass(frozen=True)
class Settings:
    """What to sample and how to update; the defaults are those of the bundled file."""

    prompts: int = 24
    samples: int = 8
    max_new_tokens: int = 48
    temperature: float = 1.0
    staleness: tuple[int, ...] = (1, 4, 16)
    learning_rate: float = 2e-5
    batch: int = 16
    m2_threshold: float = float("inf")
    seed: int = 0


class Rollouts(NamedTuple):
    """Sampled sequences with what the loss needs of them: behavior_log_probs [B, T], rewards and advantages [B], all fp32."""

    sequences: Sequences
    behavior_log_probs: Tensor
    rewards: Tensor
    advantages: Tensor

    def rows(self, index: Tensor) -> Rollouts:
        """Some of them."""
        return Rollouts(self.sequences.rows(index), *(tensor[index] for tensor in self[1:]))


def record(loaded: LanguageModel, settings: Settings, report: Report) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a rollout file. Updates the model's weights as it goes."""
    rollouts = roll_out(loaded, settings, report)
    sequences = rollouts.sequences
    tensors = {
        "behavior_log_probs": rollouts.behavior_log_probs,
        "advantages": rollouts.advantages,
        "rewards": rollouts.rewards,
        "token_ids": sequences.token_ids.int(),
        "mask": sequences.mask.to(torch.uint8),
        "prompt_ids": sequences.prompt_ids.int(),
        "prompt_mask": sequences.prompt_mask.to(torch.uint8),
    }
    with torch.autocast(loaded.head.device.type, torch.bfloat16):
        tensors["log_probs_bf16_step0"] = score(loaded, sequences, settings.temperature, _part(report, "scoring in bf16"))
    step, last = 0, max(settings.staleness)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    batches = training_batches(rollouts.advantages, settings.batch, settings.seed)
    for wanted in sorted(settings.staleness):
        while step < wanted:
            report(f"update {step + 1} of {last}", step / last)
            update(loaded, optimizer, rollouts.rows(next(batches)), settings)
            step += 1
        tensors[f"log_probs_step{step}"] = score(loaded, sequences, settings.temperature, _part(report, f"scoring, step {step}"))
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, _metadata(loaded, settings)


def roll_out(loaded: LanguageModel, settings: Settings, report: Report) -> Rollouts:
    """Samples and rewards them. Raises CliError where no group has an advantage, as nothing could be learnt from that."""
    asked = task.problems(settings.prompts, settings.seed)
    prompts = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
        )
        for problem in asked
    ]
    sampled = sample(
        loaded,
        prompts,
        settings.samples,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        advance=_part(report, "sampling"),
    )
    sequences = sampled.sequences
    texts = [
        loaded.tokenizer.decode(ids[valid], skip_special_tokens=True)
        for ids, valid in zip(sequences.token_ids, sequences.mask, strict=True)
    ]
    answers = [problem.answer for problem in asked for _ in range(settings.samples)]
    rewards = torch.tensor([task.reward(text, answer) for text, answer in zip(texts, answers, strict=True)])
    advantages = task.group_advantages(rewards, settings.samples)
    if not bool(advantages.any()):
        raise CliError(
            f"no group has both right and wrong answers ({int(rewards.sum())} of {len(rewards)} are right), so there is no "
            "advantage to update on: raise --prompts or --samples, or change --seed"
        )
    device = loaded.head.device
    return Rollouts(sequences, sampled.log_probs, rewards.to(device), advantages.to(device))


@torch.no_grad()
def score(
    loaded: LanguageModel, sequences: Sequences, temperature: float, advance: Callable[[float], None] = lambda fraction: None
) -> Tensor:
    """Log-probs [B, T] fp32 of the completions under the current weights; 0 where not valid."""
    pieces: list[Tensor] = []
    total = len(sequences.mask)
    for start in range(0, total, SCORED_AT_ONCE):
        part = sequences.rows(slice(start, start + SCORED_AT_ONCE))
        hidden = completion_hidden(loaded.model, part)
        log_probs = linear_log_probs(hidden, loaded.head, part.token_ids, mask=part.mask, temperature=temperature)
        assert isinstance(log_probs, Tensor)  # no entropy was asked for
        pieces.append(log_probs)
        advance(min(start + SCORED_AT_ONCE, total) / total)
    return torch.cat(pieces)


def update(loaded: LanguageModel, optimizer: torch.optim.Optimizer, rollouts: Rollouts, settings: Settings) -> None:
    """One optimizer step on these rollouts."""
    hidden = completion_hidden(loaded.model, rollouts.sequences)
    out = linear_m2po_loss(
        hidden,
        loaded.head,
        rollouts.sequences.token_ids,
        rollouts.behavior_log_probs,
        rollouts.advantages,
        rollouts.sequences.mask,
        temperature=settings.temperature,
        m2_threshold=settings.m2_threshold,
    )
    optimizer.zero_grad(set_to_none=True)
    out.loss.backward()
    optimizer.step()


def training_batches(advantages: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of `size` sequences, for ever: the sequences with an advantage, shuffled anew each time all were used."""
    useful = advantages.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    waiting = useful[:0]
    while True:
        while len(waiting) < size:
            order = torch.randperm(len(useful), generator=generator)
            waiting = torch.cat([waiting, useful[order.to(useful.device)]])
        yield waiting[:size]
        waiting = waiting[size:]


def _part(report: Report, label: str) -> Callable[[float], None]:
    return lambda fraction: report(label, fraction)


def _metadata(loaded: LanguageModel, settings: Settings) -> dict[str, str]:
    """How the file was made; strings alone, as safetensors wants them."""
    region = "without a trust region" if settings.m2_threshold == float("inf") else f"M2 threshold {settings.m2_threshold:g}"
    return {
        "model": loaded.name,
        "prompts": f"{settings.prompts} {task.DESCRIPTION}, {settings.samples} samples each, "
        f"temperature {settings.temperature:g}, at most {settings.max_new_tokens} tokens",
        "behavior": "log-softmax in fp32 of the sampling model, recorded while it sampled with a key-value cache",
        "rewards": "1 if the last number of the completion is the right answer, else 0",
        "advantages": "(reward - group mean) / (group std + 1e-6); 0 where a group agrees",
        "log_probs_bf16_step0": "the same weights under bf16 autocast",
        "log_probs_stepK": f"after K AdamW updates (lr {settings.learning_rate:g}, {settings.batch} sequences with an advantage, "
        f"ratio objective {region})",
        "settings": json.dumps({**asdict(settings), "m2_threshold": str(settings.m2_threshold)}),
        "versions": f"m2po-kernels {__version__}, torch {torch.__version__}, transformers {version('transformers')}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
