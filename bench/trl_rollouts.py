"""What bench.trl_step trains on: random completions, behaviour log-probs near the current ones, rewards tied in some groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Of digits, for the prompts; completions are made as ids."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *"0123456789"])}
    digits = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    digits.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=digits, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def prompts(n: int) -> Dataset:
    """n of them, numbered."""
    return Dataset.from_dict({"prompt": [str(i) for i in range(n)], "place": [i / n for i in range(n)]})


def rewards(share: float) -> Callable[..., list[float]]:
    """Equal within a group for `share` of the prompts, else apart."""

    def reward(completions: list[str], place: list[float], **_: Any) -> list[float]:
        return [0.0 if at < share else float(i % 2) for i, at in enumerate(place)]

    return reward


class Rollouts:
    """The same completions on each call, of full length."""

    def __init__(self, prompt: int, completion: int, noise: float):
        self.prompt, self.completion, self.noise = prompt, completion, noise

    @torch.no_grad()
    def __call__(self, texts: list[str], trainer: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for _ in texts:
            high = trainer.model.config.vocab_size
            ids = torch.randint(len(SPECIAL), high, (self.prompt + self.completion,), generator=generator)
            # One sequence at a time, by the model's own head: the same for every contender, and outside what is measured.
            logits = trainer.model(input_ids=ids[None], logits_to_keep=self.completion + 1).logits[0, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, ids[self.prompt :, None])[:, 0]
            behavior = log_probs + self.noise * torch.randn(self.completion, generator=generator)
            result["prompt_ids"].append(ids[: self.prompt].tolist())
            result["completion_ids"].append(ids[self.prompt :].tolist())
            result["logprobs"].append(behavior.tolist())
        return result
