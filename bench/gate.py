"""The correctness gate: no time is reported for a call whose result is not that of m2po_kernels.reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m2po_kernels.reference import m2po_oracle

from .contenders import Call
from .data import M2_THRESHOLD, TokenBatch

# Against fp64 of the same rounded d. exp is within one unit in the last place, at most 2^-23 relative; the product with A, that
# with 1/D and 1/D itself are rounded once each, 2^-24: five times 2^-24 or 3.0e-7. Autograd's chain may round as often again.
# Twice 3.0e-7, and rounded up.
GRADIENT_TOLERANCE = 1e-6
# The loss is a sum with cancellation, so its error is measured by the mean of |l|. The peers add in fp32, by pairs: log2(2^24)
# roundings at most, 24 * 2^-24 = 1.4e-6 of it in the worst case.
LOSS_TOLERANCE = 1.5e-6


class GateRed(AssertionError):
    """A contender's result is wrong; its times must not be reported."""


@dataclass(frozen=True)
class Oracle:
    """What the reference says of a batch: keep, loss and gradient in fp64, and the mean of |l| over valid tokens."""

    keep: Tensor
    loss: float
    grad: Tensor
    mean_size: float

    @classmethod
    def of(cls, batch: TokenBatch) -> Oracle:
        """Computed on the CPU whatever the device of the batch."""
        result = m2po_oracle(*(t.detach().cpu() for t in batch.tensors()), m2_threshold=M2_THRESHOLD)
        # l = -M exp(d) A, and so is its derivative: the gradient's sizes are those of the loss.
        return cls(result.keep, float(result.loss), result.grad, float(result.grad.abs().sum()))


def check(oracle: Oracle, call: Call, case: str) -> None:
    """Run the call once and raise GateRed unless the mask is equal, the loss and each gradient within tolerance."""
    call.reset()
    check_result(oracle, call.run(), case)


def check_result(oracle: Oracle, result: object, case: str) -> None:
    """As `check`, of a result: keep (bool), a loss, or (loss, gradient)."""
    if isinstance(result, Tensor) and result.dtype == torch.bool:
        wrong = int((result.cpu() != oracle.keep).sum())
        if wrong:
            raise GateRed(f"{case}: keep differs from the oracle's at {wrong} tokens; expected none")
        return
    loss, grad = result if isinstance(result, tuple) else (result, None)
    value = float(loss.detach())
    error = abs(value - oracle.loss)
    if not error <= LOSS_TOLERANCE * oracle.mean_size:
        raise GateRed(f"{case}: loss {value!r}, the oracle's {oracle.loss!r}; expected within {LOSS_TOLERANCE} of mean |l|")
    if grad is None:
        return
    difference = (grad.detach().cpu().double() - oracle.grad).abs_()
    wrong = int((difference > GRADIENT_TOLERANCE * oracle.grad.abs()).sum()) + int(difference.isnan().sum())
    if wrong:
        raise GateRed(f"{case}: gradient differs at {wrong} tokens by more than {GRADIENT_TOLERANCE} relative; expected at none")
