"""After the sweep: the cut from the candidates alone, their sums, and the end of every launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .cut import affordable, first_unpaid
from .device import add_to_bins, is_last, release, wait
from .words import (
    BAD,
    BARRIER,
    CANDIDATES,
    CLIPPED,
    CUT_POSITION,
    DROPPED,
    EXCESS,
    FIRST_BAD,
    FIRST_DIGIT,
    GONE,
    GONE_MIN,
    GONE_REGION,
    KL,
    N_EQUAL_DROPPED,
    POLICY,
    POLICY_KEPT,
    PREFIX,
    RATIO,
    RATIO_MAX,
    REGION,
    SECOND_DIGIT,
    SLACK,
    SLOTS,
    THIRD_DIGIT,
    TILE,
    TOP,
    V_CANDIDATES,
    V_GONE,
    V_KEPT,
    V_SETTLED,
    VALID,
    add,
    highest,
    total,
)

_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def segment(block, list_counts, list_v, lane, BLOCK: tl.constexpr):
    """The candidates of a block, in the order of their positions: how many, which lanes, the bits of their v."""
    n = tl.load(list_counts + block)
    listed = lane < n
    v = tl.load(list_v + block * BLOCK + lane, mask=listed, other=0.0)
    return n, listed, v, v.to(tl.int32, bitcast=True)


@triton.jit
def share(x, n):
    return tl.where(n > 0, x.to(tl.float64) / tl.maximum(n, 1).to(tl.float64), 0.0)


@triton.jit
def finish(
    work, sums, cut_bits, cut_position, policy_kind, v_kind,
    denominators, denominators_stride, loss, scales, cut, counts, floats, LOSS: tl.constexpr, DIVIDE_BY: tl.constexpr,
):  # fmt: skip
    """Loss, scales, cut and metrics, from what all programs left. Run by one program."""
    slots = work + SLOTS
    valid, region, bad = total(slots, VALID), total(slots, REGION), total(slots, BAD)
    candidates, clipped, dropped = total(slots, CANDIDATES), total(slots, CLIPPED), total(slots, DROPPED)
    n_kept = region - total(slots, GONE_REGION) - dropped
    dropped += total(slots, GONE)
    settled = total(sums, V_SETTLED)
    v_all = settled + total(sums, V_GONE) + total(sums, V_CANDIDATES)
    gone_min = _INFINITY_BITS - highest(slots, GONE_MIN)
    top = tl.minimum(cut_bits, gone_min).to(tl.int32).to(tl.float32, bitcast=True)
    ratio_max = highest(slots, RATIO_MAX).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(cut, cut_bits)
    tl.store(cut + 1, cut_position)
    tl.store(counts + 0, valid)
    tl.store(counts + 1, region)
    tl.store(counts + 2, candidates)
    tl.store(counts + 3, dropped)
    tl.store(counts + 4, bad)
    tl.store(counts + 5, clipped)
    tl.store(counts + 6, tl.where(bad > 0, TOP - highest(slots, FIRST_BAD), -1))
    tl.store(floats + 0, share(v_all, region))
    tl.store(floats + 1, share(settled + total(sums, v_kind), n_kept))
    tl.store(floats + 2, share(dropped, valid))
    tl.store(floats + 3, share(region, valid))
    tl.store(floats + 4, top.to(tl.float64))
    tl.store(floats + 5, share(total(sums, RATIO), valid))
    tl.store(floats + 6, ratio_max.to(tl.float64))
    tl.store(floats + 7, share(total(sums, EXCESS), valid))
    tl.store(floats + 8, share(clipped, valid))
    if LOSS:
        n_policy = valid.to(tl.float64)
        n_kl = n_policy
        if DIVIDE_BY == 1:
            n_policy = (valid - dropped).to(tl.float64)
        if DIVIDE_BY == 2:
            n_policy = tl.full((), 1.0, tl.float64)
            n_kl = n_policy
        if DIVIDE_BY == 3:
            n_policy = tl.load(denominators)
            n_kl = tl.load(denominators + denominators_stride)
        # A scale of 0 says that there is nothing to divide by: the loss is then 0, whatever the sums hold.
        policy_scale = tl.where(n_policy != 0, 1.0 / tl.where(n_policy != 0, n_policy, 1.0), 0.0)
        kl_scale = tl.where(n_kl != 0, 1.0 / tl.where(n_kl != 0, n_kl, 1.0), 0.0)
        tl.store(scales, policy_scale)
        tl.store(scales + 1, kl_scale)
        if LOSS == 1:
            policy = total(sums, POLICY) + total(sums, policy_kind)
            value = tl.where(policy_scale != 0, policy * policy_scale, 0.0)
            value += tl.where(kl_scale != 0, total(sums, KL) * kl_scale, 0.0)
            tl.store(loss, value.to(tl.float32))


@triton.jit
def drop(
    work, sums, list_counts, list_v, list_term, list_offset, loss, keep_out, prefix, blocks, programs, lane,
    tau0, tau1, exponent, denominators, denominators_stride, scales, cut, counts, floats,
    LOSS: tl.constexpr, DIVIDE_BY: tl.constexpr, BLOCK: tl.constexpr, CROWD: tl.constexpr,
):  # fmt: skip
    """The phases after the first digit. `prefix`: the bin of the first digit in which the slack runs out."""
    mine = tl.program_id(0).to(tl.int64)
    block = mine
    while block < blocks:
        n, listed, _, bits = segment(block, list_counts, list_v, lane, BLOCK)
        if n > 0:
            chosen = listed & (bits >> 20 == prefix)
            n_chosen = tl.sum(chosen.to(tl.int32), 0)
            mantissas = (bits & 0x7FFFFF) | tl.where(bits >> 23 > 0, 0x800000, 0)
            digit = (bits >> 10) & 1023
            add_to_bins(work + SECOND_DIGIT, digit, mantissas, chosen, n_chosen, 1024, True, CROWD)
        block += programs
    if is_last(work + BARRIER + 2, programs):
        s0, s1, s2 = tl.load(work + SLACK), tl.load(work + SLACK + 1), tl.load(work + SLACK + 2)
        members = tl.load(work + FIRST_DIGIT + prefix)
        n, s0, s1, s2 = first_unpaid(work + SECOND_DIGIT, prefix, prefix * 0, members, s0, s1, s2, tau0, tau1, exponent, 1024, 10)
        tl.store(work + PREFIX, prefix * 1024 + n)
        tl.store(work + SLACK, s0)
        tl.store(work + SLACK + 1, s1)
        tl.store(work + SLACK + 2, s2)
        release(work + BARRIER + 3)
    else:
        wait(work + BARRIER + 3)
    prefix = tl.load(work + PREFIX, volatile=True)

    block = mine
    while block < blocks:
        n, listed, _, bits = segment(block, list_counts, list_v, lane, BLOCK)
        if n > 0:
            chosen = listed & (bits >> 10 == prefix)
            n_chosen = tl.sum(chosen.to(tl.int32), 0)
            add_to_bins(work + THIRD_DIGIT, bits & 1023, bits, chosen, n_chosen, 1024, False, CROWD)
        block += programs
    if is_last(work + BARRIER + 4, programs):
        s0, s1, s2 = tl.load(work + SLACK), tl.load(work + SLACK + 1), tl.load(work + SLACK + 2)
        members = tl.load(work + SECOND_DIGIT + prefix % 1024)
        n, s0, s1, s2 = first_unpaid(work + THIRD_DIGIT, prefix, prefix * 0, members, s0, s1, s2, tau0, tau1, exponent, 1024, 0)
        equal = tl.load(work + THIRD_DIGIT + n)
        value = prefix * 1024 + n
        tl.store(work + N_EQUAL_DROPPED, equal - affordable(value, equal, s0, s1, s2, tau0, tau1, exponent))
        tl.store(work + PREFIX, value)
        release(work + BARRIER + 5)
    else:
        wait(work + BARRIER + 5)
    value = tl.load(work + PREFIX, volatile=True)

    # How many candidates of each block equal the cut.
    equals = list_counts + blocks
    block = mine
    while block < blocks:
        n, listed, _, bits = segment(block, list_counts, list_v, lane, BLOCK)
        tl.store(equals + block, tl.sum((listed & (bits == value)).to(tl.int32), 0))
        block += programs
    if is_last(work + BARRIER + 6, programs):
        n_dropped = tl.load(work + N_EQUAL_DROPPED)
        tl.store(
            work + CUT_POSITION, position_of(equals, list_v, list_offset, list_counts, value, n_dropped, blocks, lane, BLOCK)
        )
        release(work + BARRIER + 7)
    else:
        wait(work + BARRIER + 7)
    last = tl.load(work + CUT_POSITION, volatile=True)

    block = mine
    while block < blocks:
        n, listed, v, bits = segment(block, list_counts, list_v, lane, BLOCK)
        if n > 0:
            beyond = listed & (bits >= value)
            position = block * BLOCK + tl.load(list_offset + block * BLOCK + lane, mask=beyond, other=0)
            dropped = beyond & ((bits > value) | (position <= last))
            add(work + SLOTS, DROPPED, tl.sum(dropped.to(tl.int64), 0))
            add(sums, V_KEPT, tl.sum(tl.where(listed & ~dropped, v, 0.0).to(tl.float64), 0))
            if LOSS == 0:
                tl.store(keep_out + position, dropped & ~dropped, mask=dropped)
            elif LOSS == 1:
                policy = tl.load(list_term + block * BLOCK + lane, mask=listed & ~dropped, other=0.0)
                add(sums, POLICY_KEPT, tl.sum(policy.to(tl.float64), 0))
            else:
                rest = tl.load(list_term + block * BLOCK + lane, mask=dropped, other=0.0)
                tl.store(loss + position, rest, mask=dropped)
        block += programs
    if is_last(work + BARRIER + 8, programs):
        finish(
            work, sums, value, last, POLICY_KEPT, V_KEPT,
            denominators, denominators_stride, loss, scales, cut, counts, floats, LOSS, DIVIDE_BY,
        )  # fmt: skip


@triton.jit
def position_of(equals, list_v, list_offset, list_counts, value, n_dropped, blocks, lane, BLOCK: tl.constexpr):
    """The position of the n-th of the candidates that equal the cut: its block by the counts, then its place in the block."""
    tile = tl.arange(0, TILE)
    first = blocks * 0
    found, passed, before = first, first, first
    while first < blocks:
        here = tl.load(equals + first + tile, mask=first + tile < blocks, other=0).to(tl.int64)
        through = before + tl.cumsum(here, 0)
        early = (through < n_dropped) & (first + tile < blocks)
        found += tl.sum(early.to(tl.int64), 0)
        passed += tl.sum(tl.where(early, here, 0), 0)
        before += tl.sum(here, 0)
        first += TILE
    listed = lane < tl.load(list_counts + found)
    bits = tl.load(list_v + found * BLOCK + lane, mask=listed, other=0.0).to(tl.int32, bitcast=True)
    through = passed + tl.cumsum((listed & (bits == value)).to(tl.int64), 0)
    at = tl.sum((listed & (through < n_dropped)).to(tl.int32), 0)
    return found * BLOCK + tl.load(list_offset + found * BLOCK + at).to(tl.int64)
