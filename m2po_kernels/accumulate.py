"""M2Accumulator: the micro-batches and the ranks of one optimizer batch in, one Selection out."""

from __future__ import annotations

import zlib
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import digits, dispatch
from .digits import Search
from .distributed import Ranks, check_disjoint, check_sharded, replicas_differ
from .errors import InvalidArgument, InvalidType, MissingBehaviorLogProbs, NonFiniteError, describe
from .exact import Unit, slack_of
from .inputs import check_batch, compute_dtype, wide_dtype
from .parts import Collected, Part, checking, checksum, digest
from .results import Metrics, Selection
from .rule import Rule

# What the ranks add up beside the first histogram. The first six as in Collected.counts.
_HEADER = (
    "valid",
    "region",
    "nonfinite",
    "clipped",
    "low",
    "low_sum",
    "missing",
    "replicas_differ",
    "settings",
    "settings_squared",
)
_N_SUMS = 4  # fp64 values of Collected.sums, in a slot per rank, so that every rank adds them in rank order
_MOST_TOKENS = 1 << 31  # for which the sums have room
_READ_AT_ONCE = ("cpu",)  # devices whose values the host reads without waiting
_serial_numbers = count(1)


class M2Accumulator:
    """Selects over a whole optimizer batch that comes in micro-batches, on one rank or on many. One accumulator per step.

    m2_threshold, scope, nonfinite: as in `m2po_kernels.select`, and equal on all ranks.
    dtype: torch.float64 if the log-probs are float64, else torch.float32. None: what the first log-probs given imply; a rank that
        may get no micro-batch among float64 ones must name it.
    device: None: that of the first log-probs given. A rank that may get no micro-batch falls back to the current CUDA device
        where the group's backend is NCCL, and to the CPU elsewhere.

    It keeps the mask (1 B a token), and of each candidate (token of T with v > m2_threshold) v and its position; of other tokens
    sums and counts. `add` is made of plain torch operations on every device and never tracks gradients.
    """

    def __init__(
        self,
        *,
        m2_threshold: float = 0.04,
        scope: str = "quadrants",
        nonfinite: str = "propagate",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        self._rule = Rule(m2_threshold=m2_threshold, scope=scope, nonfinite=nonfinite)
        if dtype not in (None, torch.float32, torch.float64):
            raise InvalidType(f"dtype must be torch.float32, torch.float64 or None; got {describe(dtype)}")
        self._dtype = dtype
        self._device = None if device is None else torch.empty(0, device=device).device  # with its index
        self._serial_number = next(_serial_numbers)
        self._parts: list[Part] = []
        self._collected: list[Collected] = []
        self._digests: list[Tensor] = []
        self._missing: list[int] = []
        self._n_tokens = 0
        self._solved = False

    @torch.no_grad()
    def add(
        self,
        log_probs: Tensor,
        behavior_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        *,
        ref_log_probs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Part:
        """Takes one micro-batch; returns the handle under which its part of the selection is found. Arguments as in `select`.

        ref_log_probs: what the loss is given, if it has a KL term; read to find where it is not finite.
        behavior_log_probs=None is an error that `solve` raises, on every rank of its group, so that none waits for this one.
        On a CPU nothing waits; on other devices the number of candidates is read once.
        Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
        """
        if self._solved:
            raise InvalidArgument("add() after solve(): the selection is made; expected a new M2Accumulator for the next batch")
        missing = behavior_log_probs is None
        batch, _ = check_batch(
            log_probs,
            log_probs if missing else behavior_log_probs,
            advantages,
            mask,
            ref_log_probs=ref_log_probs,
            cu_seqlens=cu_seqlens,
        )
        self._check_like_the_others(log_probs)
        code = checksum(batch) if checking() and not missing else None
        part = Part(self._serial_number, len(self._parts), log_probs.shape, self._n_tokens, code)
        if missing:
            self._missing.append(part.index)
        else:
            own = None if code is None else torch.cat([code, digest(torch.where(mask != 0, log_probs, 0))[None]])
            collected = dispatch.load("eager").collect(batch, self._rule)
            collected.positions.add_(part.start)
            self._collected.append(collected)
            if own is not None:
                self._digests.append(own)
        # Only now: where memory ran out before, the caller may try again.
        self._parts.append(part)
        self._n_tokens += log_probs.numel()
        return part

    @torch.no_grad()
    def solve(self, group: Any = None, *, replicated_over: Any = None, sync: bool = True) -> Selection:
        """The Selection over all micro-batches of all ranks of `group`; the same metrics, to the bit, on each of them.

        group: the ranks that hold different tokens of this optimizer batch: data parallel, and context or sequence parallel where
            each rank keeps its own share. A ProcessGroup, a DeviceMesh of one dimension, or None: this rank alone.
            Every rank of it must call, with micro-batches or without.
        replicated_over: the ranks that hold the same tokens as this one (tensor parallel; context parallel after
            reconstruction). They take no part, and must not be in `group`. M2PO_CHECK=1 compares the tokens: of `group` no two
            ranks may hold the same, of `replicated_over` all must.
        sync: the same on all ranks. True: one host sync, after the first of at most 4 all-reduces (8 for float64 log-probs); if
            nothing is to be dropped it was the last. False: all of them and no sync; off a CPU a rank then learns only of its own
            missing behaviour log-probs, and of none of the other errors.

        Ties at the cut are dropped in the order of (rank, position). At most 2^31 tokens.
        Raises MissingBehaviorLogProbs, NonFiniteError or InvalidArgument on all ranks of the group alike; what torch raises for a
        rank that has gone passes through.
        """
        if self._solved:
            raise InvalidArgument("solve() was called before; expected a new M2Accumulator for each optimizer batch")
        ranks, replicas = Ranks(group), Ranks(replicated_over, "replicated_over")
        check_disjoint(ranks, replicas)
        self._solved = True
        device = self._device or ranks.default_device()
        differ = self._check_replicas(ranks, replicas, device) if checking() else False

        own = self._own(device)
        dtype, tau, wide = self._dtype or torch.float32, self._rule.m2_threshold, wide_dtype(device)
        unit = Unit.of(tau, dtype)
        first, *others = digits.digits_of(dtype)

        # Filled on the device: copying a list there would wait for it.
        flags = [torch.full((1,), x, device=device) for x in (len(self._missing), int(differ), *self._settings(dtype, sync))]
        header = torch.cat([own.counts[:6], *flags])
        table = digits.histogram(own.v, None, first)
        slots = ranks.slots(own.sums)
        summed = ranks.sum(torch.cat([header, slots.view(-1), table.view(-1)]))
        header, slots, table = summed.split([header.numel(), slots.numel(), table.numel()])
        table = table.view(first.rows, first.size)
        search = digits.start(slack_of(header[4], header[5], unit), wide)
        search = digits.narrow(search, table, first, dtype, unit, tau)
        totals = _Totals(header, table[0].sum(), search.counted, slots.view(wide).view(ranks.size, _N_SUMS))

        drops = True
        reads = sync or device.type in _READ_AT_ONCE
        if reads:
            *read, prefix = torch.cat([header, search.prefix[None]]).tolist()  # the one host sync
            self._raise_together(dict(zip(_HEADER, read, strict=True)), ranks, sync)
            drops = prefix >= 0 or not sync
        if drops:
            for digit in others:
                table = ranks.sum(digits.histogram(own.v, search.prefix, digit))
                search = digits.narrow(search, table, digit, dtype, unit, tau)
            search = digits.keep_equals(search, dtype, unit, tau)
            own.keep[own.positions] = ~_dropped(own.v, search, ranks)
        if self._missing and not reads:  # only now: the others, who cannot know, have had this rank in every collective
            self._raise_missing(len(self._missing), ranks)
        self._collected.clear()
        metrics = totals.metrics(search, dtype)
        return Selection(own.keep, metrics, tau, self._rule.scope, tuple(self._parts), self._serial_number)

    def close(self) -> None:
        """Raises InvalidArgument if a part was never used in a loss: its valid tokens were counted, but not trained on."""
        unused = [part.index for part in self._parts if not part.used]
        if unused:
            raise InvalidArgument(
                f"parts {unused} of {len(self._parts)} were added but never given to a loss as part=; "
                "expected a loss for each, as their valid tokens count in the selection and the denominator"
            )

    def _check_like_the_others(self, log_probs: Tensor) -> None:
        self._dtype = self._dtype or compute_dtype(log_probs)
        self._device = self._device or log_probs.device
        if compute_dtype(log_probs) != self._dtype:
            raise InvalidArgument(
                f"log_probs must{' not' if self._dtype == torch.float32 else ''} be float64, as dtype= or the first micro-batch "
                f"says; got {describe(log_probs)}"
            )
        if log_probs.device != self._device:
            raise InvalidArgument(
                f"log_probs must be on {self._device}, as device= or the first micro-batch says; got {describe(log_probs)}"
            )

    def _own(self, device: torch.device) -> Collected:
        """The parts of this rank as one, flat."""
        dtype, wide = self._dtype or torch.float32, wide_dtype(device)
        nothing = Collected(
            torch.empty(0, dtype=torch.bool, device=device),
            torch.zeros(7, dtype=torch.int64, device=device),
            torch.zeros(_N_SUMS, dtype=wide, device=device),
            torch.empty(0, dtype=dtype, device=device),
            torch.empty(0, dtype=torch.int64, device=device),
        )
        if self._missing or not self._collected:
            return nothing
        kept, counts, sums, v, positions = zip(*self._collected, strict=True)
        columns = torch.stack(sums)
        return Collected(
            torch.cat([k.view(-1) for k in kept]),
            torch.stack(counts).sum(0),
            torch.cat([columns[:, :3].sum(0), columns[:, 3].max()[None]]),
            torch.cat(v),
            torch.cat(positions),
        )

    def _settings(self, dtype: torch.dtype, sync: bool) -> tuple[int, int]:
        """What must be the same on all ranks, as a number of 20 bits, and its square: their sums show whether any differs."""
        named = (float(self._rule.m2_threshold), self._rule.scope, self._rule.nonfinite, str(dtype), bool(sync))
        code = zlib.crc32(repr(named).encode()) >> 12
        return code, code * code

    def _check_replicas(self, ranks: Ranks, replicas: Ranks, device: torch.device) -> bool:
        """Whether replicas differ; raises if ranks of the group hold the same tokens. One host sync each."""
        own = torch.zeros(1, dtype=torch.int64, device=device)
        if self._digests:
            valid = torch.stack([c.counts[0] for c in self._collected]).sum()
            own = torch.where(valid > 0, digest(torch.cat(self._digests)), own)  # ranks without tokens are no replicas
        # In this order: the second raises on the ranks of one group alone, and no replica may wait for one that has raised.
        differ = replicas_differ(replicas, own)
        check_sharded(ranks, own)
        return differ

    def _raise_together(self, header: dict[str, int], ranks: Ranks, sync: bool) -> None:
        """Raises what every rank of the group can see in the sums, so that all raise."""
        if header["missing"]:
            self._raise_missing(header["missing"], ranks)
        if ranks.size * header["settings_squared"] != header["settings"] ** 2:
            raise InvalidArgument(
                "m2_threshold, scope, nonfinite, dtype and sync must be the same on all ranks of group (a rank without tokens "
                f"takes dtype=torch.float32 unless told otherwise); here {self._rule.m2_threshold}, {self._rule.scope!r}, "
                f"{self._rule.nonfinite!r}, {self._dtype}, sync={sync}, and another rank has others"
            )
        if header["replicas_differ"]:
            raise InvalidArgument(
                "replicated_over: its ranks hold different tokens or log-probs on at least one rank of group; expected the same "
                "bits on each (ranks that hold different tokens belong into group)"
            )
        if header["valid"] > _MOST_TOKENS:
            raise InvalidArgument(
                f"mask has {header['valid']} valid tokens over the group; expected at most 2^31 in one selection"
            )
        if self._rule.nonfinite == "error" and header["nonfinite"]:
            raise NonFiniteError(
                f"log_probs, behavior_log_probs or advantages: {header['nonfinite']} of {header['valid']} valid tokens of the "
                f"group have a NaN or infinite log-ratio or input; rank {ranks.rank} of {ranks.size}: {self._own_nonfinite()}; "
                'expected finite values (nonfinite="drop" leaves such tokens out)'
            )

    def _own_nonfinite(self) -> str:
        for part, collected in zip(self._parts, self._collected, strict=True):
            first = int(collected.counts[6])
            if first >= 0:
                return f"the first at flat index {first} of part {part.index}"
        return "none"

    def _raise_missing(self, n: int, ranks: Ranks) -> None:
        here = f"parts {self._missing}" if self._missing else "none"
        raise MissingBehaviorLogProbs(
            f"behavior_log_probs was None for {n} micro-batches of the group; rank {ranks.rank} of {ranks.size}: {here}. "
            "Pass the log-prob that the rollout engine gave to each token when it sampled it; the current ones are no substitute."
        )


def _dropped(v: Tensor, search: Search, ranks: Ranks) -> Tensor:
    """Which candidates of this rank go: all above the cut, and of its equals the first ones in (rank, position)."""
    cut = digits.cut_value(search, v.dtype).to(v.dtype)
    equal = v == cut
    per_rank = ranks.sum(ranks.slots(equal.count_nonzero()[None])).view(-1)
    place = equal.cumsum(0) + per_rank[: ranks.rank].sum()  # 1 for the first of all equals
    return (v > cut) | (equal & (place <= search.equal))


class _Totals(NamedTuple):
    """What the first collective tells of the whole batch."""

    header: Tensor  # int64, as _HEADER
    candidates: Tensor
    candidate_v: Tensor
    sums: Tensor  # fp64 [ranks, 4], as Collected.sums

    def metrics(self, search: Search, dtype: torch.dtype) -> Metrics:
        """Those of docs/semantics.md, over the group: the same arithmetic on the same numbers on every rank."""
        valid, region, nonfinite, clipped, low = self.header[:5].unbind()
        low_v, ratio, excess, _ = self.sums.sum(0).unbind()
        dropped = self.candidates - search.kept

        def share(x: Tensor, n: Tensor) -> Tensor:
            return torch.where(n > 0, x.to(low_v.dtype) / n.clamp(min=1).to(low_v.dtype), 0.0)

        floats = [
            share(low_v + self.candidate_v, region),
            share(low_v + search.kept_sum, low + search.kept),
            share(dropped, valid),
            share(region, valid),
            digits.cut_value(search, dtype),
            share(ratio, valid),
            self.sums[:, 3].max(),
            share(excess, valid),
            share(clipped, valid),
        ]
        first_nonfinite = torch.full_like(valid, -1)  # a position on one rank only
        counts = [valid, region, self.candidates, dropped, nonfinite, clipped, first_nonfinite]
        return Metrics(torch.stack(counts), torch.stack(floats))
