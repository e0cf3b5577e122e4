"""Log-probs and the loss from hidden states, with every gradient: dense, in fp64, [tokens, vocab] as the formula has it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .logits import logits_oracle
from .loss import OracleResult, m2po_oracle


class LinearOracle(NamedTuple):
    """All fp64. log_probs, entropy: shape of the tokens; gradients: shape of what they belong to, None if that was not given."""

    log_probs: Tensor
    entropy: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


def linear_oracle(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_scale: float = 1.0,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    **scaling,
) -> LinearOracle:
    """What `linear_log_probs` must return, and the gradients of its results weighed by `grad_log_probs` and `grad_entropy`.

    hidden [..., H], token_ids [...]; scaling: temperature, logit_scale, logit_softcap, vocab_size, as in `logits_oracle`.
    """
    h = hidden.detach().double().reshape(-1, hidden.shape[-1])
    full = weight.detach().double()
    if lora_a is not None and lora_b is not None:
        full = full + lora_scale * lora_b.detach().double() @ lora_a.detach().double()
    logits = h @ full.T
    if bias is not None:
        logits = logits + bias.detach().double()
    if isinstance(scaling.get("temperature"), Tensor):
        scaling["temperature"] = scaling["temperature"].reshape(-1)
    flat = [None if g is None else g.reshape(-1) for g in (grad_log_probs, grad_entropy)]
    result = logits_oracle(logits, token_ids.reshape(-1), grad_log_probs=flat[0], grad_entropy=flat[1], **scaling)
    d_full = result.grad.T @ h
    d_a = d_b = None
    if lora_a is not None and lora_b is not None:
        d_a = lora_scale * lora_b.detach().double().T @ d_full
        d_b = lora_scale * d_full @ lora_a.detach().double().T
    return LinearOracle(
        result.log_probs.reshape(token_ids.shape),
        result.entropy.reshape(token_ids.shape),
        (result.grad @ full).reshape(hidden.shape),
        d_full,
        None if bias is None else result.grad.sum(0),
        d_a,
        d_b,
    )


def linear_loss_oracle(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    head: dict | None = None,
    grad_output: float | Tensor = 1.0,
    log_probs_dtype: torch.dtype = torch.float32,
    **options,
) -> tuple[OracleResult, LinearOracle]:
    """What `linear_m2po_loss` must return: the loss of the dense log-probs (d is taken from them in `log_probs_dtype`).

    head: the options of `linear_oracle`; options: those of `m2po_oracle`.
    """
    head = head or {}
    valid = mask != 0
    ids = torch.where(valid, token_ids, 0)
    clean = torch.where(valid[..., None], hidden, 0)
    log_probs = linear_oracle(clean, weight, ids, **head).log_probs.to(log_probs_dtype)
    loss = m2po_oracle(log_probs, behavior_log_probs, advantages, mask, **options)
    return loss, linear_oracle(clean, weight, ids, grad_log_probs=loss.grad * grad_output, **head)
