"""Selection and loss in one cooperative launch: one sweep over the tokens, then only candidates.

The programs of the grid take blocks of BLOCK tokens in turn and meet at a barrier between phases; the last one to come decides
for all what happens next. Phases: sweep; second and third digit of the cut; its equals per block; sums of the kept candidates.
The first to find that nothing is (or is left) to be dropped ends the launch. docs/architecture.md says how the cut is found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cut import affordable, first_unpaid, slack_of
from .device import add_to_bins, exp_terms, is_finite, is_last, load, place, release, round_positive, store, wait

# Words of the int64 workspace, all 0 when the launch begins. Barriers: a counter and a gate for each of five.
BARRIER = 0
PREFIX = 10  # bits of the cut found so far; -1: nothing is dropped
SLACK = 11  # three limbs
N_EQUAL_DROPPED = 14
CUT_POSITION = 15
HISTOGRAMS = 16  # 2048 counts and 2048 sums; 1024 and 1024; 1024 counts
SLOTS = HISTOGRAMS + 2 * 2048 + 2 * 1024 + 1024  # for each of the following an array with one word per program

# Counts and sums that a program keeps in its own slots: it alone adds to them, block after block, so that the order of fp64
# sums is fixed, and no register holds them over the sweep.
LOW_SUM = 0
VALID = 1
REGION = 2
CANDIDATES = 3
CLIPPED = 4
BAD = 5
GONE = 6  # dropped by a given keep; the next: those of them in T
GONE_REGION = 7
DROPPED = 8
FIRST_BAD = 9  # 2^62 - position, so that the maximum is the first and 0 is none
RATIO_MAX = 10  # bits; a NaN is above all
GONE_MIN = 11  # bits of infinity - bits of the smallest v dropped by a given keep
POLICY = 12  # from here on fp64
KL = 13
V_SETTLED = 14
V_GONE = 15
RATIO = 16
EXCESS = 17
POLICY_CANDIDATES = 18  # as if all were kept
V_CANDIDATES = 19
POLICY_KEPT = 20
V_KEPT = 21
KINDS = 22

# What divides: Rule.normalizer, or denominators that were given.
DIVIDE_BY_VALID = 0
DIVIDE_BY_KEPT = 1
DIVIDE_BY_ONE = 2
DIVIDE_BY_GIVEN = 3

_BARRIER, _SLOTS = tl.constexpr(BARRIER), tl.constexpr(SLOTS)
_LOW_SUM, _VALID, _REGION = (tl.constexpr(x) for x in (LOW_SUM, VALID, REGION))
_CANDIDATES, _CLIPPED, _BAD, _GONE = (tl.constexpr(x) for x in (CANDIDATES, CLIPPED, BAD, GONE))
_GONE_REGION, _FIRST_BAD, _RATIO_MAX, _GONE_MIN = (tl.constexpr(x) for x in (GONE_REGION, FIRST_BAD, RATIO_MAX, GONE_MIN))
_DROPPED, _PREFIX, _SLACK, _N_EQUAL_DROPPED = (tl.constexpr(x) for x in (DROPPED, PREFIX, SLACK, N_EQUAL_DROPPED))
_CUT_POSITION = tl.constexpr(CUT_POSITION)
_FIRST_DIGIT = tl.constexpr(HISTOGRAMS)
_SECOND_DIGIT = tl.constexpr(HISTOGRAMS + 2 * 2048)
_THIRD_DIGIT = tl.constexpr(HISTOGRAMS + 2 * 2048 + 2 * 1024)
_POLICY, _KL, _V_SETTLED, _V_GONE = (tl.constexpr(x) for x in (POLICY, KL, V_SETTLED, V_GONE))
_RATIO, _EXCESS, _POLICY_CANDIDATES = (tl.constexpr(x) for x in (RATIO, EXCESS, POLICY_CANDIDATES))
_V_CANDIDATES, _POLICY_KEPT, _V_KEPT = (tl.constexpr(x) for x in (V_CANDIDATES, POLICY_KEPT, V_KEPT))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_TOP = tl.constexpr(1 << 62)
_TILE = tl.constexpr(1024)  # programs or blocks whose words are read at once


@triton.jit
def token_terms(
    log_probs, behavior, advantages, mask, reference, weights, keep,
    log_probs_s0, log_probs_s1, behavior_s0, behavior_s1, advantages_s0, advantages_s1, mask_s0, mask_s1,
    reference_s0, reference_s1, weights_s0, weights_s1, keep_s0, keep_s1,
    start, lane, first_row, row, column, left, whole,
    LOG_PROBS: tl.constexpr, BEHAVIOR: tl.constexpr, ADVANTAGES: tl.constexpr, MASK: tl.constexpr,
    REFERENCE: tl.constexpr, WEIGHTS: tl.constexpr, KEEP: tl.constexpr, SCOPE_ALL: tl.constexpr, DROP_BAD: tl.constexpr,
):  # fmt: skip
    """d, v, A, q, weight (0 where not valid), and the classes valid, bad, T, kept by a given selection."""
    current = load(log_probs, LOG_PROBS, start, lane, first_row, row, column, log_probs_s0, log_probs_s1, left, whole).to(tl.float32)
    old = load(behavior, BEHAVIOR, start, lane, first_row, row, column, behavior_s0, behavior_s1, left, whole).to(tl.float32)
    a = load(advantages, ADVANTAGES, start, lane, first_row, row, column, advantages_s0, advantages_s1, left, whole).to(tl.float32)
    valid = (load(mask, MASK, start, lane, first_row, row, column, mask_s0, mask_s1, left, whole) != 0) & (lane < left)
    d = current - old
    bad = valid & ~(is_finite(d) & is_finite(a))
    q = d
    if REFERENCE:
        q = load(reference, REFERENCE, start, lane, first_row, row, column, reference_s0, reference_s1, left, whole).to(tl.float32) - current
        bad = bad | (valid & ~is_finite(q))
    if DROP_BAD:
        valid = valid & ~bad
    d = tl.where(valid, d, 0.0)
    a = tl.where(valid, a, 0.0)
    q = tl.where(valid, q, 0.0)
    v = d * d
    if SCOPE_ALL:
        region = valid & (v == v)
    else:
        region = ((a > 0) & (d > 0)) | ((a < 0) & (d < 0))
    weight = valid.to(tl.float32)
    if WEIGHTS:
        weight = load(weights, WEIGHTS, start, lane, first_row, row, column, weights_s0, weights_s1, left, whole).to(tl.float32)
    kept = valid
    if KEEP:
        kept = load(keep, KEEP, start, lane, first_row, row, column, keep_s0, keep_s1, left, whole) != 0
    return d, v, a, q, weight, valid, bad, region, kept


@triton.jit
def _segment(block, list_counts, list_v, lane, BLOCK: tl.constexpr):
    """The candidates of a block, in the order of their positions: how many, which lanes, the bits of their v."""
    n = tl.load(list_counts + block)
    listed = lane < n
    v = tl.load(list_v + block * BLOCK + lane, mask=listed, other=0.0)
    return n, listed, v, v.to(tl.int32, bitcast=True)


@triton.jit
def _add(slots, kind, x):
    """Adds to this program's own slot, without waiting for it."""
    tl.atomic_add(slots + kind * tl.num_programs(0) + tl.program_id(0), x, sem="relaxed")


