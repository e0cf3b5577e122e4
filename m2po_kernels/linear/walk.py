"""The way through the rows of a call: a chunk at a time, each multiplied into the same buffer of logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops_logits import check_values
from . import softmax
from .args import Inputs, LinearArgs
from .head import Head, HeadGradients
from .plan import chunk_rows, chunks
from .softmax import Rows
from .vocab_parallel import group_named, sum_over_ranks

MOVED_AT_ONCE = 16  # rows of logits that are copied while a chunk closes its gaps


@dataclass(frozen=True)
class Visit:
    """A chunk: its tokens [n], their positions in hidden, their hidden states [n, H] and logits [n, V] (a part of the buffer)."""

    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    logits: Tensor
    rows: Rows


class Walk:
    """One call's inputs, its buffer, and the sums of its gradients."""

    def __init__(self, inputs: Inputs, args: LinearArgs, with_gradients: bool) -> None:
        self.inputs, self.args = inputs, args
        self.head = Head.of(inputs, args)
        self.gradients = HeadGradients.zeros(inputs, args) if with_gradients else HeadGradients()
        self._most = chunk_rows(self._row_bytes(), args.max_workspace_bytes)
        self._buffer: Tensor | None = None

    def _row_bytes(self) -> int:
        columns, width = self.head.weight.shape
        if self.args.group is not None:  # the same on every rank, however uneven the shards: each chunk has a collective
            ranks = group_named(self.args.group).size()
            columns = max(1, -(-self.args.vocab_size // ranks))
        return (columns + 2 * width) * self.args.dtype.itemsize

    def tokens(self, wanted: Tensor | None) -> Iterator[Tensor]:
        """Indices of the tokens in chunks: of those that `wanted` (bool [N]) names, or of all where rows are not gathered."""
        n, device = self.inputs.token_ids.shape[0], self.inputs.token_ids.device
        if wanted is None or not self.args.gather_rows:
            return (torch.arange(piece.start, piece.stop, device=device) for piece in chunks(n, self._most))
        tokens = wanted.nonzero().flatten()
        if n <= torch.iinfo(torch.int32).max:  # they are kept over the walk; half as wide, they take no more than log-probs
            tokens = tokens.to(torch.int32)
        pieces = chunks(tokens.shape[0], self._most)
        if pieces:  # what is recomputed later are fewer rows, in chunks that are no larger: the buffer need not be
            self._most = min(self._most, pieces[0].stop)
        return (tokens[piece].to(torch.int64) for piece in pieces)

    def visit(self, tokens: Tensor) -> Visit:
        """Multiplies these tokens' rows. The logits of the chunk before are gone. Raises InvalidArgument, on a CPU, for ids or
        temperatures out of range."""
        inputs, args = self.inputs, self.args
        ids = inputs.token_ids[tokens].to(torch.int64)
        temperatures = None if inputs.temperatures is None else inputs.temperatures[tokens]
        positions = tokens // args.tokens * args.positions + (args.first + tokens % args.tokens)
        hidden = inputs.hidden.detach().index_select(0, positions).to(args.dtype)
        if inputs.rows is not None and not args.gather_rows:  # a row without a token may hold anything; 0 * NaN is NaN
            has_token = inputs.rows[tokens]
            hidden = torch.where(has_token[:, None], hidden, 0.0)
            ids = torch.where(has_token, ids, 0)
            temperatures = None if temperatures is None else torch.where(has_token, temperatures, 1.0)
        if ids.device.type == "cpu":
            check_values(ids, temperatures, args.vocab_size)
        logits = self._logits(tokens.shape[0])
        self.head.logits(hidden, logits)
        rows = softmax.forward(logits, ids, temperatures, args)
        return Visit(tokens, positions, hidden, logits, rows)

    def _logits(self, n: int) -> Tensor:
        if self._buffer is None:  # as large as any chunk of the call may become: a second one would be alive beside it
            shape = (min(self._most, self.inputs.token_ids.shape[0]), self.head.weight.shape[0])
            self._buffer = torch.empty(shape, dtype=self.args.dtype, device=self.inputs.hidden.device)
        return self._buffer[:n]

    def add_gradient(self, visit: Visit, grad_log_probs: Tensor, grad_entropy: Tensor | None = None) -> None:
        """Turns the visit's logits into their gradient and adds what it contributes. [n] each."""
        softmax.backward(visit.logits, visit.rows, grad_log_probs, grad_entropy, self.args)
        self.gradients.add(self.head, visit.positions, visit.hidden, visit.logits)

    def finish(self) -> tuple[Tensor, ...]:
        """The gradients in the order of PARAMETERS, an empty tensor for each that is not wanted."""
        if self.args.group is not None and self.args.reduce_hidden:
            for partial in (self.gradients.hidden, self.gradients.lora_a):
                if partial is not None:
                    sum_over_ranks(partial, self.args.group)
        return tuple(self.inputs.hidden.new_empty(0) if t is None else t for t in self.gradients)


def only(visit: Visit, ready: Tensor) -> tuple[Visit, Tensor]:
    """The visit with the rows that `ready` (bool [n]) names alone, and where each was before. Waits for their number.

    The logits stay where they are: rows behind the last one that stays move into the gaps before it.
    """
    kept = int(ready.sum())
    order = torch.arange(kept, device=ready.device)
    if kept == ready.shape[0]:
        return visit, order
    gaps = (~ready[:kept]).nonzero().flatten()
    movers = ready[kept:].nonzero().flatten() + kept
    order[gaps] = movers
    for start in range(0, gaps.shape[0], MOVED_AT_ONCE):
        part = slice(start, start + MOVED_AT_ONCE)
        visit.logits[gaps[part]] = visit.logits[movers[part]]
    return (
        Visit(visit.tokens[order], visit.positions[order], visit.hidden[order], visit.logits[:kept], visit.rows.take(order)),
        order,
    )
