"""M2PO in TRL on stale rollouts, end to end on a CPU: a tiny model learns to write digits. See README.md.

The rollouts come from a copy of the model whose weights are some optimizer steps old, as an asynchronous engine's are. With a
real model vLLM takes the place of `StaleEngine`: use_vllm=True, and no rollout_func.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental in TRL, which says so

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from m2po_kernels.integrations.trl import M2POConfig, M2POTrainer

LENGTH = 12
SHOWN = ("reward", "loss", "m2/before", "m2/after", "m2/masked_fraction", "m2/approx_kl", "entropy")


class StaleEngine:
    """Samples from weights that are refreshed every `refresh` optimizer steps, and says how likely each token was to it."""

    def __init__(self, refresh: int):
        self.refresh = refresh
        self.policy: Any = None
        self.taken_at = -1

    def __call__(self, prompts: list[str], trainer: M2POTrainer) -> dict[str, Any]:
        step = trainer.state.global_step
        if self.policy is None or step - self.taken_at >= self.refresh:
            trained = trainer.accelerator.unwrap_model(trainer.model)
            # Not a deep copy: TRL gave the trained model a forward that would come along, bound to its weights.
            self.policy = type(trained)(trained.config).eval()
            self.policy.load_state_dict(trained.state_dict())
            self.taken_at = step
        given = trainer.processing_class(prompts, return_tensors="pt", padding=True)
        out = self.policy.generate(
            **given,
            max_new_tokens=LENGTH,
            do_sample=True,
            top_k=0,
            temperature=trainer.temperature,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = self.policy.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        completions = out.sequences[:, given.input_ids.shape[1] :]
        lengths = [_length(row, trainer.processing_class.eos_token_id) for row in completions.tolist()]
        return {
            "prompt_ids": trainer.processing_class(prompts).input_ids,
            "completion_ids": [row[:n] for row, n in zip(completions.tolist(), lengths, strict=True)],
            "logprobs": [row[:n] for row, n in zip(scores.tolist(), lengths, strict=True)],
        }


def _length(tokens: list[int], end: int) -> int:
    """Up to the end token, and it."""
    return tokens.index(end) + 1 if end in tokens else len(tokens)


def tiny_model() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A model of characters with random weights, so that nothing is downloaded."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, padding_side="left", **names)
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config), tokenizer


def digits(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of a completion's characters that are digits."""
    return [sum(c.isdigit() for c in text) / LENGTH for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--refresh", type=int, default=4, help="how many optimizer steps old the engine's weights may be")
    parser.add_argument("--m2-threshold", type=float, default=0.04)
    parser.add_argument("--out", default="out/trl")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny: threads would only wait for each other
    model, tokenizer = tiny_model()
    args = M2POConfig(
        output_dir=options.out,
        m2_threshold=options.m2_threshold,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=LENGTH,
        learning_rate=3e-3,
        max_steps=options.steps,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = M2POTrainer(
        model,
        digits,
        args,
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]}),
        processing_class=tokenizer,
        rollout_func=StaleEngine(options.refresh),
    )
    trainer.train()

    print("  ".join(f"{name.removeprefix('m2/'):>21}" for name in ("step", *SHOWN)))
    for row in trainer.state.log_history:
        if "reward" in row:
            print("  ".join(f"{row[name]:>21.4g}" for name in ("step", *SHOWN)))


if __name__ == "__main__":
    main()
