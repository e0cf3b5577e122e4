"""The tiny causal LM that adapters are tested with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def tiny(vocab: int, **options: Any) -> Qwen2ForCausalLM:
    """The same weights on each call. options: of the config."""
    torch.manual_seed(0)
    given = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab, **given | options))
