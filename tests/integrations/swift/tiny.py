"""A tiny Qwen2 with one token for each character, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]


def build(folder: Path) -> None:
    """folder/model, as AutoModelForCausalLM and AutoTokenizer read it, and folder/data.jsonl."""
    tokens = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL[:3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[0], eos_token=SPECIAL[2], unk_token=SPECIAL[3], padding_side="left"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = ({"messages": [{"role": "user", "content": f"{a}+1="}], "solution": str(a + 1)} for a in range(16))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
