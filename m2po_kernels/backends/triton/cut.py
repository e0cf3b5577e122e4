"""From histograms of the candidates to the cut, in exact integers: the rule of csrc/core/cut.h in limbs of 28 bits.

Triton has no 128-bit integer. As in m2po_kernels/exact.py a number is l0 + l1 * 2^28 + l2 * 2^56 with signed int64 limbs that
may hold more than 28 bits; carrying upwards leaves its sign in l2. The unit is 2^exponent with tau = mantissa * 2^exponent.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LIMB = tl.constexpr(28)
_MASK = tl.constexpr((1 << 28) - 1)
_STEP = tl.constexpr(256)
_SLACK_BITS = tl.constexpr(22)  # the low tokens' unit is 2^22 times the decision's


@triton.jit
def slack_of(low_count, low_sum, tau0, tau1):
    """tau * low_count - low_sum, what the low tokens can pay for. tau0, tau1: limbs of tau's mantissa."""
    s0 = low_count * tau0 - ((low_sum << _SLACK_BITS) & _MASK)
    s1 = low_count * tau1 - ((low_sum >> (_LIMB - _SLACK_BITS)) & _MASK)
    s2 = -(low_sum >> (2 * _LIMB - _SLACK_BITS))
    return s0, s1, s2


@triton.jit
def carried(l0, l1, l2):
    l1 += l0 >> _LIMB
    l2 += l1 >> _LIMB
    return l0 & _MASK, l1 & _MASK, l2


@triton.jit
def _shifted(x, left):
    return tl.where(left >= 0, x << tl.minimum(tl.maximum(left, 0), 31), x >> tl.minimum(tl.maximum(-left, 0), 62))


@triton.jit
def cost_of(count, mantissas, field, tau0, tau1, exponent):
    """sum(v) - count * tau of `count` candidates of one exponent field, whose mantissas add up to `mantissas`.

    What no slack of 2^31 tokens can pay for counts as exactly that: infinity, and any candidate where tau is 0.
    """
    shift = tl.maximum(field, 1) - 150 - exponent
    limit = tl.full(shift.shape, 1, tl.int64) << tl.minimum(tl.maximum(86 - shift, 0), 62)
    beyond = (field >= 255) | (shift > 86) | (mantissas > limit) | (tau0 + tau1 == 0)
    beyond = beyond & (count > 0)
    p0 = tl.where(beyond | (shift >= _LIMB), 0, _shifted(mantissas, shift) & _MASK)
    p1 = tl.where(beyond | (shift >= 2 * _LIMB), 0, _shifted(mantissas, shift - _LIMB) & _MASK)
    p2 = tl.where(beyond, 1 << 32, _shifted(mantissas, shift - 2 * _LIMB))
    return p0 - count * tau0, p1 - count * tau1, p2


@triton.jit
def mantissa_of(bits):
    """v = mantissa * 2^(max(field, 1) - 150) for the bits of a v >= 0, int64."""
    return (bits & 0x7FFFFF) | tl.where(bits >> 23 > 0, 0x800000, 0)


@triton.jit
def first_unpaid(
    histogram, prefix, first, members, s0, s1, s2, tau0, tau1, exponent, BINS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Pays for bins in ascending order: the first that the slack cannot pay for, or BINS, and the slack left before it.

    Bin b holds the candidates whose bits from SHIFT on are prefix * BINS + b. With SHIFT = 0 they are all equal. Bins before
    `first` are empty, and all together hold `members`. Bins are read a few at a time, for the sake of registers: 256
    bins of the first digit are 32 powers of two, so that one step is the rule there.
    """
    step = tl.arange(0, _STEP)
    first = first // _STEP * _STEP
    unpaid = first * 0 + BINS
    while (members > 0) & (first < BINS):
        at = first + step
        bits = (prefix * BINS + at) << SHIFT
        count = tl.load(histogram + at)
        if SHIFT == 0:
            mantissas = count * mantissa_of(bits)
        else:
            mantissas = tl.load(histogram + BINS + at)
        c0, c1, c2 = cost_of(count, mantissas, bits >> 23, tau0, tau1, exponent)
        _, _, rest = carried(s0 - tl.cumsum(c0, 0), s1 - tl.cumsum(c1, 0), s2 - tl.cumsum(c2, 0))
        # Every candidate costs more than nothing, so what is left only falls: those before the first unpaid bin are all paid.
        n = tl.sum((rest >= 0).to(tl.int32), 0)
        s0 -= tl.sum(tl.where(step < n, c0, 0), 0)
        s1 -= tl.sum(tl.where(step < n, c1, 0), 0)
        s2 -= tl.sum(tl.where(step < n, c2, 0), 0)
        s0, s1, s2 = carried(s0, s1, s2)
        members -= tl.sum(count, 0)
        if n < _STEP:
            unpaid = first + n
            members = members * 0
        first += _STEP
    return unpaid, s0, s1, s2


@triton.jit
def affordable(bits, count, s0, s1, s2, tau0, tau1, exponent):
    """How many of `count` candidates with these bits the slack pays for; it cannot pay for all of them."""
    one = tl.full((), 1, tl.int64)
    c0, c1, c2 = cost_of(one, mantissa_of(bits), bits >> 23, tau0, tau1, exponent)
    c0, c1, c2 = carried(c0, c1, c2)
    paid = one - 1
    step = one
    while step * 2 < count:
        step *= 2
    while step > 0:
        more = paid + step
        _, _, rest = carried(s0 - more * c0, s1 - more * c1, s2 - more * c2)
        paid = tl.where((more < count) & (rest >= 0), more, paid)
        step = step // 2
    return paid
