"""The workspace of the forward kernel: where each word is, and how programs add to it and read it."""

from __future__ import annotations

import triton
import triton.language as tl

# Words of the int64 workspace, all 0 when the launch begins. Barriers: a counter and a gate for each of five.
BARRIER = tl.constexpr(0)
PREFIX = tl.constexpr(10)  # bits of the cut found so far; -1: nothing is dropped
SLACK = tl.constexpr(11)  # three limbs
N_EQUAL_DROPPED = tl.constexpr(14)
CUT_POSITION = tl.constexpr(15)
FIRST_DIGIT = tl.constexpr(16)  # 2048 counts and 2048 sums
SECOND_DIGIT = tl.constexpr(FIRST_DIGIT.value + 2 * 2048)  # 1024 and 1024
THIRD_DIGIT = tl.constexpr(SECOND_DIGIT.value + 2 * 1024)  # 1024 counts
SLOTS = tl.constexpr(THIRD_DIGIT.value + 1024)  # for each of the following an array with one word per program

# Counts and sums that a program keeps in its own slots: it alone adds to them, block after block, so that the order of fp64
# sums is fixed, and no register holds them over the sweep.
LOW_SUM = tl.constexpr(0)
VALID = tl.constexpr(1)
REGION = tl.constexpr(2)
CANDIDATES = tl.constexpr(3)
CLIPPED = tl.constexpr(4)
BAD = tl.constexpr(5)
GONE = tl.constexpr(6)  # dropped by a given keep; the next: those of them in T
GONE_REGION = tl.constexpr(7)
DROPPED = tl.constexpr(8)
FIRST_BAD = tl.constexpr(9)  # 2^62 - position, so that the maximum is the first and 0 is none
RATIO_MAX = tl.constexpr(10)  # bits; a NaN is above all
GONE_MIN = tl.constexpr(11)  # bits of infinity - bits of the smallest v dropped by a given keep
POLICY = tl.constexpr(12)  # from here on fp64
KL = tl.constexpr(13)
V_SETTLED = tl.constexpr(14)
V_GONE = tl.constexpr(15)
RATIO = tl.constexpr(16)
EXCESS = tl.constexpr(17)
POLICY_CANDIDATES = tl.constexpr(18)  # as if all were kept
V_CANDIDATES = tl.constexpr(19)
POLICY_KEPT = tl.constexpr(20)
V_KEPT = tl.constexpr(21)
KINDS = tl.constexpr(22)

TOP = tl.constexpr(1 << 62)
TILE = tl.constexpr(1024)  # programs or blocks whose words are read at once


@triton.jit
def add(slots, kind, x):
    """Adds to this program's own slot, without waiting for it."""
    tl.atomic_add(slots + kind * tl.num_programs(0) + tl.program_id(0), x, sem="relaxed")


@triton.jit
def raise_to(slots, kind, x):
    tl.atomic_max(slots + kind * tl.num_programs(0) + tl.program_id(0), x, sem="relaxed")


@triton.jit
def total(slots, kind):
    """The sum over programs: a tree over the lanes, the same in every run."""
    lane = tl.arange(0, TILE)
    programs = tl.num_programs(0)
    acc = tl.load(slots + kind * programs + lane, mask=lane < programs, other=0)
    first = TILE
    while first < programs:
        acc += tl.load(slots + kind * programs + first + lane, mask=first + lane < programs, other=0)
        first += TILE
    return tl.sum(acc, 0)


@triton.jit
def highest(slots, kind):
    lane = tl.arange(0, TILE)
    programs = tl.num_programs(0)
    acc = tl.load(slots + kind * programs + lane, mask=lane < programs, other=0)
    first = TILE
    while first < programs:
        acc = tl.maximum(acc, tl.load(slots + kind * programs + first + lane, mask=first + lane < programs, other=0))
        first += TILE
    return tl.max(acc, 0)
