"""NVIDIA GPUs through CUDA C++ (csrc/cuda): one cooperative launch for select and loss, one for the backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..compiled import load_library
from ..results import COUNTS, FLOATS
from ..rule import Batch, Rule

# The exact sums hold this many tokens, and positions in a launch have 32 bits (csrc/cuda/job.h).
_MAX_TOKENS = 1 << 31
_MASKS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
)


def why_not(device: torch.device) -> str | None:
    """None if the CUDA library serves tensors on `device`, else the reason."""
    if device.type != "cuda":
        return f"serves tensors on NVIDIA GPUs; these are on {device.type}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU: torch.cuda.is_available() is False"
    return load_library("cuda") or _refusal(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _refusal(index: int) -> str | None:
    return torch.ops.m2po_cuda.why_not(index) or None


def declines(batch: Batch, rule: Rule) -> str | None:
    """None if the kernels serve this call, else the reason."""
    if batch.log_probs.dtype == torch.float64:
        return "its kernels compute in float32, and log_probs is float64"
    if batch.log_probs.numel() > _MAX_TOKENS:
        return f"its exact sums hold 2^31 tokens, and log_probs has {batch.log_probs.numel()}"
    return None


def select(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(keep, counts, floats), as the op m2po_kernels::select returns them."""
    keep = torch.empty(batch.log_probs.shape, dtype=torch.bool, device=batch.log_probs.device)
    _, _, counts, floats = _forward(batch, rule, keep, None, None)
    return keep, counts, floats


def policy_loss(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scales, cut, counts, floats), as the op m2po_kernels::policy_loss returns them."""
    shape = batch.log_probs.shape if rule.per_token else ()
    loss = torch.empty(shape, dtype=torch.float32, device=batch.log_probs.device)
    return loss, *(_forward(batch, rule, None, loss, None) if rule.per_token else _forward(batch, rule, None, None, loss))


def policy_loss_backward(grad_loss: Tensor, scales: Tensor, cut: Tensor, batch: Batch, rule: Rule, out: Tensor) -> None:
    """Writes d loss / d log_probs into `out` (shape and dtype of log_probs, any strides)."""
    torch.ops.m2po_cuda.backward(grad_loss, scales, cut, *_tensors(batch)[:-1], *rule.args()[:2], out)


def _forward(
    batch: Batch, rule: Rule, keep: Tensor | None, per_token: Tensor | None, loss: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = batch.log_probs.device
    scales = torch.empty(2, dtype=torch.float64, device=device)
    floats = torch.empty(len(FLOATS), dtype=torch.float64, device=device)
    cut = torch.empty(2, dtype=torch.int64, device=device)
    counts = torch.empty(len(COUNTS), dtype=torch.int64, device=device)
    torch.ops.m2po_cuda.forward(*_tensors(batch), *rule.args()[:2], keep, per_token, loss, scales, cut, counts, floats)
    return scales, cut, counts, floats


def _tensors(batch: Batch) -> Batch:
    return batch if batch.mask.dtype in _MASKS else batch._replace(mask=batch.mask != 0)
