"""Log-probs from logits: forward reads each row once, backward reads it once and writes it once, one program per row.

Forward keeps a running maximum and sum for each lane and joins the lanes at the end, so that the loop has no barrier and takes
one exp per element. The sum leaves out one maximal term, which is 1: log1p of it keeps a confident token's log-prob.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...inputs import compute_dtype
from ...logits_args import LogitsArgs
from .device import exp_terms
from .tuning import logits_config

_LOWEST = tl.constexpr(-3.4028234663852886e38)

# Shapes and strides of a batch: a new one must not compile anything. Left to Triton to specialise: the alignment of logits and
# out, the vocabulary (one per model) and the stride between columns (1, as a rule).
_ANY = ["positions", "token_ids", "temperatures", "log_probs", "entropy", "grad_log_probs", "grad_entropy"]
_ANY += [f"{name}_{axis}" for name in ("logits", "out", "ids", "temperatures", "grad", "grad_entropy") for axis in "bt"]


@triton.jit
def _tanh(x):
    """Within a few ulp. Below 1/2, where 1 - exp cancels, the first four levels of Lambert's continued fraction (2^-24 off)."""
    a = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - a) / (1.0 + a)
    y = x * x
    near = x * (105.0 + 10.0 * y) / (105.0 + y * (45.0 + y))
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit
def _scaled(x, factor, into_cap, from_cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """z and, if CAPPED, the tanh of the soft-cap; else x itself."""
    x = x.to(tl.float32)
    t = x
    if CAPPED:
        t = _tanh(x * into_cap)
        x = t * from_cap
    elif SCALED:
        x = x * factor
    return x, t


@triton.jit
def _log1p(x):
    """For x >= 0. log(1 + x) with the rounding of 1 + x divided out."""
    u = 1.0 + x
    return tl.where((u == 1.0) | (u > 1e30), tl.where(u == 1.0, x, tl.log(u)), tl.log(u) * (x / (u - 1.0)))


@triton.jit
def _add(z, top, rest, moment, WITH_ENTROPY: tl.constexpr):
    """Adds z to each lane: top is its maximum, rest the sum of exp(z - top) without one maximal term (-1: the lane is empty)."""
    d = z - top
    e = tl.exp(-tl.abs(d))
    rises = z > top
    above = rest * e + e
    if WITH_ENTROPY:
        d = tl.where(e > 0, d, 0.0)  # 0 * inf
        moment = tl.where(rises, e * moment - d * above, moment + e * d)
    rest = tl.where(rises, above, rest + e)
    # A NaN is in `rest` from here on, and `top` stays a number.
    return tl.where(rises, z, top), rest, moment


@triton.jit(do_not_specialize=_ANY)
def log_softmax_kernel(
    logits, token_ids, temperatures, log_probs, entropy,
    positions, vocab_size,
    logits_b: tl.int64, logits_t: tl.int64, logits_v,
    ids_b: tl.int64, ids_t: tl.int64, temperatures_b: tl.int64, temperatures_t: tl.int64,
    temperature, logit_scale, softcap,
    SHIFT: tl.constexpr, PER_TOKEN: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: positions is T, the rows of a sequence that have a token."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // positions, row % positions
    if PER_TOKEN:
        temperature = tl.load(temperatures + b * temperatures_b + t * temperatures_t)
    factor = logit_scale / temperature
    into_cap, from_cap = logit_scale / softcap, softcap / temperature
    base = logits + tl.multiple_of(b * logits_b + t * logits_t, ALIGNMENT)
    token = tl.load(token_ids + b * ids_b + (t + SHIFT) * ids_t).to(tl.int64)
    known = (token >= 0) & (token < vocab_size)
    x_token = tl.load(base + token * logits_v, mask=known, other=float("nan"))
    z_token = _scaled(x_token, factor, into_cap, from_cap, SCALED, CAPPED)[0]

    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], _LOWEST, tl.float32)
    rest = tl.full([BLOCK], -1.0, tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    # Whole blocks need no mask of their own, which is what lets a load be 16 bytes wide. The next is on its way meanwhile.
    blocks = vocab_size // BLOCK
    x = tl.load(base + lane.to(tl.int64) * logits_v, mask=blocks > 0, other=0.0)
    block = 0
    while block < blocks:
        block += 1
        following = tl.load(base + (block * BLOCK + lane).to(tl.int64) * logits_v, mask=block < blocks, other=0.0)
        z = _scaled(x, factor, into_cap, from_cap, SCALED, CAPPED)[0]
        top, rest, moment = _add(z, top, rest, moment, WITH_ENTROPY)
        x = following
    whole = blocks * BLOCK
    if whole < vocab_size:
        inside = whole + lane < vocab_size
        x = tl.load(base + (whole + lane).to(tl.int64) * logits_v, mask=inside, other=0.0)
        z = _scaled(x, factor, into_cap, from_cap, SCALED, CAPPED)[0]
        top, rest, moment = _add(tl.where(inside, z, -float("inf")), top, rest, moment, WITH_ENTROPY)

    best = tl.max(top, 0)
    leader = tl.argmax(top, 0)
    ratio = tl.exp(top - best)
    others = tl.sum(tl.where(lane == leader, rest, (rest + 1.0) * ratio), 0)
    log_others = tl.where(best == float("inf"), float("nan"), _log1p(others))  # infinity minus itself
    tl.store(log_probs + row, (z_token - best) - log_others)
    if WITH_ENTROPY:
        shifted = tl.where(ratio > 0, top - best, 0.0)
        total = tl.sum(ratio * (moment + shifted * (rest + 1.0)), 0)
        tl.store(entropy + row, log_others - total / (1.0 + others))


@triton.jit
def _zeros(at, first, columns, out_v, lane, BLOCK: tl.constexpr):
    """Zero to the columns of a row from block number `first` on, which may lie beyond its end."""
    nothing = tl.zeros([BLOCK], tl.float32).to(at.dtype.element_ty)
    blocks = columns // BLOCK
    block = tl.zeros([], tl.int32) + first
    while block < blocks:
        tl.store(at + (block * BLOCK + lane).to(tl.int64) * out_v, nothing)
        block += 1
    if block == blocks:
        column = block * BLOCK + lane
        tl.store(at + column.to(tl.int64) * out_v, nothing, mask=column < columns)


@triton.jit
def _gradient(
    x, column, token, z_token, lp, at_token, g, g_entropy, entropy, factor, into_cap, from_cap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY_GRAD: tl.constexpr,
):  # fmt: skip
    z, tanh = _scaled(x, factor, into_cap, from_cap, SCALED, CAPPED)
    log_p = (z - z_token) + lp
    p = tl.exp(log_p)
    dz = tl.where(column == token, at_token, -p * g)
    if ENTROPY_GRAD:
        dz -= tl.where(p == 0, 0.0, p * (log_p + entropy)) * g_entropy
    if CAPPED:
        dz *= 1.0 - tanh * tanh
    return dz


@triton.jit(do_not_specialize=_ANY)
def log_softmax_backward_kernel(
    logits, token_ids, temperatures, log_probs, entropy, grad_log_probs, grad_entropy, out,
    positions, vocab_size, columns,
    logits_b: tl.int64, logits_t: tl.int64, logits_v, out_b: tl.int64, out_t: tl.int64, out_v,
    ids_b: tl.int64, ids_t: tl.int64, temperatures_b: tl.int64, temperatures_t: tl.int64,
    grad_b: tl.int64, grad_t: tl.int64, grad_entropy_b: tl.int64, grad_entropy_t: tl.int64,
    temperature, logit_scale, softcap,
    SHIFT: tl.constexpr, PER_TOKEN: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    ENTROPY_GRAD: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One row of the logits, those without a token included; `out` may be `logits`."""
    program = tl.program_id(0).to(tl.int64)
    b, t = program // (positions + SHIFT), program % (positions + SHIFT)
    lane = tl.arange(0, BLOCK)
    here = out + tl.multiple_of(b * out_b + t * out_t, ALIGNMENT)
    has_token = t < positions
    g = tl.load(grad_log_probs + b * grad_b + t * grad_t, mask=has_token, other=0.0).to(tl.float32)
    g_entropy = g * 0.0
    active = g != 0
    if ENTROPY_GRAD:
        at = grad_entropy + b * grad_entropy_b + t * grad_entropy_t
        g_entropy = tl.load(at, mask=has_token, other=0.0).to(tl.float32)
        active = active | (g_entropy != 0)
    if active:
        row = b * positions + t
        if PER_TOKEN:
            temperature = tl.load(temperatures + b * temperatures_b + t * temperatures_t)
        factor = logit_scale / temperature
        into_cap, from_cap = logit_scale / softcap, softcap / temperature
        lp = tl.load(log_probs + row)
        row_entropy = lp
        if ENTROPY_GRAD:
            row_entropy = tl.load(entropy + row)
        base = logits + tl.multiple_of(b * logits_b + t * logits_t, ALIGNMENT)
        token = tl.load(token_ids + b * ids_b + (t + SHIFT) * ids_t).to(tl.int64)
        known = (token >= 0) & (token < vocab_size)
        # In place, a warp that is ahead writes over the token's logit. So each thread reads it, and none has the maximum of what
        # they read before all have: a barrier alone does not wait for a load on its way.
        shared = token * logits_v + tl.arange(0, THREADS).to(tl.int64) * 0
        x_token = tl.max(tl.load(base + shared, mask=known, other=float("nan")).to(tl.float32), 0)
        z_token = _scaled(x_token, factor, into_cap, from_cap, SCALED, CAPPED)[0]
        minus_one = exp_terms(lp)[1]
        g = g * factor
        g_entropy = g_entropy * factor
        at_token = -minus_one * g
        blocks = vocab_size // BLOCK
        block = 0
        while block < blocks:
            column = block * BLOCK + lane
            x = tl.load(base + column.to(tl.int64) * logits_v)
            dz = _gradient(
                x, column, token, z_token, lp, at_token, g, g_entropy, row_entropy, factor, into_cap, from_cap,
                SCALED, CAPPED, ENTROPY_GRAD,
            )  # fmt: skip
            tl.store(here + column.to(tl.int64) * out_v, dz.to(out.dtype.element_ty))
            block += 1
        if blocks * BLOCK < columns:
            column = blocks * BLOCK + lane
            inside = column < vocab_size
            x = tl.load(base + column.to(tl.int64) * logits_v, mask=inside, other=0.0)
            dz = _gradient(
                x, column, token, z_token, lp, at_token, g, g_entropy, row_entropy, factor, into_cap, from_cap,
                SCALED, CAPPED, ENTROPY_GRAD,
            )  # fmt: skip
            dz = tl.where(inside, dz, 0.0).to(out.dtype.element_ty)
            tl.store(here + column.to(tl.int64) * out_v, dz, mask=column < columns)
            _zeros(here, blocks + 1, columns, out_v, lane, BLOCK)
    else:
        _zeros(here, 0, columns, out_v, lane, BLOCK)


def log_softmax(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, args: LogitsArgs) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), as the op m2po_kernels::selective_log_softmax returns them."""
    shape = (logits.shape[0], logits.shape[1] - args.shift)
    log_probs = torch.empty(shape, dtype=compute_dtype(logits), device=logits.device)
    entropy = torch.empty(shape if args.with_entropy else (0,), dtype=log_probs.dtype, device=logits.device)
    config = logits_config(logits.device)
    with _on_device_of(logits):
        log_softmax_kernel[(log_probs.numel(),)](
            logits, token_ids, temperatures, log_probs, entropy,
            shape[1], args.vocab_size, *logits.stride(), *token_ids.stride(), *_strides(temperatures), *_scalars(args),
            *_switches(temperatures, args), WITH_ENTROPY=args.with_entropy, ALIGNMENT=_alignment(logits),
            BLOCK=config.block_bytes // logits.element_size(), num_warps=config.num_warps,
        )  # fmt: skip
    return log_probs, entropy


def log_softmax_backward(
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    temperatures: Tensor | None,
    args: LogitsArgs,
    out: Tensor,
) -> None:
    """Writes d logits into `out` (shape and dtype of logits, any strides; may be `logits` itself)."""
    log_probs, entropy = log_probs.contiguous(), entropy.contiguous()
    config = logits_config(logits.device)
    with _on_device_of(logits):
        log_softmax_backward_kernel[(logits.shape[0] * logits.shape[1],)](
            logits, token_ids, temperatures, log_probs, entropy, grad_log_probs, grad_entropy, out,
            log_probs.shape[1], args.vocab_size, logits.shape[2], *logits.stride(), *out.stride(), *token_ids.stride(),
            *_strides(temperatures), *grad_log_probs.stride(), *_strides(grad_entropy), *_scalars(args),
            *_switches(temperatures, args), ENTROPY_GRAD=grad_entropy is not None, ALIGNMENT=_alignment(logits, out),
            BLOCK=config.block_bytes // logits.element_size(), THREADS=config.threads, num_warps=config.num_warps,
        )  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _scalars(args: LogitsArgs) -> tuple[float, float, float]:
    return float(args.temperature), float(args.logit_scale), float(args.logit_softcap or 1.0)


def _switches(temperatures: Tensor | None, args: LogitsArgs) -> tuple[int, bool, bool, bool]:
    """SHIFT, PER_TOKEN, SCALED, CAPPED."""
    per_token = temperatures is not None
    return args.shift, per_token, per_token or args.temperature != args.logit_scale, args.logit_softcap != 0


def _alignment(*tensors: Tensor) -> int:
    """Elements of which every row starts at a multiple: those of 16 bytes, or 1."""
    wide = 16 // tensors[0].element_size()
    return wide if all(t.stride(0) % wide == 0 and t.stride(1) % wide == 0 for t in tensors) else 1


def _on_device_of(tensor: Tensor):
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