@triton.jit
def _raise_to(slots, kind, x):
    tl.atomic_max(slots + kind * tl.num_programs(0) + tl.program_id(0), x, sem="relaxed")


@triton.jit
def _total(slots, kind):
    """The sum over programs: a tree over the lanes, the same in every run."""
    lane = tl.arange(0, _TILE)
    programs = tl.num_programs(0)
    acc = tl.load(slots + kind * programs + lane, mask=lane < programs, other=0)
    first = _TILE
    while first < programs:
        acc += tl.load(slots + kind * programs + first + lane, mask=first + lane < programs, other=0)
        first += _TILE
    return tl.sum(acc, 0)


@triton.jit
def _highest(slots, kind):
    lane = tl.arange(0, _TILE)
    programs = tl.num_programs(0)
    acc = tl.load(slots + kind * programs + lane, mask=lane < programs, other=0)
    first = _TILE
    while first < programs:
        acc = tl.maximum(acc, tl.load(slots + kind * programs + first + lane, mask=first + lane < programs, other=0))
        first += _TILE
    return tl.max(acc, 0)


@triton.jit
def _share(x, n):
    return tl.where(n > 0, x.to(tl.float64) / tl.maximum(n, 1).to(tl.float64), 0.0)


@triton.jit
def _finish(
    work, sums, cut_bits, cut_position, policy_kind, v_kind,
    denominators, denominators_stride, loss, scales, cut, counts, floats, LOSS: tl.constexpr, DIVIDE_BY: tl.constexpr,
):  # fmt: skip
    """Loss, scales, cut and metrics, from what all programs left. Run by one program."""
    slots = work + _SLOTS
    valid, region, bad = _total(slots, _VALID), _total(slots, _REGION), _total(slots, _BAD)
    candidates, clipped, dropped = _total(slots, _CANDIDATES), _total(slots, _CLIPPED), _total(slots, _DROPPED)
    n_kept = region - _total(slots, _GONE_REGION) - dropped
    dropped += _total(slots, _GONE)
    settled = _total(sums, _V_SETTLED)
    v_all = settled + _total(sums, _V_GONE) + _total(sums, _V_CANDIDATES)
    gone_min = _INFINITY_BITS - _highest(slots, _GONE_MIN)
    top = tl.minimum(cut_bits, gone_min).to(tl.int32).to(tl.float32, bitcast=True)
    ratio_max = _highest(slots, _RATIO_MAX).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(cut, cut_bits)
    tl.store(cut + 1, cut_position)
    tl.store(counts + 0, valid)
    tl.store(counts + 1, region)
    tl.store(counts + 2, candidates)
    tl.store(counts + 3, dropped)
    tl.store(counts + 4, bad)
    tl.store(counts + 5, clipped)
    tl.store(counts + 6, tl.where(bad > 0, _TOP - _highest(slots, _FIRST_BAD), -1))
    tl.store(floats + 0, _share(v_all, region))
    tl.store(floats + 1, _share(settled + _total(sums, v_kind), n_kept))
    tl.store(floats + 2, _share(dropped, valid))
    tl.store(floats + 3, _share(region, valid))
    tl.store(floats + 4, top.to(tl.float64))
    tl.store(floats + 5, _share(_total(sums, _RATIO), valid))
    tl.store(floats + 6, ratio_max.to(tl.float64))
    tl.store(floats + 7, _share(_total(sums, _EXCESS), valid))
    tl.store(floats + 8, _share(clipped, valid))
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
            policy = _total(sums, _POLICY) + _total(sums, policy_kind)
            value = tl.where(policy_scale != 0, policy * policy_scale, 0.0)
            value += tl.where(kl_scale != 0, _total(sums, _KL) * kl_scale, 0.0)
            tl.store(loss, value.to(tl.float32))


