"""A micro-batch as the accumulator knows it: its handle, what is collected of it, and the checksum that M2PO_CHECK=1 compares."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InvalidArgument, describe
from .rule import Batch

# Odd 64-bit constants (golden ratio, SplitMix64) as signed integers: products wrap around, as hashes want them to.
_POSITION, _MIX = -7046029254386353131, -4658895280553007687


class Collected(NamedTuple):
    """What one micro-batch gives to the selection: sums that are final, and its candidates in the order of their positions."""

    keep: Tensor  # bool, shape of log_probs: where valid
    counts: Tensor  # int64: valid, trust region, nonfinite, clipped, low tokens, their sum in the rounding unit, first nonfinite
    sums: Tensor  # fp64: v of low tokens, ratio, exp(d) - d - 1; largest ratio
    v: Tensor  # of the candidates, in the type of d
    positions: Tensor  # int64, flat


@dataclass(eq=False)
class Part:
    """Handle of one micro-batch, as `M2Accumulator.add` returns it; goes to the loss as `part=`, as often as that is computed."""

    accumulator: int  # the serial number of the one that made it. A number: torch.compile would compile again for each object
    index: int
    shape: torch.Size
    start: int  # position of its first token among those of its rank
    checksum: Tensor | None  # of what must not change until the loss; None without M2PO_CHECK=1
    used: bool = False

    def use(self, batch: Batch) -> None:
        """Notes that a loss was computed with this part; raises InvalidArgument if that was for another micro-batch."""
        if self.checksum is not None and not torch.equal(self.checksum, checksum(batch)):
            raise InvalidArgument(
                f"part {self.index} was added with another mask, behavior_log_probs or advantages than those given with "
                f"{describe(batch.log_probs)}; expected the handle that add() returned for this micro-batch"
            )
        self.used = True


def checking() -> bool:
    """Whether M2PO_CHECK=1 asks for checks that cost time and host syncs."""
    value = os.environ.get("M2PO_CHECK", "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"M2PO_CHECK must be 0 or 1; got {value!r}")
    return value == "1"


def checksum(batch: Batch) -> Tensor:
    """int64 [3]: of the mask, the behaviour log-probs and the advantages at its valid positions. 0-d values on the device."""
    valid = batch.mask != 0
    tensors = [valid, *(torch.where(valid, t, 0) for t in (batch.behavior_log_probs, batch.advantages))]
    return torch.stack([digest(t) for t in tensors])


def digest(tensor: Tensor) -> Tensor:
    """0-d int64: of the bits of `tensor` and their places. Equal tensors give equal ones, others hardly ever do."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.double().view(torch.int64)
    x = flat.to(torch.int64) + torch.arange(1, flat.numel() + 1, device=flat.device) * _POSITION
    x = (x ^ (x >> 31)) * _MIX
    return (x ^ (x >> 29)).sum()
