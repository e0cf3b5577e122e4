"""How many rows are multiplied at a time, and how much work a call is. Numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument

# Bytes of a chunk where the caller names none. Every chunk reads and writes the fp32 sum of d weight once (V H 8 bytes, against
# 2 V H rows operations), so that a larger chunk is less traffic. CPU: 768 rows of 49,152 fp32 logits; with d weight at
# H = 576 a tenth of what [4096, V] logits and their copies cost in PyTorch. Else: 1,984 rows of 152,000 bf16 logits.
WORKSPACE_CPU = 160_000_000
WORKSPACE = 640_000_000
ROUND_TO = 64  # rows; a product's tiles are then full but for the last chunk's


@dataclass(frozen=True)
class Work:
    """Rows of one loss: how often each was multiplied with the weight is the work done.

    computed: visited for their log-prob. settled: of those, the ones that got their gradient in the same visit. recomputed:
    visited once more for their gradient, after the cut was known.
    """

    computed: int
    settled: int
    recomputed: int

    def flops(self, vocab: int, width: int, *, hidden_grad: bool = True, weight_grad: bool = True) -> int:
        """Operations in products with a [vocab, width] weight: 2 for log-probs, 2 each for d hidden and d weight."""
        product = 2 * vocab * width
        grads = int(hidden_grad) + int(weight_grad)
        return product * (self.computed + grads * self.settled + (1 + grads) * self.recomputed)


def chunk_rows(row_bytes: int, max_workspace_bytes: int) -> int:
    """The most rows that a chunk may have. Raises InvalidArgument where not even one fits."""
    rows = max_workspace_bytes // row_bytes
    if rows < 1:
        raise InvalidArgument(
            f"max_workspace_bytes must hold one row of logits with its hidden state, {row_bytes} bytes; got {max_workspace_bytes}"
        )
    return rows // ROUND_TO * ROUND_TO if rows >= ROUND_TO else rows


def chunks(rows: int, most: int) -> list[slice]:
    """`rows` rows in as few chunks as possible, all of one size but for the last; of `most` rows at most."""
    if rows == 0:
        return []
    number = -(-rows // most)
    size = min(-(-rows // (number * ROUND_TO)) * ROUND_TO, most)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