_SCALARS = (
    "tokens", "columns", "tau0", "tau1", "exponent", "lowest_bin", "denominators_stride",
    *(f"{name}_s{axis}" for name in ("log_probs", "behavior", "advantages", "mask", "reference", "weights", "keep") for axis in "01"),
)  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS)
def forward_kernel(
    log_probs, behavior, advantages, mask, reference, weights, keep, denominators,
    work, sums, list_counts, list_v, list_term, list_offset, loss, keep_out, scales, cut, counts, floats,
    tokens: tl.int64, columns: tl.int64,
    log_probs_s0: tl.int64, log_probs_s1: tl.int64, behavior_s0: tl.int64, behavior_s1: tl.int64,
    advantages_s0: tl.int64, advantages_s1: tl.int64, mask_s0: tl.int64, mask_s1: tl.int64,
    reference_s0: tl.int64, reference_s1: tl.int64, weights_s0: tl.int64, weights_s1: tl.int64,
    keep_s0: tl.int64, keep_s1: tl.int64, denominators_stride: tl.int64,
    tau0: tl.int64, tau1: tl.int64, exponent: tl.int64, lowest_bin: tl.int64, candidate_above, scale, scale_rest,
    log_high, log_low, ratio_high, ratio_low, log_cap, cap, kl_coef,
    LOG_PROBS: tl.constexpr, BEHAVIOR: tl.constexpr, ADVANTAGES: tl.constexpr, MASK: tl.constexpr,
    REFERENCE: tl.constexpr, WEIGHTS: tl.constexpr, KEEP: tl.constexpr,
    SCOPE_ALL: tl.constexpr, CLIP: tl.constexpr, CAPPED: tl.constexpr, DROP_BAD: tl.constexpr,
    LOSS: tl.constexpr, DIVIDE_BY: tl.constexpr, BLOCK: tl.constexpr, CROWD: tl.constexpr,
):  # fmt: skip
    """LOSS: 0 writes keep_out (select), 1 one loss, 2 a loss for each token. See the module's docstring for the phases."""
    programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    tokens = tokens.to(tl.int64)
    columns = columns.to(tl.int64)
    tau0, tau1 = tau0.to(tl.int64), tau1.to(tl.int64)
    exponent = exponent.to(tl.int64)
    blocks = (tokens + BLOCK - 1) // BLOCK
    mine = tl.program_id(0).to(tl.int64)

    slots = work + _SLOTS
    block = mine
    while block < blocks:
        start = block * BLOCK
        left = tl.minimum(tokens - start, BLOCK).to(tl.int32)
        whole = left == BLOCK
        first_row, row, column = place(start, columns, lane)
        d, v, a, q, weight, valid, bad, region, kept = token_terms(
            log_probs, behavior, advantages, mask, reference, weights, keep,
            log_probs_s0, log_probs_s1, behavior_s0, behavior_s1, advantages_s0, advantages_s1, mask_s0, mask_s1,
            reference_s0, reference_s1, weights_s0, weights_s1, keep_s0, keep_s1,
            start, lane, first_row, row, column, left, whole,
            LOG_PROBS, BEHAVIOR, ADVANTAGES, MASK, REFERENCE, WEIGHTS, KEEP, SCOPE_ALL, DROP_BAD,
        )  # fmt: skip
        bad_here = bad.to(tl.int64)
        if CLIP or KEEP:
            over = region & (lane < 0)
        else:
            over = region & (v > candidate_above)
        gone = valid & ~kept
        settled = region & ~over & ~gone

        ratio, minus_one = exp_terms(d)
        excess = minus_one - d
        ratio = tl.where(valid, ratio, 0.0)
        up, down = (a > 0) & (d > log_high), (a < 0) & (d < log_low)
        clipped = up | down
        v_settled = tl.where(settled, v, 0.0)
        low = round_positive(v_settled * scale * scale_rest).to(tl.int32).to(tl.int64)
        _add(slots, _LOW_SUM, tl.sum(low, 0))
        # Five counts of at most 2^11 in one sum.
        packed = valid.to(tl.int64) + (region.to(tl.int64) << 12) + (over.to(tl.int64) << 24)
        packed = tl.sum(packed + (clipped.to(tl.int64) << 36) + (bad_here << 48), 0)
        n_over = ((packed >> 24) & 0xFFF).to(tl.int32)
        n_clipped, n_bad = (packed >> 36) & 0xFFF, packed >> 48
        _add(slots, _VALID, packed & 0xFFF)
        _add(slots, _REGION, (packed >> 12) & 0xFFF)
        if n_clipped > 0:
            _add(slots, _CLIPPED, n_clipped)
        if n_bad > 0:
            _add(slots, _BAD, n_bad)
            _raise_to(slots, _FIRST_BAD, tl.max(tl.where(bad, _TOP - (start + lane), 0), 0))
        ratio_bits = ratio.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        _raise_to(slots, _RATIO_MAX, tl.max(ratio_bits, 0).to(tl.int64))
        _add(sums, _V_SETTLED, tl.sum(v_settled.to(tl.float64), 0))
        _add(sums, _RATIO, tl.sum(ratio.to(tl.float64), 0))
        _add(sums, _EXCESS, tl.sum(excess.to(tl.float64), 0))
        if KEEP:
            _add(slots, _GONE, tl.sum(gone.to(tl.int64), 0))
            _add(slots, _GONE_REGION, tl.sum((gone & region).to(tl.int64), 0))
            _add(sums, _V_GONE, tl.sum(tl.where(gone & region, v, 0.0).to(tl.float64), 0))
            above = tl.where(gone, _INFINITY_BITS - v.to(tl.int32, bitcast=True), 0)
            _raise_to(slots, _GONE_MIN, tl.max(above, 0).to(tl.int64))

        nothing = tl.zeros((BLOCK,), tl.float32)
        term = nothing
        if LOSS:
            weighed = ratio
            if CLIP:
                weighed = tl.where(up, ratio_high, tl.where(down, ratio_low, weighed))
            if CAPPED:
                weighed = tl.where((a < 0) & (d > log_cap), cap, weighed)
            policy = -(weighed * a)
            kl = nothing
            if WEIGHTS:
                policy = policy * weight
            if REFERENCE:
                _, pull = exp_terms(q)
                kl = tl.where(valid, kl_coef * (pull - q), 0.0)
                if WEIGHTS:
                    kl = tl.where(valid, kl * weight, 0.0)
            flows = (a != 0) & ~gone
            if LOSS == 1:
                settled_policy = tl.where(flows & ~over, policy, 0.0)
                _add(sums, _POLICY, tl.sum(settled_policy.to(tl.float64), 0))
                if REFERENCE:
                    _add(sums, _KL, tl.sum(kl.to(tl.float64), 0))
                term = tl.where(flows, policy, 0.0)  # what a kept candidate adds
            else:
                both = tl.where(flows, policy, 0.0) + kl  # as if all candidates were kept
                store(loss, 1, start, lane, first_row, row, column, 0, 0, left, whole, both)
                term = kl  # what a dropped candidate leaves
        else:
            store(keep_out, 1, start, lane, first_row, row, column, 0, 0, left, whole, valid)

        tl.store(list_counts + block, n_over)
        if n_over > 0:
            bits = v.to(tl.int32, bitcast=True)
            at = tl.cumsum(over.to(tl.int32), 0) - 1
            tl.store(list_v + start + at, v, mask=over)
            tl.store(list_offset + start + at, lane.to(tl.int16), mask=over)
            if LOSS:
                tl.store(list_term + start + at, term, mask=over)
            mantissas = (bits & 0x7FFFFF) | tl.where(bits >> 23 > 0, 0x800000, 0)
            add_to_bins(work + _FIRST_DIGIT, bits >> 20, mantissas, over, n_over, 2048, True, CROWD)
            _add(slots, _CANDIDATES, n_over.to(tl.int64))
            _add(sums, _V_CANDIDATES, tl.sum(tl.where(over, v, 0.0).to(tl.float64), 0))
            if LOSS == 1:
                _add(sums, _POLICY_CANDIDATES, tl.sum(tl.where(over, term, 0.0).to(tl.float64), 0))
        block += programs

    # First digit: the top 11 bits of v (its sign is 0), so that a bin has one exponent.
    if is_last(work + _BARRIER, programs):
        zero, members = blocks * 0, _total(slots, _CANDIDATES)
        low_count = _total(slots, _REGION) - members - _total(slots, _GONE_REGION)
        s0, s1, s2 = slack_of(low_count, _total(slots, _LOW_SUM), tau0, tau1)
        lowest = lowest_bin.to(tl.int64)
        n, s0, s1, s2 = first_unpaid(
            work + _FIRST_DIGIT, zero, lowest, members, s0, s1, s2, tau0, tau1, exponent, 2048, 20
        )  # fmt: skip
        if n == 2048:
            tl.store(work + _PREFIX, blocks * 0 - 1)
            none = blocks * 0 + _INFINITY_BITS
            _finish(
                work, sums, none, blocks * 0 - 1, _POLICY_CANDIDATES, _V_CANDIDATES,
                denominators, denominators_stride, loss, scales, cut, counts, floats, LOSS, DIVIDE_BY,
            )  # fmt: skip
        else:
            tl.store(work + _PREFIX, n)
            tl.store(work + _SLACK, s0)
            tl.store(work + _SLACK + 1, s1)
            tl.store(work + _SLACK + 2, s2)
        release(work + _BARRIER + 1)
    else:
        wait(work + _BARRIER + 1)
    prefix = tl.load(work + _PREFIX, volatile=True)
    if prefix >= 0:
        _drop(
            work, sums, list_counts, list_v, list_term, list_offset, loss, keep_out, prefix, blocks, programs, lane,
            tau0, tau1, exponent, denominators, denominators_stride, scales, cut, counts, floats, LOSS, DIVIDE_BY, BLOCK, CROWD,
        )  # fmt: skip


