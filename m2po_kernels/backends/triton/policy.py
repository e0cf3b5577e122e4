"""select, policy_loss and its backward: from tensors to launches. Sizes follow from the shape; nothing waits for the device."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from ...exact import Unit
from ...results import COUNTS, FLOATS
from ...rule import Batch, Rule
from . import forward, tuning
from .backward import backward_kernel
from .device import ABSENT, FLAT, STRIDED
from .words import KINDS, SLOTS

_DIVIDE_BY = {"valid": forward.DIVIDE_BY_VALID, "kept": forward.DIVIDE_BY_KEPT, "one": forward.DIVIDE_BY_ONE}
_SELECT, _ONE_LOSS, _PER_TOKEN = 0, 1, 2


def select(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(keep, counts, floats), as the op m2po_kernels::select returns them."""
    keep = torch.empty(batch.log_probs.shape, dtype=torch.bool, device=batch.log_probs.device)
    _, _, counts, floats = _forward(batch, rule, _SELECT, keep.view(torch.uint8))
    return keep, counts, floats


def policy_loss(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scales, cut, counts, floats), as the op m2po_kernels::policy_loss returns them."""
    shape = batch.log_probs.shape if rule.per_token else ()
    loss = torch.empty(shape, dtype=torch.float32, device=batch.log_probs.device)
    return loss, *_forward(batch, rule, _PER_TOKEN if rule.per_token else _ONE_LOSS, loss)


def policy_loss_backward(grad_loss: Tensor, scales: Tensor, cut: Tensor, batch: Batch, rule: Rule, out: Tensor) -> None:
    """Writes d loss / d log_probs into `out` (shape and dtype of log_probs, any strides)."""
    device = batch.log_probs.device
    tokens, columns = batch.log_probs.numel(), _columns(batch.log_probs)
    if tokens == 0:
        return
    config = tuning.config_for(device)
    scalars = _scalars(rule)
    layouts, strides = _layouts(batch)
    for name, tensor in (("grad", grad_loss if rule.per_token else None), ("out", out)):
        layouts[name.upper()], strides[f"{name}_s0"], strides[f"{name}_s1"] = _layout(tensor)
    with _on(device):
        backward_kernel[(-(-tokens // config.backward_block),)](
            *_pointers(batch), grad_loss, scales, cut, out, tokens, columns, **strides,
            **{name: scalars[name] for name in ("log_high", "log_low", "log_cap", "kl_coef")},
            **layouts, **_flags(rule), BLOCK=config.backward_block,
            **({} if device.type == "cpu" else tuning.backward_options(config)),
        )  # fmt: skip


def _forward(batch: Batch, rule: Rule, mode: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = batch.log_probs.device
    tokens, columns = batch.log_probs.numel(), _columns(batch.log_probs)
    config = tuning.config_for(device, *_kind(batch))
    blocks = -(-tokens // config.block)

    def fresh(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    scales, floats = fresh(2, dtype=torch.float64), fresh(len(FLOATS), dtype=torch.float64)
    cut, counts = fresh(2, dtype=torch.int64), fresh(len(COUNTS), dtype=torch.int64)
    programs = tuning.programs_for(device, config, blocks)
    work = torch.zeros(SLOTS.value + KINDS.value * programs, dtype=torch.int64, device=device)
    sums = work[SLOTS.value :].view(torch.float64)
    # Room for every token to be a candidate: what is not used is never touched.
    room = blocks * config.block
    list_v, list_term = fresh(room, dtype=torch.float32), fresh(room if mode else 1, dtype=torch.float32)
    list_offset, list_counts = fresh(room, dtype=torch.int16), fresh(2 * blocks, dtype=torch.int32)

    unit = Unit.of(rule.m2_threshold, torch.float32)
    limbs = (unit.mantissa & ((1 << 28) - 1), unit.mantissa >> 28)
    lowest = int(torch.tensor(unit.candidate_above).view(torch.int32)) >> 20  # bin of the first digit: no candidate is below
    layouts, strides = _layouts(batch)
    given = batch.denominators
    with _on(device):
        forward.forward_kernel[(programs,)](
            *_pointers(batch), given, work, sums, list_counts, list_v, list_term, list_offset,
            out if mode else None, None if mode else out, scales, cut, counts, floats,
            tokens, columns, **strides, denominators_stride=0 if given is None else given.stride(0),
            tau0=limbs[0], tau1=limbs[1], exponent=unit.exponent, lowest_bin=lowest,
            candidate_above=unit.candidate_above, scale=unit.scale[0], scale_rest=unit.scale[1],
            **_scalars(rule), **layouts, **_flags(rule), LOSS=mode,
            DIVIDE_BY=_DIVIDE_BY[rule.normalizer] if given is None or rule.normalizer == "one" else forward.DIVIDE_BY_GIVEN,
            BLOCK=config.block, CROWD=tuning.CROWD,
            **({} if device.type == "cpu" else tuning.forward_options(config)),
        )  # fmt: skip
    return scales, cut, counts, floats


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def _kind(batch: Batch) -> tuple[bool, bool]:
    """What tuning.config_for asks: inputs beyond the first four, and log-probs of 16 bits."""
    return any(t is not None for t in batch[4:-1]), batch.log_probs.element_size() == 2


def _columns(like: Tensor) -> int:
    return max(1, like.shape[-1])


def _pointers(batch: Batch) -> tuple[Tensor | None, ...]:
    """The tensors but the last, bool as bytes."""
    return tuple(t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in batch[:-1])


def _layouts(batch: Batch) -> tuple[dict[str, int], dict[str, int]]:
    """For each tensor but the last how it lies in memory, and its strides."""
    names = ("log_probs", "behavior", "advantages", "mask", "reference", "weights", "keep")
    layouts, strides = {}, {}
    for name, tensor in zip(names, batch[:-1], strict=True):
        layouts[name.upper()], strides[f"{name}_s0"], strides[f"{name}_s1"] = _layout(tensor)
    return layouts, strides


def _layout(tensor: Tensor | None) -> tuple[int, int, int]:
    if tensor is None:
        return ABSENT.value, 0, 0
    if tensor.is_contiguous():
        return FLAT.value, 0, 0
    return STRIDED.value, tensor.stride(0) if tensor.dim() == 2 else 0, tensor.stride(-1)


def _scalars(rule: Rule) -> dict[str, float]:
    """The rule's bounds, each rounded to fp32 once: those on d in fp64 before."""
    bounds = {
        "log_high": math.log1p(rule.clip_high),
        "log_low": math.log1p(-rule.clip_low) if rule.clip_low < 1 else -math.inf,
        "ratio_high": 1 + rule.clip_high,
        "ratio_low": 1 - rule.clip_low,
        "log_cap": math.log(rule.ratio_cap),
        "cap": rule.ratio_cap,
        "kl_coef": rule.kl_coef,
    }
    return dict(zip(bounds, torch.tensor(list(bounds.values()), dtype=torch.float64).float().tolist(), strict=True))


def _flags(rule: Rule) -> dict[str, bool]:
    return {
        "SCOPE_ALL": rule.scope == "all",
        "CLIP": rule.rule == "clip",
        "CAPPED": not math.isinf(rule.ratio_cap),
        "DROP_BAD": rule.nonfinite == "drop",
    }
