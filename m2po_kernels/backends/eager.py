"""Plain torch, any device. Sorts only the candidates (v > tau); on a CPU it walks in tiles that stay in cache.

The decision is made in exact integers, so its bits are those of every other backend (docs/architecture.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..exact import Unit, find_cut, from_key, is_dropped
from ..inputs import compute_dtype, wide_dtype
from ..parts import Collected
from ..rule import Batch, Rule
from .eager_logits import log_softmax, log_softmax_backward

__all__ = ["collect", "log_softmax", "log_softmax_backward", "policy_loss", "policy_loss_backward", "select", "why_not"]

# Tokens in a tile on a CPU: temporaries of 512 KB stay in cache and come from the allocator's free
# list. On other devices a tile is the whole batch: there a launch costs more than a trip to memory.
TILE = 1 << 17
ROW = 1 << 10  # fp64 sums run over rows of this many values, each summed by one thread: the same bits for any thread count


def why_not(device: torch.device) -> None:
    """Always None: plain torch runs wherever the tensors are."""


class _Tile(NamedTuple):
    """The per-token terms of one tile, flat; d, v and advantages are 0 where not valid."""

    d: Tensor
    v: Tensor
    advantages: Tensor
    along: Tensor  # d in the direction that the advantage rewards; 0 where the advantage is
    valid: Tensor
    bad: Tensor | None  # valid, but not finite; None: nowhere
    region: Tensor  # T
    q: Tensor | None  # ref_log_probs - log_probs
    weights: Tensor | None
    keep: Tensor | None


def select(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(keep, counts, floats), as the op m2po_kernels::select returns them."""
    keep = torch.empty(batch.log_probs.shape, dtype=torch.bool, device=batch.log_probs.device)
    swept = _sweep(batch, rule, keep_out=keep)
    cut = find_cut(swept.v, swept.positions, swept.counts[5], swept.low_sum, swept.unit, rule.m2_threshold)
    keep.view(-1)[swept.positions[is_dropped(swept.v, swept.positions, cut)]] = False
    _, counts, floats = _finish(swept, cut, rule)
    return keep, counts, floats


def collect(batch: Batch, rule: Rule) -> Collected:
    """What the batch gives to a selection over several. The one host sync off a CPU is for the number of candidates."""
    keep = torch.empty(batch.log_probs.shape, dtype=torch.bool, device=batch.log_probs.device)
    swept = _sweep(batch, rule, keep_out=keep)
    valid, region, bad, clipped, _, low, first_bad = swept.counts.unbind()
    counts = torch.stack([valid, region, bad, clipped, low, swept.low_sum, first_bad])
    sums = torch.stack([swept.sums[2], swept.sums[4], swept.sums[5], swept.ratio_max])
    return Collected(keep, counts, sums, swept.v, swept.positions)