@triton.jit
def _drop(
    work, sums, list_counts, list_v, list_term, list_offset, loss, keep_out, prefix, blocks, programs, lane,
    tau0, tau1, exponent, denominators, denominators_stride, scales, cut, counts, floats,
    LOSS: tl.constexpr, DIVIDE_BY: tl.constexpr, BLOCK: tl.constexpr, CROWD: tl.constexpr,
):  # fmt: skip
    """The phases after the first digit. `prefix`: the bin of the first digit in which the slack runs out."""
    mine = tl.program_id(0).to(tl.int64)
    block = mine
    while block < blocks:
        n, listed, _, bits = _segment(block, list_counts, list_v, lane, BLOCK)
        if n > 0:
            chosen = listed & (bits >> 20 == prefix)
            n_chosen = tl.sum(chosen.to(tl.int32), 0)
            mantissas = (bits & 0x7FFFFF) | tl.where(bits >> 23 > 0, 0x800000, 0)
            digit = (bits >> 10) & 1023
            add_to_bins(work + _SECOND_DIGIT, digit, mantissas, chosen, n_chosen, 1024, True, CROWD)
        block += programs
    if is_last(work + _BARRIER + 2, programs):
        s0, s1, s2 = tl.load(work + _SLACK), tl.load(work + _SLACK + 1), tl.load(work + _SLACK + 2)
        members = tl.load(work + _FIRST_DIGIT + prefix)
        n, s0, s1, s2 = first_unpaid(work + _SECOND_DIGIT, prefix, prefix * 0, members, s0, s1, s2, tau0, tau1, exponent, 1024, 10)
        tl.store(work + _PREFIX, prefix * 1024 + n)
        tl.store(work + _SLACK, s0)
        tl.store(work + _SLACK + 1, s1)
        tl.store(work + _SLACK + 2, s2)
        release(work + _BARRIER + 3)
    else:
        wait(work + _BARRIER + 3)
    prefix = tl.load(work + _PREFIX, volatile=True)

    block = mine
    while block < blocks:
        n, listed, _, bits = _segment(block, list_counts, list_v, lane, BLOCK)
        if n > 0:
            chosen = listed & (bits >> 10 == prefix)
            n_chosen = tl.sum(chosen.to(tl.int32), 0)
            add_to_bins(work + _THIRD_DIGIT, bits & 1023, bits, chosen, n_chosen, 1024, False, CROWD)
        block += programs
    if is_last(work + _BARRIER + 4, programs):
        s0, s1, s2 = tl.load(work + _SLACK), tl.load(work + _SLACK + 1), tl.load(work + _SLACK + 2)
        members = tl.load(work + _SECOND_DIGIT + prefix % 1024)
        n, s0, s1, s2 = first_unpaid(work + _THIRD_DIGIT, prefix, prefix * 0, members, s0, s1, s2, tau0, tau1, exponent, 1024, 0)
        equal = tl.load(work + _THIRD_DIGIT + n)
        value = prefix * 1024 + n
        tl.store(work + _N_EQUAL_DROPPED, equal - affordable(value, equal, s0, s1, s2, tau0, tau1, exponent))
        tl.store(work + _PREFIX, value)
        release(work + _BARRIER + 5)
    else:
        wait(work + _BARRIER + 5)
    value = tl.load(work + _PREFIX, volatile=True)

    # How many candidates of each block equal the cut.
    equals = list_counts + blocks
    block = mine
    while block < blocks:
        n, listed, _, bits = _segment(block, list_counts, list_v, lane, BLOCK)
        tl.store(equals + block, tl.sum((listed & (bits == value)).to(tl.int32), 0))
        block += programs
    if is_last(work + _BARRIER + 6, programs):
        n_dropped = tl.load(work + _N_EQUAL_DROPPED)
        tl.store(work + _CUT_POSITION, _position(equals, list_v, list_offset, list_counts, value, n_dropped, blocks, lane, BLOCK))
        release(work + _BARRIER + 7)
    else:
        wait(work + _BARRIER + 7)
    last = tl.load(work + _CUT_POSITION, volatile=True)

    block = mine
    while block < blocks:
        n, listed, v, bits = _segment(block, list_counts, list_v, lane, BLOCK)
        if n > 0:
            beyond = listed & (bits >= value)
            position = block * BLOCK + tl.load(list_offset + block * BLOCK + lane, mask=beyond, other=0)
            dropped = beyond & ((bits > value) | (position <= last))
            _add(work + _SLOTS, _DROPPED, tl.sum(dropped.to(tl.int64), 0))
            _add(sums, _V_KEPT, tl.sum(tl.where(listed & ~dropped, v, 0.0).to(tl.float64), 0))
            if LOSS == 0:
                tl.store(keep_out + position, dropped & ~dropped, mask=dropped)
            elif LOSS == 1:
                policy = tl.load(list_term + block * BLOCK + lane, mask=listed & ~dropped, other=0.0)
                _add(sums, _POLICY_KEPT, tl.sum(policy.to(tl.float64), 0))
            else:
                rest = tl.load(list_term + block * BLOCK + lane, mask=dropped, other=0.0)
                tl.store(loss + position, rest, mask=dropped)
        block += programs
    if is_last(work + _BARRIER + 8, programs):
        _finish(
            work, sums, value, last, _POLICY_KEPT, _V_KEPT,
            denominators, denominators_stride, loss, scales, cut, counts, floats, LOSS, DIVIDE_BY,
        )  # fmt: skip


@triton.jit
def _position(equals, list_v, list_offset, list_counts, value, n_dropped, blocks, lane, BLOCK: tl.constexpr):
    """The position of the n-th of the candidates that equal the cut: its block by the counts, then its place in the block."""
    tile = tl.arange(0, _TILE)
    first = blocks * 0
    found, passed, before = first, first, first
    while first < blocks:
        here = tl.load(equals + first + tile, mask=first + tile < blocks, other=0).to(tl.int64)
        through = before + tl.cumsum(here, 0)
        early = (through < n_dropped) & (first + tile < blocks)
        found += tl.sum(early.to(tl.int64), 0)
        passed += tl.sum(tl.where(early, here, 0), 0)
        before += tl.sum(here, 0)
        first += _TILE
    listed = lane < tl.load(list_counts + found)
    bits = tl.load(list_v + found * BLOCK + lane, mask=listed, other=0.0).to(tl.int32, bitcast=True)
    through = passed + tl.cumsum((listed & (bits == value)).to(tl.int64), 0)
    at = tl.sum((listed & (through < n_dropped)).to(tl.int32), 0)
    return found * BLOCK + tl.load(list_offset + found * BLOCK + at).to(tl.int64)
