"""Samples completions with a key-value cache, as a rollout engine does, and keeps the log-probs it sampled from."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..shared import need
from .model import LanguageModel, Sequences


class Sampled(NamedTuple):
    """sequences; log_probs [B, T] fp32: of each token under the distribution it was drawn from, 0 where not valid."""

    sequences: Sequences
    log_probs: Tensor


@torch.no_grad()
def sample(
    loaded: LanguageModel,
    prompts: list[list[int]],
    samples: int,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    advance: Callable[[float], None] = lambda fraction: None,
) -> Sampled:
    """`samples` completions of each prompt, the rows of one prompt side by side; each ends with the end token or at the limit.

    Prompts of one length go together, so that nothing is padded. The same seed gives the same completions on the same machine.
    """
    rows, device = len(prompts) * samples, loaded.head.device
    width = max(map(len, prompts))
    prompt_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in zip(prompt_ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    token_ids = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
    log_probs = torch.zeros(rows, max_new_tokens, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    done = 0
    for length in sorted(set(lengths.tolist())):
        group = (lengths == length).nonzero().flatten()
        of = (group[:, None] * samples + torch.arange(samples)).flatten().to(device)
        first, part = done / len(prompts), len(group) / len(prompts)
        token_ids[of], log_probs[of] = _decode(
            loaded,
            prompt_ids[group, :length].to(device),
            samples,
            max_new_tokens,
            temperature,
            generator,
            _within(advance, first, part),
        )
        done += len(group)
    ends = token_ids == loaded.tokenizer.eos_token_id
    mask = ends.int().cumsum(1) - ends.int() == 0  # up to the first end token, which was sampled too
    prompt_mask = torch.arange(width) < lengths[:, None]
    sequences = Sequences(
        prompt_ids.repeat_interleave(samples, 0).to(device),
        prompt_mask.repeat_interleave(samples, 0).to(device),
        torch.where(mask, token_ids, 0),
        mask,
    )
    return Sampled(sequences, torch.where(mask, log_probs, 0.0))


def _within(advance: Callable[[float], None], first: float, part: float) -> Callable[[float], None]:
    """What a piece of the work reports to: it is `part` of the whole and starts at `first`."""
    return lambda fraction: advance(first + part * fraction)


def _decode(
    loaded: LanguageModel,
    prompt_ids: Tensor,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    advance: Callable[[float], None],
) -> tuple[Tensor, Tensor]:
    """(ids, log-probs), both [prompts * samples, max_new_tokens]; what stands after a row's end token means nothing."""
    decoder, cache = loaded.model.base_model, need("transformers", "smollm2").DynamicCache()
    # transformers 5.24 has renamed this argument.
    cached: dict[str, Any] = {"cache" if "cache" in signature(decoder.forward).parameters else "past_key_values": cache}
    hidden = decoder(prompt_ids, use_cache=True, **cached).last_hidden_state[:, -1].repeat_interleave(samples, 0)
    cache.batch_repeat_interleave(samples)  # each prompt is read once, however many samples it gets
    ids = torch.full((hidden.shape[0], max_new_tokens), loaded.tokenizer.eos_token_id, device=hidden.device)
    log_probs = torch.zeros(ids.shape, device=hidden.device)
    ended = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    for t in range(max_new_tokens):
        distribution = (F.linear(hidden, loaded.head).float() / temperature).log_softmax(-1)
        drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
        ids[:, t], log_probs[:, t] = drawn[:, 0], distribution.gather(1, drawn)[:, 0]
        ended |= ids[:, t] == loaded.tokenizer.eos_token_id
        advance((t + 1) / max_new_tokens)
        if bool(ended.all()) or t + 1 == max_new_tokens:
            break
        hidden = decoder(drawn, use_cache=True, **cached).last_hidden_state[:, -1]
    return ids, log_probs
