"""Plain torch, any device: log-probs from logits in chunks of rows, so that no fp32 copy of all rows exists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..inputs import compute_dtype
from ..logits_args import LogitsArgs

# Elements of a chunk: two or three fp32 temporaries of 4 MB on a CPU, near what its caches hold; of 64 MB on other
# devices, where each chunk costs some twenty launches.
CHUNK_CPU = 1 << 20
CHUNK = 1 << 24


def log_softmax(logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, args: LogitsArgs) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), as the op m2po_kernels::selective_log_softmax returns them."""
    dtype = compute_dtype(logits)
    shape = (logits.shape[0], logits.shape[1] - args.shift)
    log_probs = torch.empty(shape, dtype=dtype, device=logits.device)
    entropy = torch.empty(shape if args.with_entropy else (0,), dtype=dtype, device=logits.device)
    tokens = token_ids[:, args.shift :]
    for index in _chunks(logits, shape):
        ids, known = _known(tokens[index].reshape(-1), args)
        x = logits[index].flatten(0, 1)[:, : args.vocab_size].to(dtype)
        z, _ = _scaled(x, None if temperatures is None else _flat(temperatures, index), args)
        z_token = z.gather(1, ids)[:, 0]
        top, at = z.max(1, keepdim=True)  # of equals the first
        z = z - top
        e = z.exp()
        products = torch.where(e > 0, e * z, 0.0) if args.with_entropy else None
        rest = _sum_rows(e.scatter_(1, at, 0.0))  # all but one maximal term, which is 1
        log_rest = torch.where(top[:, 0].isposinf(), torch.nan, torch.log1p(rest))  # infinity minus itself
        result = torch.where(known, (z_token - top[:, 0]) - log_rest, torch.nan)
        log_probs[index] = result.reshape(log_probs[index].shape)
        if products is not None:
            entropy[index] = (log_rest - _sum_rows(products) / (1 + rest)).reshape(entropy[index].shape)
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
    tokens = token_ids[:, args.shift :]
    out[:, log_probs.shape[1] :] = 0
    for index in _chunks(logits, (log_probs.shape[0], log_probs.shape[1])):
        active = grad_log_probs[index] != 0
        if grad_entropy is not None:
            active = active | (grad_entropy[index] != 0)
        target, x = out[index], logits[index].flatten(0, 1)
        rows = None
        if logits.device.type == "cpu" and not bool(active.all()):  # elsewhere a list of rows would make the host wait
            rows = active.flatten().nonzero().flatten()
            x = x[rows]
        grad = _gradient(
            x[:, : args.vocab_size].to(compute_dtype(logits)),
            _flat(grad_log_probs, index, rows),
            None if grad_entropy is None else (_flat(grad_entropy, index, rows), _flat(entropy, index, rows)),
            _flat(log_probs, index, rows),
            _flat(tokens, index, rows),
            None if temperatures is None else _flat(temperatures, index, rows),
            args,
        )
        if rows is not None:
            target.zero_()
            target[..., : args.vocab_size][active] = grad.to(out.dtype)
        else:
            target[..., args.vocab_size :] = 0
            inside = target[..., : args.vocab_size]
            inside.copy_(torch.where(active[..., None], grad.reshape(inside.shape), 0.0))


def _gradient(
    x: Tensor,
    grad_log_probs: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    log_probs: Tensor,
    tokens: Tensor,
    temperatures: Tensor | None,
    args: LogitsArgs,
) -> Tensor:
    """d loss / d x of whole rows; all but x and args have one value per row. of_entropy: its incoming gradient, and itself."""
    ids, _ = _known(tokens, args)
    g, lp = grad_log_probs[:, None].to(x.dtype), log_probs[:, None]
    z, tanh = _scaled(x, temperatures, args)
    log_p = (z - z.gather(1, ids)) + lp
    p = log_p.exp()
    dz = (p * -g).scatter_(1, ids, -torch.expm1(lp) * g)
    if of_entropy is not None:
        grad_entropy, entropy = of_entropy
        dz -= torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0) * grad_entropy[:, None].to(x.dtype)
    if tanh is not None:
        dz *= 1 - tanh * tanh
    if args.logit_scale != 1:
        dz *= args.logit_scale
    return dz if temperatures is None and args.temperature == 1 else dz / _divisor(temperatures, args)


def _scaled(x: Tensor, temperatures: Tensor | None, args: LogitsArgs) -> tuple[Tensor, Tensor | None]:
    """z = softcap(logit_scale * x) / temperature, and the tanh of the soft-cap. May return x itself."""
    tanh = None
    if args.logit_scale != 1:
        x = x * args.logit_scale
    if args.logit_softcap:
        tanh = torch.tanh(x / args.logit_softcap)
        x = tanh * args.logit_softcap
    return (x if temperatures is None and args.temperature == 1 else x / _divisor(temperatures, args)), tanh


def _divisor(temperatures: Tensor | None, args: LogitsArgs) -> Tensor | float:
    return args.temperature if temperatures is None else temperatures[:, None]


def _known(tokens: Tensor, args: LogitsArgs) -> tuple[Tensor, Tensor]:
    """The ids as a column of indices, 0 where out of range, and where they are in range."""
    known = (tokens >= 0) & (tokens < args.vocab_size)
    return torch.where(known, tokens, 0).to(torch.int64)[:, None], known


def _flat(tensor: Tensor, index: tuple[slice, slice], rows: Tensor | None = None) -> Tensor:
    flat = tensor[index].reshape(-1)
    return flat if rows is None else flat[rows]


def _sum_rows(x: Tensor) -> Tensor:
    """Sum of each row, halving: one order on every device, for any number of rows and threads. Overwrites x."""
    width = x.shape[1]
    while width > 1:
        half = (width + 1) // 2
        x[:, : width - half] += x[:, half:width]
        width = half
    return x[:, 0]


def _chunks(logits: Tensor, shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Indices of chunks: runs of whole sequences, or a piece of one."""
    if 0 in shape:
        return
    rows = max(1, (CHUNK_CPU if logits.device.type == "cpu" else CHUNK) // logits.shape[2])
    width = min(shape[1], rows)
    height = max(1, rows // width) if width == shape[1] else 1
    for b in range(0, shape[0], height):
        for t in range(0, shape[1], width):
            yield slice(b, b + height), slice(t, min(t + width, shape[1]))
