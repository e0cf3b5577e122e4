"""The softmax of one chunk of logits through the backend's kernels: log-probs, then d logits over the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from . import vocab_parallel
from .args import LinearArgs
from .vocab_parallel import Local


class Rows(NamedTuple):
    """What a chunk's rows are known by after the forward. [n] each; None: not of this call."""

    log_prob: Tensor
    entropy: Tensor | None
    temperatures: Tensor | None
    column: Tensor  # a column with a known probability: the chosen token's where it is here, else the largest
    column_log_prob: Tensor
    column_slope: Tensor | None  # dz/dx there; set only where the vocabulary is split
    chosen: Tensor | None  # whether that column is the chosen token's; None: always

    def take(self, order: Tensor) -> Rows:
        """The rows in that order."""
        return Rows(*(None if t is None else t[order] for t in self))  # type: ignore[arg-type]


def forward(logits: Tensor, ids: Tensor, temperatures: Tensor | None, args: LinearArgs) -> Rows:
    """Log-probs of `ids` [n] from `logits` [n, V]."""
    if args.group is not None:
        return _forward_split(logits, ids, temperatures, args)
    log_prob, entropy = _log_softmax(logits, ids, temperatures, args)
    return Rows(log_prob, entropy, temperatures, ids, log_prob, None, None)


def backward(logits: Tensor, rows: Rows, grad_log_probs: Tensor, grad_entropy: Tensor | None, args: LinearArgs) -> None:
    """Overwrites `logits` with their gradient; grad_log_probs, grad_entropy: [n], what flows into each row's results."""
    if logits.numel() == 0:
        return
    module, local = _module(logits, args)
    flow = grad_log_probs.to(args.sum_dtype)
    of_entropy = None if grad_entropy is None else grad_entropy.to(args.sum_dtype)
    if rows.chosen is not None:
        # A rank all of whose columns are minus infinity has no column to measure the others by; nothing flows into them.
        nothing = ~rows.chosen & (rows.column_log_prob == -torch.inf)
        flow = flow.masked_fill(nothing, 0.0)
        of_entropy = None if of_entropy is None else of_entropy.masked_fill(nothing, 0.0)
    entropy = flow.new_empty(0) if rows.entropy is None else rows.entropy[None]
    module.log_softmax_backward(
        flow[None],
        None if of_entropy is None else of_entropy[None],
        rows.column_log_prob[None],
        entropy,
        logits[None],
        rows.column[None],
        None if rows.temperatures is None else rows.temperatures[None],
        local,
        logits[None],
    )
    if rows.chosen is None:
        return
    # The kernel took `column` for the chosen one. Where it is not, its gradient is like every other column's.
    assert rows.column_slope is not None
    p = rows.column_log_prob.exp()
    dz = -p * flow
    if of_entropy is not None:
        assert rows.entropy is not None
        dz = dz - torch.where(p > 0, p * (rows.column_log_prob + rows.entropy), 0.0) * of_entropy
    moves = (flow != 0) if of_entropy is None else (flow != 0) | (of_entropy != 0)
    right = torch.where(moves, dz * rows.column_slope, 0.0).to(logits.dtype)
    at = rows.column[:, None]
    logits.scatter_(1, at, torch.where(rows.chosen[:, None], logits.gather(1, at), right[:, None]))


def _module(logits: Tensor, args: LinearArgs):
    local = args.of_logits(logits.shape[1])
    return dispatch.backend_for_logits(logits[None], local, args.backend), local


def _log_softmax(logits: Tensor, ids: Tensor, temperatures: Tensor | None, args: LinearArgs) -> tuple[Tensor, Tensor | None]:
    module, local = _module(logits, args)
    per_row = None if temperatures is None else temperatures[None]
    log_prob, entropy = module.log_softmax(logits[None], ids[None], per_row, local)
    return log_prob[0], entropy[0] if args.with_entropy else None


def _forward_split(logits: Tensor, ids: Tensor, temperatures: Tensor | None, args: LinearArgs) -> Rows:
    assert args.group is not None
    n, vocab, dtype = *logits.shape, args.sum_dtype
    # For others `Walk.visit` has raised on a CPU; elsewhere their log-prob is NaN, as on one rank.
    exists = (ids >= 0) & (ids < args.vocab_size)
    here = (ids >= args.vocab_start) & (ids < args.vocab_start + vocab)
    nothing = torch.full((n,), -torch.inf, dtype=dtype, device=logits.device)
    zeros = torch.zeros_like(nothing)
    if vocab == 0:
        local = Local(nothing, zeros, nothing, zeros)
        top = token = torch.zeros_like(ids)
    else:
        top = logits.argmin(1) if args.logit_scale < 0 else logits.argmax(1)
        top_log_prob, inside = _log_softmax(logits, top, temperatures, args)
        token = torch.where(here, ids - args.vocab_start, 0)
        z_top = _scaled(logits, top, temperatures, args)[0]
        z_token = torch.where(here, _scaled(logits, token, temperatures, args)[0], -torch.inf)
        some = z_top != -torch.inf
        local = Local(
            z_top,
            torch.where(some, top_log_prob, 0.0),
            z_token,
            zeros if inside is None else torch.where(some, inside, 0.0),
        )
    everyone, rank = vocab_parallel.gather(local, args.group)
    whole = vocab_parallel.combine(everyone, rank)
    whole = whole._replace(log_prob=torch.where(exists, whole.log_prob, torch.nan))
    column = torch.where(here, token, top)
    slope = zeros if vocab == 0 else _scaled(logits, column, temperatures, args)[1]
    return Rows(
        whole.log_prob,
        whole.entropy if args.with_entropy else None,
        temperatures,
        column,
        torch.where(here, whole.log_prob, local.log_prob + whole.log_share),
        slope,
        here,
    )


def _scaled(logits: Tensor, column: Tensor, temperatures: Tensor | None, args: LinearArgs) -> tuple[Tensor, Tensor]:
    """z = softcap(logit_scale * x) / temperature of one column of each row, and dz/dx there."""
    x = logits.gather(1, column[:, None])[:, 0].to(args.sum_dtype) * args.logit_scale
    slope = torch.full_like(x, args.logit_scale)
    if args.logit_softcap:
        tanh = torch.tanh(x / args.logit_softcap)
        x, slope = args.logit_softcap * tanh, slope * (1 - tanh * tanh)
    divisor = args.temperature if temperatures is None else temperatures
    return x / divisor, slope / divisor
