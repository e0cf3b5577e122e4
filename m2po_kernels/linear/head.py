"""The products with the head's weight: logits of some rows, and gradients from d logits. By the libraries behind torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .args import Inputs, LinearArgs

# Elements of d weight that one product makes where it cannot be added to the sum on the way (bf16 on a CPU): 64 MB of fp32.
BLOCK = 1 << 24


class Head(NamedTuple):
    """hidden W^T + bias, where W = weight + lora_scale * lora_b lora_a is never formed. All in the dtype of the products.

    weight [V, H], bias [V] and lora_b [V, r] end where the vocabulary does: padding is not multiplied.
    """

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scale: float

    @classmethod
    def of(cls, inputs: Inputs, args: LinearArgs) -> Head:
        """Converts what has another dtype, once a call."""
        vocab = args.local_vocab(inputs.weight)

        def part(tensor: Tensor | None, rows: int | None = vocab) -> Tensor | None:
            return None if tensor is None else tensor.detach()[:rows].to(args.dtype)

        weight = part(inputs.weight)
        assert weight is not None
        return cls(weight, part(inputs.bias), part(inputs.lora_a, None), part(inputs.lora_b), args.lora_scale)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Writes the logits of `hidden` [n, H] into `out` [n, V]."""
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=out)
        if self.lora_a is not None and self.lora_b is not None:
            torch.addmm(out, self.down(hidden), self.lora_b.T, out=out)

    def down(self, hidden: Tensor) -> Tensor:
        """lora_scale * hidden lora_a^T, [n, r]."""
        assert self.lora_a is not None
        return torch.mm(hidden, self.lora_a.T) * self.lora_scale


class HeadGradients(NamedTuple):
    """Sums over chunks. hidden: each row is written once, so in its own dtype; the others: fp32 (fp64). None: not wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None

    @classmethod
    def zeros(cls, inputs: Inputs, args: LinearArgs) -> HeadGradients:
        """No row yet."""

        def sums(tensor: Tensor | None, want: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if want and tensor is not None else None

        hidden = sums(inputs.hidden, args.wanted[0], inputs.hidden.dtype)
        rest = zip(inputs[1:5], args.wanted[1:], strict=True)
        return cls(hidden, *(sums(tensor, want, args.sum_dtype) for tensor, want in rest))

    @property
    def any(self) -> bool:
        """Whether any is wanted."""
        return any(t is not None for t in self)

    def add(self, head: Head, positions: Tensor, hidden: Tensor, d_logits: Tensor) -> None:
        """Adds what rows `hidden` [n, H] at `positions` [n] with `d_logits` [n, V] contribute."""
        vocab = d_logits.shape[1]
        up = None  # d of hidden lora_a^T, [n, r]
        if head.lora_b is not None and (self.hidden is not None or self.lora_a is not None):
            up = torch.mm(d_logits, head.lora_b) * head.lora_scale
        if self.hidden is not None:
            own = torch.mm(d_logits, head.weight)
            if up is not None and head.lora_a is not None:
                torch.addmm(own, up, head.lora_a, out=own)
            self.hidden.index_copy_(0, positions, own.to(self.hidden.dtype))
        if self.weight is not None:
            add_product(self.weight[:vocab], d_logits, hidden)
        if self.bias is not None:
            self.bias[:vocab].add_(d_logits.sum(0, dtype=self.bias.dtype))
        if self.lora_a is not None:
            assert up is not None
            add_product(self.lora_a, up, hidden)
        if self.lora_b is not None:
            add_product(self.lora_b[:vocab], d_logits, head.down(hidden))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, without rounding the sum to the dtype of the factors."""
    if left.dtype == total.dtype:
        torch.addmm(total, left.T, right, out=total)
    elif left.device.type == "cuda":
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:  # no product with a wider result here: each chunk's is rounded once, their sum is not
        step = max(1, BLOCK // total.shape[1])
        for start in range(0, total.shape[0], step):
            total[start : start + step] += left[:, start : start + step].T @ right
