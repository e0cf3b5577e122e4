"""Pieces that the kernels share: loads and stores of any layout, exp and expm1, a barrier over the grid, a histogram."""

from __future__ import annotations

import triton
import triton.language as tl

# How a tensor lies in memory: not given; one run of consecutive elements; rows and columns with strides.
ABSENT = tl.constexpr(0)
FLAT = tl.constexpr(1)
STRIDED = tl.constexpr(2)

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts, the first of 10 bits so that its product with an exponent is exact.
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)
# Adding and taking away 1.5 * 2^23 rounds |x| < 2^22 to an integer, 2^23 does so for 0 <= x < 2^23 (to even, as fp32 adds).
_ROUND = tl.constexpr(12582912.0)
_ROUND_POSITIVE = tl.constexpr(8388608.0)
_INFINITY = tl.constexpr(float("inf"))
_BUCKETS = tl.constexpr(256)
_RUN = tl.constexpr(16)  # elements, 16 bytes or more of every type


@triton.jit
def place(start, tokens, columns, BLOCK: tl.constexpr):
    """Where the block of tokens from `start` on is, as `load` and `store` take it.

    That is: start; lanes; columns of a row; row of the first token; rows from there and columns of the tokens, in 32 bits; how
    many tokens there are; whether the block is full. One 64-bit division for the block, 32-bit ones for its tokens. There
    are at most 2^31 columns.
    """
    lane = tl.arange(0, BLOCK)
    left = tl.minimum(tokens - start, BLOCK).to(tl.int32)
    first_row = start // columns
    column = (start - first_row * columns).to(tl.uint32) + lane.to(tl.uint32)
    wraps = column // columns.to(tl.uint32)
    return start, lane, columns, first_row, wraps, column - wraps * columns.to(tl.uint32), left, left == BLOCK


@triton.jit
def _offset(layout: tl.constexpr, at, row_stride, column_stride):
    start, lane, _, first_row, row, column, _, _ = at
    if layout == FLAT:
        offset = start + lane
    else:
        offset = first_row * row_stride + (row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride)
    return offset


@triton.jit
def load(base, layout: tl.constexpr, at, row_stride, column_stride):
    """A whole block needs no mask, which is what lets its loads be 16 bytes wide.

    Those of rows with a stride are so too if rows and stride are whole runs of _RUN elements. That is asked when the kernel
    runs: a constexpr would compile it anew for other shapes.
    """
    _, lane, columns, first_row, row, column, left, whole = at
    offset = _offset(layout, at, row_stride, column_stride)
    if layout == FLAT:
        if whole:
            x = tl.load(base + offset)
        else:
            x = tl.load(base + offset, mask=lane < left, other=0)
    elif whole & (column_stride == 1) & ((columns | row_stride) % _RUN == 0):
        # Computed here: Triton 3.6 loses what is said about the result of a call.
        offset = first_row * row_stride + (row.to(tl.int64) * row_stride + column.to(tl.int64))
        x = tl.load(base + tl.max_contiguous(tl.multiple_of(offset, _RUN), _RUN))
    else:
        x = tl.load(base + offset, mask=lane < left, other=0)
    return x


@triton.jit
def store(base, layout: tl.constexpr, at, row_stride, column_stride, x):
    _, lane, _, _, _, _, left, whole = at
    offset = _offset(layout, at, row_stride, column_stride)
    x = x.to(base.dtype.element_ty)
    if whole:
        tl.store(base + offset, x)
    else:
        tl.store(base + offset, x, mask=lane < left)


@triton.jit
def is_finite(x):
    return tl.abs(x) < _INFINITY


@triton.jit
def round_positive(x):
    """x >= 0 to the nearest integer, ties to even."""
    return tl.where(x < _ROUND_POSITIVE, (x + _ROUND_POSITIVE) - _ROUND_POSITIVE, x)


@triton.jit
def exp_terms(x):
    """(exp(x), expm1(x)) in fp32, each within 2 ulp.

    tl.exp multiplies by log2(e) in fp32 and so loses digits as |x| grows, and there is no expm1. Here
    x = n ln 2 + r, and expm1(r) is its Taylor polynomial of degree 7: the rest is below 2^-25 of it for |r| <= ln 2 / 2.
    """
    x = tl.where(x > 89.0, 89.0, x)  # exp is infinite from 88.73 on
    x = tl.where(x < -104.0, -104.0, x)  # and 0 from -103.98 on
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = tl.fma(n, -_LN2_LOW, tl.fma(n, -_LN2_HIGH, x))
    p = tl.fma(r, 1.0 / 5040.0, 1.0 / 720.0)
    p = tl.fma(p, r, 1.0 / 120.0)
    p = tl.fma(p, r, 1.0 / 24.0)
    p = tl.fma(p, r, 1.0 / 6.0)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r * r, r)
    whole = tl.where(n == n, n, 0.0).to(tl.int32)
    half = whole >> 1  # 2^n in two factors, as it may leave the range of normal numbers
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    ratio = ((p + 1.0) * first) * second
    minus_one = (p * first) * second + (first * second - 1.0)
    return ratio, tl.where(n > 64.0, ratio, minus_one)


@triton.jit
def is_last(arrivals, programs):
    """Whether this program is the last of the grid to come here; what the others wrote before is visible to it then."""
    tl.debug_barrier()
    return tl.atomic_add(arrivals, 1) == programs - 1


@triton.jit
def release(gate):
    """Lets the others pass `wait`; what this program wrote before is visible to them then."""
    tl.debug_barrier()
    tl.atomic_xchg(gate, 1)


@triton.jit
def wait(gate):
    """All programs of the grid run at the same time (a cooperative launch), so the last one comes."""
    while tl.atomic_add(gate, 0) == 0:
        pass
    tl.debug_barrier()


@triton.jit
def add_to_bins(histogram, bins, weights, chosen, n_chosen, BINS: tl.constexpr, WEIGHED: tl.constexpr, CROWD: tl.constexpr):
    """Counts each chosen lane at histogram[bin] and, if WEIGHED, adds its weight (below 2^24) at histogram[BINS + bin].

    Atomics on one address queue up. So while more than CROWD lanes of this block are in one bucket of bins, its
    highest bin is summed within the block and taken out: batches whose values are all equal, or few, cost no more than others.
    """
    if n_chosen > CROWD:
        buckets = tl.arange(0, _BUCKETS)
        # A histogram holds its buckets in registers; neighbouring bins go to different ones.
        counts = tl.histogram(bins % _BUCKETS, _BUCKETS, mask=chosen)
        top = tl.max(counts * _BUCKETS + buckets, 0)
        while top // _BUCKETS > CROWD:
            bucket = top % _BUCKETS
            leader = tl.max(tl.where(chosen & (bins % _BUCKETS == bucket), bins, -1), 0)
            mine = chosen & (bins == leader)
            both = tl.sum(tl.where(mine, weights.to(tl.int64) + (1 << 40), 0), 0)
            tl.atomic_add(histogram + leader, both >> 40, sem="relaxed")
            if WEIGHED:
                tl.atomic_add(histogram + BINS + leader, both & ((1 << 40) - 1), sem="relaxed")
            chosen = chosen & (bins != leader)
            counts -= tl.where(buckets == bucket, (both >> 40).to(tl.int32), 0)
            top = tl.max(counts * _BUCKETS + buckets, 0)
    tl.atomic_add(histogram + bins, tl.full(bins.shape, 1, tl.int64), mask=chosen, sem="relaxed")
    if WEIGHED:
        tl.atomic_add(histogram + BINS + bins, weights.to(tl.int64), mask=chosen, sem="relaxed")
