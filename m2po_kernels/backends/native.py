"""CPU in C++ (csrc/cpu): one sweep, SIMD chosen at run time, torch's own threads. Falls back on nothing: see `why_not`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiled import load_library
from ..inputs import compute_dtype
from ..logits_args import LogitsArgs
from ..results import COUNTS, FLOATS
from ..rule import Batch, Rule

_HUGE_PAGE = 1 << 21
_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.bool, torch.uint8, torch.int8)


def why_not(device: torch.device) -> str | None:
    """None if the extension serves tensors on `device`, else the reason."""
    if device.type != "cpu":
        return f"serves tensors on a CPU; these are on {device.type}"
    return load_library("native")


def isas() -> list[str]:
    """The instruction sets that were compiled in and that this machine runs, best first; none without the extension."""
    if load_library("native") is not None:
        return []
    return torch.ops.m2po_native.isas().split(",")


def use_isa(isa: str) -> bool:
    """Use the kernels of `isa`, one of `isas()`, from now on; False if it is none. For tests and benchmarks."""
    return isa in isas() and torch.ops.m2po_native.use_isa(isa)


def select(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(keep, counts, floats), as the op m2po_kernels::select returns them."""
    keep = torch.empty(batch.log_probs.shape, dtype=torch.bool)
    _, _, counts, floats = _sweep(batch, rule, keep, None, None)
    return keep, counts, floats


def policy_loss(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scales, cut, counts, floats), as the op m2po_kernels::policy_loss returns them."""
    dtype = compute_dtype(batch.log_probs)
    if rule.per_token:
        loss = torch.empty(batch.log_probs.shape, dtype=dtype)
        return loss, *_sweep(batch, rule, None, loss, None)
    loss = torch.empty((), dtype=dtype)
    return loss, *_sweep(batch, rule, None, None, loss)


def empty_gradient(like: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A contiguous tensor of the shape and dtype of `like`, to be filled; a large one starts at a huge page.

    Its memory is new to the process, and faulting it in by 4 KB takes as long as computing it. Huge pages, which the kernel is
    asked for before the first write (advise_huge in csrc/cpu/driver.cpp), cover only whole 2 MB.
    """
    n = like.numel()
    if n * like.element_size() < _HUGE_PAGE:
        return torch.empty_like(like, memory_format=memory_format)
    room = torch.empty(n + _HUGE_PAGE // like.element_size(), dtype=like.dtype)
    start = -room.data_ptr() % _HUGE_PAGE // like.element_size()
    return room[start : start + n].view(like.shape)


def policy_loss_backward(grad_loss: Tensor, scales: Tensor, cut: Tensor, batch: Batch, rule: Rule, out: Tensor) -> None:
    """Writes d loss / d log_probs into `out` (shape and dtype of log_probs, any strides)."""
    tensors = _tensors(batch)[:-1]
    torch.ops.m2po_native.backward(grad_loss, scales, cut, *tensors, *rule.args()[:2], out)


def declines_logits(logits: Tensor, args: LogitsArgs) -> str | None:
    """The reason why these logits are not for the extension, or None."""
    if logits.dtype not in _LOGITS:
        return f"takes float32, bfloat16 and float16 logits; these are {logits.dtype}"
    if logits.stride(-1) != 1:
        return f"takes logits whose columns are contiguous; these have stride {logits.stride(-1)}"
    return None


def log_softmax(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, args: LogitsArgs) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), as the op m2po_kernels::selective_log_softmax returns them."""
    log_probs = torch.empty(logits.shape[0], logits.shape[1] - args.shift)
    entropy = torch.empty_like(log_probs) if args.with_entropy else None
    torch.ops.m2po_native.log_softmax(*_rows(logits, token_ids, temperatures, args), log_probs, entropy)
    return log_probs, torch.empty(0) if entropy is None else entropy


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
    """Writes d logits into `out` (dtype of logits, contiguous columns; may be `logits` itself)."""
    flows = (None, None) if grad_entropy is None else (entropy, grad_entropy)
    rows = _rows(logits, token_ids, temperatures, args)
    torch.ops.m2po_native.log_softmax_backward(*rows, log_probs, grad_log_probs, *flows, out)


def _rows(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, args: LogitsArgs) -> tuple[object, ...]:
    ids = token_ids[:, args.shift :].to(torch.int64)
    temperatures = None if temperatures is None else temperatures.to(torch.float32)
    return logits, ids, temperatures, [args.temperature, args.logit_scale, args.logit_softcap], args.vocab_size


def _sweep(
    batch: Batch, rule: Rule, keep: Tensor | None, per_token: Tensor | None, loss: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scales, floats = torch.empty(2, dtype=torch.float64), torch.empty(len(FLOATS), dtype=torch.float64)
    cut, counts = torch.empty(2, dtype=torch.int64), torch.empty(len(COUNTS), dtype=torch.int64)
    torch.ops.m2po_native.sweep(*_tensors(batch), *rule.args()[:2], keep, per_token, loss, scales, cut, counts, floats)
    return scales, cut, counts, floats


def _tensors(batch: Batch) -> tuple[Tensor | None, ...]:
    mask = batch.mask if batch.mask.dtype in _BYTES else batch.mask != 0
    return tuple(batch._replace(mask=mask))
