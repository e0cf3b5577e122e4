"""Log-prob and entropy of each token from logits, and their gradient: literal, unfused, in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitsOracle(NamedTuple):
    """log_probs, entropy: fp64, shape of the tokens that have a row; grad: fp64, shape of the logits."""

    log_probs: Tensor
    entropy: Tensor
    grad: Tensor


def scaled_logits(
    logits: Tensor, temperature: float | Tensor = 1.0, logit_scale: float = 1.0, logit_softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """z = softcap(logit_scale * x) / temperature, softcap(x) = cap * tanh(x / cap), and dz/dx. fp64."""
    x = logits.detach().double() * logit_scale
    slope = torch.full_like(x, logit_scale)
    if logit_softcap is not None:
        t = torch.tanh(x / logit_softcap)
        x, slope = logit_softcap * t, slope * (1 - t * t)
    divisor = temperature.double()[..., None] if isinstance(temperature, Tensor) else temperature
    return x / divisor, slope / divisor


def log_softmax(z: Tensor) -> Tensor:
    """z - log(sum exp(z)), with the maximum taken out of all and its own term of the sum, 1, left to log1p."""
    top, at = z.max(-1, keepdim=True)
    rest = (z - top).exp().scatter(-1, at, 0.0).sum(-1, keepdim=True)
    return (z - top) - torch.log1p(rest)


def logits_oracle(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    shift: int = 0,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> LogitsOracle:
    """Log-prob of each token, entropy of its row, and the gradient of their sum weighed by `grad_log_probs` and `grad_entropy`.

    logits [..., V], token_ids [...]; shift=1 drops the last row and the first token of each sequence (the last but one
    dimension of the logits). Gradients default to 0. A row with gradient 0 has gradient 0 whatever its logits are.
    """
    n = logits.shape[-2] - shift
    ids = token_ids[..., shift:].long()
    z, slope = scaled_logits(logits[..., :n, :vocab_size], temperature, logit_scale, logit_softcap)
    log_p = log_softmax(z)
    p = log_p.exp()
    log_probs = log_p.gather(-1, ids[..., None])[..., 0]
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)

    one_hot = torch.zeros_like(p).scatter_(-1, ids[..., None], 1.0)
    dz = torch.zeros_like(p)
    if grad_log_probs is not None:
        g = grad_log_probs.double()[..., None]
        dz += torch.where(g == 0, 0.0, g * (one_hot - p))
    if grad_entropy is not None:
        g = grad_entropy.double()[..., None]
        dz += torch.where((g == 0) | (p == 0), 0.0, -g * p * (log_p + entropy[..., None]))
    grad = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    grad[..., :n, :vocab_size] = torch.where(dz == 0, 0.0, dz * slope)
    return LogitsOracle(log_probs, entropy, grad)