def policy_loss(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scales, cut, counts, floats), as the op m2po_kernels::policy_loss returns them."""
    dtype, device = compute_dtype(batch.log_probs), batch.log_probs.device
    per_token = torch.empty(batch.log_probs.shape, dtype=dtype, device=device) if rule.per_token else None
    swept = _sweep(batch, rule, loss_out=per_token)
    cut = find_cut(swept.v, swept.positions, swept.counts[5], swept.low_sum, swept.unit, rule.m2_threshold)
    sums, counts, floats = _finish(swept, cut, rule)
    scales = _scales(batch.denominators, counts, rule, device)
    if per_token is not None:
        kept = ~is_dropped(swept.v, swept.positions, cut)
        per_token.view(-1)[swept.positions[kept]] += swept.policy[kept]
        return per_token, scales, cut, counts, floats
    # A scale of 0 says that there is nothing to divide by: the loss is then 0, whatever the sums hold.
    loss = torch.where(scales != 0, sums * scales, 0.0).sum().to(dtype)
    return loss, scales, cut, counts, floats


def policy_loss_backward(grad_loss: Tensor, scales: Tensor, cut: Tensor, batch: Batch, rule: Rule, out: Tensor) -> None:
    """Writes d loss / d log_probs into `out` (shape and dtype of log_probs, any strides)."""
    dtype = compute_dtype(batch.log_probs)
    for start, index in _tiles(batch.log_probs):
        t = _tile(batch, rule, index)
        moves = t.valid & (t.advantages != 0)
        if t.keep is not None:
            moves &= t.keep
        elif rule.rule == "m2po":
            moves &= ~(t.region & _beyond(t.v, start, cut))
        flat = _flat(t, rule)
        if flat is not None:
            moves &= ~flat
        factor = grad_loss[index].reshape(-1).double() if rule.per_token else grad_loss.double()
        weights = 1 if t.weights is None else t.weights
        coefficient = (-factor * scales[0]).to(dtype)
        moves &= coefficient != 0  # an infinite ratio times nothing is nothing
        grad = _only(t.d.exp_() * (t.advantages * coefficient * weights), _as_bits(moves, dtype))
        if t.q is not None:
            coefficient = (rule.kl_coef * factor * scales[1]).to(dtype)
            grad -= torch.where(t.valid & (coefficient != 0), torch.expm1(t.q) * (coefficient * weights), 0.0)
        out[index] = grad.reshape(out[index].shape).to(out.dtype)


def _beyond(v: Tensor, start: int, cut: Tensor) -> Tensor:
    """Which v, of the tokens from position `start` on, the cut drops if they are in T."""
    cut_v = from_key(cut[0], v.dtype)
    beyond = v > cut_v
    if v.device.type == "cpu":  # here the cut's position can be read, and seldom lies in the tile
        up_to = max(0, int(cut[1]) + 1 - start)
        beyond[:up_to] |= v[:up_to] == cut_v
        return beyond
    return beyond | ((v == cut_v) & (torch.arange(start, start + v.numel(), device=v.device) <= cut[1]))


class _Swept(NamedTuple):
    """What one sweep leaves: sums that are final, and the candidates in the order of their positions."""

    counts: Tensor  # int64: valid, region, bad, clipped, settled drops (given keep), low, first bad
    low_sum: Tensor  # int64, in the rounding unit
    sums: Tensor  # fp64: policy, kl, v kept on sight, v dropped by a given keep, ratio, approx_kl
    ratio_max: Tensor
    gone_min: Tensor  # smallest v dropped by a given keep
    v: Tensor
    policy: Tensor
    positions: Tensor
    unit: Unit


def _sweep(batch: Batch, rule: Rule, keep_out: Tensor | None = None, loss_out: Tensor | None = None) -> _Swept:
    dtype, device = compute_dtype(batch.log_probs), batch.log_probs.device
    wide = wide_dtype(device)
    unit = Unit.of(rule.m2_threshold, dtype)
    rows: list[tuple[Tensor, ...]] = []
    low_sums: list[Tensor] = []
    candidates: list[tuple[Tensor, Tensor, Tensor]] = []
    for start, index in _tiles(batch.log_probs):
        t = _tile(batch, rule, index)
        ratio = t.d.exp()
        policy = -(_effective_ratio(ratio, _flat(t, rule), t, rule) * t.advantages)
        counts = t.advantages != 0  # where the policy term is final, and not 0
        kl = gone = None
        if t.weights is not None:
            policy = policy * t.weights
        if t.q is not None:
            kl = rule.kl_coef * torch.where(t.valid, torch.expm1(t.q) - t.q, 0.0)
            kl = kl if t.weights is None else kl * t.weights
        settled = t.region
        if t.keep is not None:
            gone = t.valid & ~t.keep
            counts, settled = counts & ~gone, settled & ~gone
        elif rule.rule == "m2po":
            over = t.region & (t.v > unit.candidate_above)
            chosen = over.nonzero().flatten()
            candidates.append((t.v[chosen], policy[chosen], chosen + start))
            counts, settled = counts & ~over, settled & ~over
        policy = _only(policy, _as_bits(counts, dtype))
        if loss_out is not None:  # a candidate's policy term comes later
            loss_out[index] = (policy if kl is None else policy + kl).reshape(loss_out[index].shape)
        if keep_out is not None:
            keep_out[index] = t.valid.reshape(keep_out[index].shape)
        v_settled = _only(t.v, _as_bits(settled, dtype))
        low_sums.append((v_settled * unit.scale[0] * unit.scale[1]).round_().to(torch.int64).sum())
        ratio = _only(ratio, _as_bits(t.valid, dtype))
        none, never = torch.zeros((), dtype=wide, device=device), torch.full((), math.inf, dtype=wide, device=device)
        rows.append(
            (
                _sum(policy, wide),
                none if kl is None else _sum(kl, wide),
                _sum(v_settled, wide),
                none if gone is None else _sum(torch.where(gone & t.region, t.v, 0.0), wide),
                _sum(ratio, wide),
                _sum(torch.expm1(t.d).sub_(t.d), wide),
                torch.count_nonzero(t.valid).to(wide),
                torch.count_nonzero(t.region).to(wide),
                none if t.bad is None else torch.count_nonzero(t.bad).to(wide),
                torch.count_nonzero(_clipped(t, rule)).to(wide),
                none if gone is None else torch.count_nonzero(gone).to(wide),
                torch.count_nonzero(settled).to(wide),
                ratio.max().to(wide),
                never if gone is None else torch.where(gone, t.v, math.inf).min().to(wide),
                never if t.bad is None else _first(t.bad, start).to(wide),
            )
        )
    table = torch.stack([torch.stack(row) for row in rows]) if rows else torch.zeros(1, 15, dtype=wide, device=device)
    empty = torch.empty(0, dtype=dtype, device=device)
    if not candidates:
        candidates = [(empty, empty, torch.empty(0, dtype=torch.int64, device=device))]
    v, policy, positions = (torch.cat(column) for column in zip(*candidates, strict=True))
    first_bad = table[:, 14].min()
    first_bad = torch.where(table[:, 8].sum() > 0, first_bad, -1.0)
    return _Swept(
        counts=torch.cat([table[:, 6:12].sum(0), first_bad[None]]).to(torch.int64),
        low_sum=torch.stack(low_sums).sum() if low_sums else torch.zeros((), dtype=torch.int64, device=device),
        sums=table[:, :6].sum(0),
        ratio_max=table[:, 12].max(),
        gone_min=table[:, 13].min() if rows else torch.full((), math.inf, dtype=wide, device=device),
        v=v,
        policy=policy,
        positions=positions,
        unit=unit,
    )


def _as_bits(where: Tensor, dtype: torch.dtype) -> Tensor:
    """All ones where true, else zero: integers as wide as `dtype`."""
    return where.to(torch.int64 if dtype == torch.float64 else torch.int32).neg_()


def _only(x: Tensor, bits: Tensor) -> Tensor:
    """x where `bits` are ones, else 0, whatever x holds there. On a CPU a few times quicker than torch.where."""
    return (x.view(bits.dtype) & bits).view(x.dtype)


def _first(bad: Tensor, start: int) -> Tensor:
    return torch.where(bad.any(), bad.to(torch.uint8).argmax().double() + start, math.inf)


def _tiles(like: Tensor) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """(position of the first token, index) of tiles in row-major order; each is a run of whole rows or a piece of one row."""
    if like.numel() == 0:
        return
    rows, columns = (1, like.shape[0]) if like.dim() == 1 else like.shape
    tile = TILE if like.device.type == "cpu" else like.numel()
    width = min(columns, tile)
    height = max(1, tile // columns) if width == columns else 1
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            piece = slice(column, column + width)
            yield row * columns + column, ((piece,) if like.dim() == 1 else (slice(row, row + height), piece))


def _tile(batch: Batch, rule: Rule, index: tuple[slice, ...]) -> _Tile:
    dtype = compute_dtype(batch.log_probs)

    def flat(tensor: Tensor) -> Tensor:
        return tensor[index].reshape(-1).to(dtype)

    log_probs, advantages = flat(batch.log_probs), flat(batch.advantages)
    d = log_probs - flat(batch.behavior_log_probs)
    q = None if batch.ref_log_probs is None else flat(batch.ref_log_probs) - log_probs
    valid = batch.mask[index].reshape(-1)
    valid = valid if valid.dtype == torch.bool else valid != 0
    bad = _bad(d, advantages, q, valid)
    if bad is not None and rule.nonfinite == "drop":
        valid = valid & ~bad
    bits = _as_bits(valid, dtype)
    d, advantages = _only(d, bits), _only(advantages, bits)
    q = None if q is None else _only(q, bits)
    v = d * d
    along = d * advantages.sign()
    region = along > 0 if rule.scope == "quadrants" else valid & (v == v)
    weights = None if batch.weights is None else flat(batch.weights)
    keep = None if batch.keep is None else batch.keep[index].reshape(-1)
    return _Tile(d, v, advantages, along, valid, bad, region, q, weights, keep)


def _bad(d: Tensor, advantages: Tensor, q: Tensor | None, valid: Tensor) -> Tensor | None:
    if d.device.type == "cpu":  # here reading a value costs nothing, and two sums less than the test of each token
        total = d.sum() + advantages.sum() + (0.0 if q is None else q.sum())
        if math.isfinite(float(total)):
            return None
    probe = d * 0.0 + advantages * 0.0  # 0 where finite, else NaN
    return valid & ((probe if q is None else probe + q * 0.0) != 0)


def _clip_bounds(rule: Rule, dtype: torch.dtype) -> tuple[float, float]:
    both = torch.tensor([rule.clip_high, -rule.clip_low], dtype=torch.float64).log1p().to(dtype).tolist()
    return both[0], both[1]


def _flat(t: _Tile, rule: Rule) -> Tensor | None:
    """Where the loss does not follow the ratio: beyond PPO's clip or the ratio cap. None: nowhere."""
    flat = None
    if not math.isinf(rule.ratio_cap):
        log_cap = float(torch.tensor(rule.ratio_cap, dtype=torch.float64).log().to(t.d.dtype))
        flat = (t.advantages < 0) & (t.d > log_cap)
    if rule.rule == "clip":
        clipped = _clipped(t, rule)
        flat = clipped if flat is None else flat | clipped
    return flat


