"""A tiny model, rollouts of it, and the gradient of a whole batch in fp64, written from the paper alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 40


@dataclass
class Sequence:
    prompt: Tensor
    response: Tensor
    mask: Tensor  # bool; False where a tool wrote the token
    advantages: Tensor
    behavior: Tensor  # log-probs of the rollout engine, fp32; NaN where it gave none


def save_model(path: str) -> None:
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
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "word": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>").save_pretrained(path)


def load(path: str, state: dict[str, Tensor] | None = None) -> Qwen2ForCausalLM:
    """In fp64, with other weights if given."""
    model = Qwen2ForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    if state is not None:
        model.load_state_dict({name: value.double() for name, value in state.items()})
    return model


def logits(model: Qwen2ForCausalLM, sequence: Sequence) -> Tensor:
    """Of the response's tokens."""
    tokens = torch.cat([sequence.prompt, sequence.response])
    return model(tokens[None]).logits[0, len(sequence.prompt) - 1 : -1]


def log_probs(model: Qwen2ForCausalLM, sequence: Sequence) -> Tensor:
    return logits(model, sequence).log_softmax(-1).gather(-1, sequence.response[:, None])[:, 0]


@torch.no_grad()
def rollouts(path: str, n: int, seed: int, *, noise: float = 0.4, unscored: float = 0.0) -> list[Sequence]:
    """Sequences of many lengths, one advantage each; log-probs off by `noise`: 0.4 is that of an engine long out of date.

    Every fifth token of some is a tool's. unscored: the share of tokens without a log-prob.
    """
    draw, model = torch.Generator().manual_seed(seed), load(path)
    sequences = []
    for i in range(n):
        lengths = torch.randint(2, 9, (2,), generator=draw).tolist()
        prompt, response = (torch.randint(3, VOCABULARY, (length,), generator=draw) for length in lengths)
        mask = torch.ones(len(response), dtype=torch.bool)
        if i % 3 == 0:
            mask[4::5] = False
        advantages = torch.randn(1, generator=draw).expand(len(response)).clone()
        sequence = Sequence(prompt, response, mask, advantages, torch.empty(0))
        off = noise * torch.randn(len(response), generator=draw, dtype=torch.float64)
        behavior = (log_probs(model, sequence) + off).float()
        behavior[torch.rand(len(response), generator=draw) < unscored] = torch.nan
        sequences.append(replace(sequence, behavior=behavior))
    return sequences


def count_unscored(sequences: list[Sequence]) -> int:
    return sum(int((s.behavior.isnan() & s.mask).sum()) for s in sequences)


def selection(d: Tensor, advantages: Tensor, tau: float) -> Tensor:
    """Algorithm 1, literally."""
    keep = torch.ones_like(d, dtype=torch.bool)
    region = ((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0))
    v = d.square()
    while (region & keep).any() and v[region & keep].mean() > tau:
        keep[torch.where(region & keep, v, -1.0).argmax()] = False
    return keep


def gradient(
    model: Qwen2ForCausalLM, batches: list[list[Sequence]], tau: float = 0.04
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Of the batch that all `batches` make up, each of which is selected over alone; with how many tokens it has and drops."""
    model.zero_grad()
    losses, n_valid, n_dropped, n_region = [], 0, 0, 0
    for batch in batches:
        current = torch.cat([log_probs(model, s) for s in batch])
        mask, advantages, behavior = (torch.cat([getattr(s, n) for s in batch]) for n in ("mask", "advantages", "behavior"))
        valid = mask & ~behavior.isnan()
        d, advantages = (current - behavior)[valid], advantages.double()[valid]
        keep = selection(d.detach(), advantages, tau)
        losses.append(-(keep * d.exp() * advantages).sum())
        n_valid, n_dropped = n_valid + len(d), n_dropped + int((~keep).sum())
        n_region += int(((advantages * d.detach()) > 0).sum())
    (torch.stack(losses).sum() / n_valid).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return gradients, {"valid": n_valid, "dropped": n_dropped, "region": n_region}


def gradient_with_terms(model: Qwen2ForCausalLM, sequences: list[Sequence], *, kl: float, entropy: float) -> dict[str, Tensor]:
    """With a KL term to the rollout policy and an entropy bonus, over all valid tokens, dropped or not."""
    gradients, counts = gradient(model, [sequences])
    assert counts["dropped"] > 0
    model.zero_grad()
    mask = torch.cat([s.mask for s in sequences])
    d = torch.cat([s.behavior - log_probs(model, s) for s in sequences])[mask]
    log_p = torch.cat([logits(model, s) for s in sequences])[mask].log_softmax(-1)
    (kl * (d.exp() - d - 1).mean() + entropy * (log_p.exp() * log_p).sum(-1).mean()).backward()
    return {name: gradients[name] + parameter.grad for name, parameter in model.named_parameters()}


def difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Relative, in the 2-norm over all parameters."""
    assert ours.keys() == reference.keys()
    flat = [torch.cat([g[name].double().flatten() for name in sorted(reference)]) for g in (ours, reference)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())
