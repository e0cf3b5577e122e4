"""d loss / d log_probs in one launch: recomputed from the inputs and the cut, nothing per token was saved."""

from __future__ import annotations

import triton
import triton.language as tl

from .device import exp_terms, load, place, store
from .forward import token_terms

_SCALARS = (
    "tokens", "columns",
    *(
        f"{name}_s{axis}"
        for name in ("log_probs", "behavior", "advantages", "mask", "reference", "weights", "keep", "grad", "out")
        for axis in "01"
    ),
)  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS)
def backward_kernel(
    log_probs, behavior, advantages, mask, reference, weights, keep, grad, scales, cut, out,
    tokens: tl.int64, columns: tl.int64,
    log_probs_s0, log_probs_s1, behavior_s0, behavior_s1,
    advantages_s0, advantages_s1, mask_s0, mask_s1,
    reference_s0, reference_s1, weights_s0, weights_s1,
    keep_s0, keep_s1, grad_s0, grad_s1, out_s0, out_s1,
    log_high, log_low, log_cap, kl_coef,
    LOG_PROBS: tl.constexpr, BEHAVIOR: tl.constexpr, ADVANTAGES: tl.constexpr, MASK: tl.constexpr,
    REFERENCE: tl.constexpr, WEIGHTS: tl.constexpr, KEEP: tl.constexpr, GRAD: tl.constexpr, OUT: tl.constexpr,
    SCOPE_ALL: tl.constexpr, CLIP: tl.constexpr, CAPPED: tl.constexpr, DROP_BAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of tokens for each program. GRAD is ABSENT for one grad_loss for all, else the layout of one per token."""
    lane = tl.arange(0, BLOCK)
    tokens = tokens.to(tl.int64)
    columns = columns.to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = place(start, tokens, columns, BLOCK)
    d, v, a, q, weight, valid, _, region, kept = token_terms(
        log_probs, behavior, advantages, mask, reference, weights, keep,
        log_probs_s0, log_probs_s1, behavior_s0, behavior_s1, advantages_s0, advantages_s1, mask_s0, mask_s1,
        reference_s0, reference_s1, weights_s0, weights_s1, keep_s0, keep_s1,
        at,
        LOG_PROBS, BEHAVIOR, ADVANTAGES, MASK, REFERENCE, WEIGHTS, KEEP, SCOPE_ALL, DROP_BAD,
    )  # fmt: skip
    moves = valid & (a != 0)
    if KEEP:
        moves = moves & kept
    elif CLIP:
        moves = moves & ~(((a > 0) & (d > log_high)) | ((a < 0) & (d < log_low)))
    else:
        value = tl.load(cut).to(tl.int32)
        last = tl.load(cut + 1)
        bits = v.to(tl.int32, bitcast=True)
        moves = moves & ~(region & ((bits > value) | ((bits == value) & (start + lane <= last))))
    if CAPPED:
        moves = moves & ~((a < 0) & (d > log_cap))

    if GRAD:
        factor = load(grad, GRAD, at, grad_s0, grad_s1).to(tl.float64)
    else:
        factor = tl.load(grad).to(tl.float64)
    coefficient = tl.where(moves, (-factor * tl.load(scales)).to(tl.float32), 0.0)
    ratio, _ = exp_terms(d)
    scaled = a * coefficient
    if WEIGHTS:
        scaled = scaled * weight
    gradient = tl.where(coefficient != 0, ratio * scaled, 0.0)  # an infinite ratio times nothing is nothing
    if REFERENCE:
        coefficient = tl.where(valid, (factor * tl.load(scales + 1) * kl_coef).to(tl.float32), 0.0)
        _, pull = exp_terms(q)
        scaled = coefficient
        if WEIGHTS:
            scaled = scaled * weight
        gradient -= tl.where(coefficient != 0, pull * scaled, 0.0)
    store(out, OUT, at, out_s0, out_s1, gradient)