def _clipped(t: _Tile, rule: Rule) -> Tensor:
    high, low = _clip_bounds(rule, t.d.dtype)
    return ((t.d > high) | (t.d < low)) & (t.along > 0)


def _effective_ratio(ratio: Tensor, flat: Tensor | None, t: _Tile, rule: Rule) -> Tensor:
    if flat is None:
        return ratio
    if rule.rule == "clip":
        high, low = torch.full_like(ratio, 1 + rule.clip_high), torch.full_like(ratio, 1 - rule.clip_low)
        bound = torch.where(t.advantages > 0, high, torch.where(t.d < 0, low, rule.ratio_cap))
        return torch.where(flat, bound, ratio)
    return torch.where(flat, rule.ratio_cap, ratio)


def _sum(x: Tensor, wide: torch.dtype) -> Tensor:
    """fp64 sum in an order that depends on the length alone."""
    whole = x.numel() // ROW * ROW
    rows = torch.cat([x[:whole].view(-1, ROW).sum(1, dtype=wide), x[whole:].sum(dtype=wide)[None]])
    return rows.sum() if rows.numel() <= ROW else _sum(rows, wide)


def _finish(swept: _Swept, cut: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(sums of the policy and KL terms, counts, floats)."""
    wide = swept.sums.dtype
    gone = is_dropped(swept.v, swept.positions, cut)
    kept = ~gone
    policy, kl, v_settled, v_gone, ratio, excess = swept.sums.unbind()
    valid, region, bad, clipped, settled_drops, low, first_bad = swept.counts.unbind()
    policy = policy + _sum(torch.where(kept, swept.policy, 0.0), wide)
    v_kept = v_settled + _sum(torch.where(kept, swept.v, 0.0), wide)
    v_all = v_settled + v_gone + _sum(swept.v, wide)
    dropped = settled_drops + gone.sum()
    n_kept = low + kept.sum()
    counts = torch.stack([valid, region, torch.full_like(valid, swept.v.numel()), dropped, bad, first_bad])
    counts = torch.cat([counts[:5], clipped[None], counts[5:]])
    top = torch.minimum(from_key(cut[0], swept.v.dtype).to(wide), swept.gone_min)

    def share(x: Tensor, n: Tensor) -> Tensor:
        return torch.where(n > 0, x.to(wide) / n.clamp(min=1).to(wide), 0.0)

    floats = torch.stack(
        [
            share(v_all, region),
            share(v_kept, n_kept),
            share(dropped, valid),
            share(region, valid),
            top,
            share(ratio, valid),
            swept.ratio_max,
            share(excess, valid),
            share(clipped, valid),
        ]
    )
    return torch.stack([policy, kl]), counts, floats


def _scales(denominators: Tensor | None, counts: Tensor, rule: Rule, device: torch.device) -> Tensor:
    """fp64 [2]: one over the denominators of the policy and the KL term, 0 for a denominator of 0."""
    wide = wide_dtype(device)
    if rule.normalizer == "one":
        return torch.ones(2, dtype=wide, device=device)
    if denominators is None:
        policy = counts[0] - counts[3] if rule.normalizer == "kept" else counts[0]
        denominators = torch.stack([policy, counts[0]]).to(wide)
    return torch.where(denominators != 0, 1.0 / denominators, 0.0)
