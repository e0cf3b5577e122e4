"""A random language model of 8,000 weights as a GGUF file of the same kind as SmolLM2's, with a tokenizer of 21 characters."""

from __future__ import annotations

from pathlib import Path

import torch

WIDTH, FEED_FORWARD, HEADS, LAYERS, CONTEXT = 32, 48, 2, 2, 64
SEED = 5  # of the weights: one with which chance finds some right answers in each test
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# In GPT-2's byte alphabet a space is U+0120 and a newline U+010A. Nearly half are digits, so that chance finds some answers.
CHARACTERS = list("0123456789" + "\u0120\u010a" + "Whatis+-?")
MERGED = "10"  # a tokenizer of this kind has at least one pair that it merges
TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


def write(path: Path, *, seed: int = SEED, chat_template: str | None = TEMPLATE) -> Path:
    """Writes the model, whose head is its embedding, as SmolLM2's is; returns `path`."""
    import gguf

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).numpy()

    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [*SPECIAL, *CHARACTERS, MERGED]
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(CHARACTERS) + 1))
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", normal(len(tokens), WIDTH) / 2)
    writer.add_tensor("output_norm.weight", torch.ones(WIDTH).numpy())
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name, rows, columns in [
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH, WIDTH),
            ("attn_v", WIDTH, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", FEED_FORWARD, WIDTH),
            ("ffn_up", FEED_FORWARD, WIDTH),
            ("ffn_down", WIDTH, FEED_FORWARD),
        ]:
            writer.add_tensor(f"{block}.{name}.weight", normal(rows, columns))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{name}.weight", torch.ones(WIDTH).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
