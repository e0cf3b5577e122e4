"""Selection and loss in one cooperative launch: one sweep over the tokens, then only candidates.

The programs of the grid take blocks of BLOCK tokens in turn and meet at a barrier between phases; the last one to come decides
for all what happens next. Phases: sweep; second and third digit of the cut; its equals per block; sums of the kept candidates.
The first to find that nothing is (or is left) to be dropped ends the launch. docs/architecture.md says how the cut is found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cut import first_unpaid, slack_of
from .device import FLAT, add_to_bins, exp_terms, is_finite, is_last, load, place, release, round_positive, store, wait
from .drop import drop, finish
from .words import (
    BAD,
    BARRIER,
    CANDIDATES,
    CLIPPED,
    EXCESS,
    FIRST_BAD,
    FIRST_DIGIT,
    GONE,
    GONE_MIN,
    GONE_REGION,
    KL,
    LOW_SUM,
    POLICY,
    POLICY_CANDIDATES,
    PREFIX,
    RATIO,
    RATIO_MAX,
    REGION,
    SLACK,
    SLOTS,
    TOP,
    V_CANDIDATES,
    V_GONE,
    V_SETTLED,
    VALID,
    add,
    raise_to,
    total,
)

# What divides: Rule.normalizer, or denominators that were given.
DIVIDE_BY_VALID = 0
DIVIDE_BY_KEPT = 1
DIVIDE_BY_ONE = 2
DIVIDE_BY_GIVEN = 3

_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def token_terms(
    log_probs, behavior, advantages, mask, reference, weights, keep,
    log_probs_s0, log_probs_s1, behavior_s0, behavior_s1, advantages_s0, advantages_s1, mask_s0, mask_s1,
    reference_s0, reference_s1, weights_s0, weights_s1, keep_s0, keep_s1,
    at,
    LOG_PROBS: tl.constexpr, BEHAVIOR: tl.constexpr, ADVANTAGES: tl.constexpr, MASK: tl.constexpr,
    REFERENCE: tl.constexpr, WEIGHTS: tl.constexpr, KEEP: tl.constexpr, SCOPE_ALL: tl.constexpr, DROP_BAD: tl.constexpr,
):  # fmt: skip
    """d, v, A, q, weight (0 where not valid), and the classes valid, bad, T, kept by a given selection."""
    _, lane, _, _, _, _, left, _ = at
    current = load(log_probs, LOG_PROBS, at, log_probs_s0, log_probs_s1).to(tl.float32)
    old = load(behavior, BEHAVIOR, at, behavior_s0, behavior_s1).to(tl.float32)
    a = load(advantages, ADVANTAGES, at, advantages_s0, advantages_s1).to(tl.float32)
    valid = (load(mask, MASK, at, mask_s0, mask_s1) != 0) & (lane < left)
    d = current - old
    bad = valid & ~(is_finite(d) & is_finite(a))
    q = d
    if REFERENCE:
        q = load(reference, REFERENCE, at, reference_s0, reference_s1).to(tl.float32) - current
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
        weight = load(weights, WEIGHTS, at, weights_s0, weights_s1).to(tl.float32)
    kept = valid
    if KEEP:
        kept = load(keep, KEEP, at, keep_s0, keep_s1) != 0
    return d, v, a, q, weight, valid, bad, region, kept


_SCALARS = (
    "tokens", "columns", "tau0", "tau1", "exponent", "lowest_bin", "denominators_stride",
    *(
        f"{name}_s{axis}"
        for name in ("log_probs", "behavior", "advantages", "mask", "reference", "weights", "keep")
        for axis in "01"
    ),
)  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS)
def forward_kernel(
    log_probs, behavior, advantages, mask, reference, weights, keep, denominators,
    work, sums, list_counts, list_v, list_term, list_offset, loss, keep_out, scales, cut, counts, floats,
    tokens: tl.int64, columns: tl.int64,
    log_probs_s0, log_probs_s1, behavior_s0, behavior_s1,
    advantages_s0, advantages_s1, mask_s0, mask_s1,
    reference_s0, reference_s1, weights_s0, weights_s1,
    keep_s0, keep_s1, denominators_stride,
    tau0, tau1, exponent, lowest_bin, candidate_above, scale, scale_rest,
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

    slots = work + SLOTS
    block = mine
    while block < blocks:
        start = block * BLOCK
        at = place(start, tokens, columns, BLOCK)
        d, v, a, q, weight, valid, bad, region, kept = token_terms(
            log_probs, behavior, advantages, mask, reference, weights, keep,
            log_probs_s0, log_probs_s1, behavior_s0, behavior_s1, advantages_s0, advantages_s1, mask_s0, mask_s1,
            reference_s0, reference_s1, weights_s0, weights_s1, keep_s0, keep_s1,
            at,
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
        add(slots, LOW_SUM, tl.sum(low, 0))
        # Five counts of at most 2^11 in one sum.
        packed = valid.to(tl.int64) + (region.to(tl.int64) << 12) + (over.to(tl.int64) << 24)
        packed = tl.sum(packed + (clipped.to(tl.int64) << 36) + (bad_here << 48), 0)
        n_over = ((packed >> 24) & 0xFFF).to(tl.int32)
        n_clipped, n_bad = (packed >> 36) & 0xFFF, packed >> 48
        add(slots, VALID, packed & 0xFFF)
        add(slots, REGION, (packed >> 12) & 0xFFF)
        if n_clipped > 0:
            add(slots, CLIPPED, n_clipped)
        if n_bad > 0:
            add(slots, BAD, n_bad)
            raise_to(slots, FIRST_BAD, tl.max(tl.where(bad, TOP - (start + lane), 0), 0))
        ratio_bits = ratio.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        raise_to(slots, RATIO_MAX, tl.max(ratio_bits, 0).to(tl.int64))
        add(sums, V_SETTLED, tl.sum(v_settled.to(tl.float64), 0))
        add(sums, RATIO, tl.sum(ratio.to(tl.float64), 0))
        add(sums, EXCESS, tl.sum(excess.to(tl.float64), 0))
        if KEEP:
            add(slots, GONE, tl.sum(gone.to(tl.int64), 0))
            add(slots, GONE_REGION, tl.sum((gone & region).to(tl.int64), 0))
            add(sums, V_GONE, tl.sum(tl.where(gone & region, v, 0.0).to(tl.float64), 0))
            above = tl.where(gone, _INFINITY_BITS - v.to(tl.int32, bitcast=True), 0)
            raise_to(slots, GONE_MIN, tl.max(above, 0).to(tl.int64))

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
                add(sums, POLICY, tl.sum(settled_policy.to(tl.float64), 0))
                if REFERENCE:
                    add(sums, KL, tl.sum(kl.to(tl.float64), 0))
                term = tl.where(flows, policy, 0.0)  # what a kept candidate adds
            else:
                both = tl.where(flows, policy, 0.0) + kl  # as if all candidates were kept
                store(loss, FLAT, at, 0, 0, both)
                term = kl  # what a dropped candidate leaves
        else:
            store(keep_out, FLAT, at, 0, 0, valid)

        tl.store(list_counts + block, n_over)
        if n_over > 0:
            bits = v.to(tl.int32, bitcast=True)
            entry = start + tl.cumsum(over.to(tl.int32), 0) - 1
            tl.store(list_v + entry, v, mask=over)
            tl.store(list_offset + entry, lane.to(tl.int16), mask=over)
            if LOSS:
                tl.store(list_term + entry, term, mask=over)
            mantissas = (bits & 0x7FFFFF) | tl.where(bits >> 23 > 0, 0x800000, 0)
            add_to_bins(work + FIRST_DIGIT, bits >> 20, mantissas, over, n_over, 2048, True, CROWD)
            add(slots, CANDIDATES, n_over.to(tl.int64))
            add(sums, V_CANDIDATES, tl.sum(tl.where(over, v, 0.0).to(tl.float64), 0))
            if LOSS == 1:
                add(sums, POLICY_CANDIDATES, tl.sum(tl.where(over, term, 0.0).to(tl.float64), 0))
        block += programs

    # First digit: the top 11 bits of v (its sign is 0), so that a bin has one exponent.
    if is_last(work + BARRIER, programs):
        zero, members = blocks * 0, total(slots, CANDIDATES)
        low_count = total(slots, REGION) - members - total(slots, GONE_REGION)
        s0, s1, s2 = slack_of(low_count, total(slots, LOW_SUM), tau0, tau1)
        lowest = lowest_bin.to(tl.int64)
        n, s0, s1, s2 = first_unpaid(
            work + FIRST_DIGIT, zero, lowest, members, s0, s1, s2, tau0, tau1, exponent, 2048, 20
        )  # fmt: skip
        if n == 2048:
            tl.store(work + PREFIX, blocks * 0 - 1)
            none = blocks * 0 + _INFINITY_BITS
            finish(
                work, sums, none, blocks * 0 - 1, POLICY_CANDIDATES, V_CANDIDATES,
                denominators, denominators_stride, loss, scales, cut, counts, floats, LOSS, DIVIDE_BY,
            )  # fmt: skip
        else:
            tl.store(work + PREFIX, n)
            tl.store(work + SLACK, s0)
            tl.store(work + SLACK + 1, s1)
            tl.store(work + SLACK + 2, s2)
        release(work + BARRIER + 1)
    else:
        wait(work + BARRIER + 1)
    prefix = tl.load(work + PREFIX, volatile=True)
    if prefix >= 0:
        drop(
            work, sums, list_counts, list_v, list_term, list_offset, loss, keep_out, prefix, blocks, programs, lane,
            tau0, tau1, exponent, denominators, denominators_stride, scales, cut, counts, floats, LOSS, DIVIDE_BY, BLOCK, CROWD,
        )  # fmt: skip
