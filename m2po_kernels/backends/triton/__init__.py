"""NVIDIA and AMD GPUs through Triton: one cooperative launch for select and loss, one for the backward.

On a CPU it runs in Triton's interpreter, which is for tests. Importing this module does not import triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ...logits_args import LogitsArgs
from ...rule import Batch, Rule

# The exact sums hold this many tokens (docs/architecture.md).
_MAX_TOKENS = 1 << 31
_MAX_PROGRAMS = 1 << 31


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not(device: torch.device) -> str | None:
    """None if Triton serves tensors on `device` in this process, else the reason."""
    if device.type not in ("cuda", "cpu"):
        return f"serves tensors on NVIDIA and AMD GPUs; these are on {device.type}"
    if not _is_installed():
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu" and not interpreted:
        return "on a CPU it runs in Triton's interpreter only, for tests: set TRITON_INTERPRET=1 before the process starts"
    if device.type == "cuda" and interpreted:
        return "TRITON_INTERPRET=1 is set: kernels are interpreted, on tensors on a CPU"
    return None


def declines(batch: Batch, rule: Rule) -> str | None:
    """None if the kernels serve this call, else the reason."""
    if batch.log_probs.dtype == torch.float64:
        return "its kernels compute in float32, and log_probs is float64"
    if batch.log_probs.numel() > _MAX_TOKENS:
        return f"its exact sums hold 2^31 tokens, and log_probs has {batch.log_probs.numel()}"
    return None


def select(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(keep, counts, floats), as the op m2po_kernels::select returns them."""
    from .policy import select

    return select(batch, rule)


def policy_loss(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scales, cut, counts, floats), as the op m2po_kernels::policy_loss returns them."""
    from .policy import policy_loss

    return policy_loss(batch, rule)


def policy_loss_backward(grad_loss: Tensor, scales: Tensor, cut: Tensor, batch: Batch, rule: Rule, out: Tensor) -> None:
    """Writes d loss / d log_probs into `out` (shape and dtype of log_probs, any strides)."""
    from .policy import policy_loss_backward

    policy_loss_backward(grad_loss, scales, cut, batch, rule, out)


def declines_logits(logits: Tensor, args: LogitsArgs) -> str | None:
    """None if the kernels serve this call, else the reason."""
    if logits.dtype == torch.float64:
        return "its kernels compute in float32, and logits is float64"
    if logits.shape[0] * logits.shape[1] >= _MAX_PROGRAMS:
        return f"a launch has fewer than 2^31 programs, one a row, and logits has {logits.shape[0] * logits.shape[1]} rows"
    return None


def log_softmax(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, args: LogitsArgs) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), as the op m2po_kernels::selective_log_softmax returns them."""
    from .logits import log_softmax

    return log_softmax(logits, token_ids, temperatures, args)


def log_softmax_backward(
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    temperatures: Tensor | None,
    args: LogitsArgs,
    out: Tensor,
) -> None:
    """Writes d logits into `out` (shape and dtype of logits, any strides; may be `logits` itself)."""
    from .logits import log_softmax_backward

    log_softmax_backward(grad_log_probs, grad_entropy, log_probs, entropy, logits, token_ids, temperatures, args, out)
