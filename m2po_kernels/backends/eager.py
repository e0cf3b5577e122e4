"""Plain torch, any device. Sorts only the candidates (v > tau); on a CPU it walks in tiles that stay in cache.

The decision is made in exact integers, so its bits are those of every other backend (docs/architecture.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..inputs import compute_dtype, wide_dtype
from ..rule import Batch, Rule

# Tokens in a tile on a CPU: temporaries of 256 KB stay in the second-level cache and come from the allocator's free
# list. On other devices a tile is the whole batch: there a launch costs more than a trip to memory.
TILE = 1 << 16
ROW = 1 << 10  # fp64 sums run over rows of this many values, each summed by one thread: the same bits for any thread count
LIMB = 28  # bits in a limb of the exact sums; three hold 2^31 tokens times a 53-bit threshold
SLACK_BITS = 22  # the decision's unit is 2^-SLACK_BITS of the unit in which low tokens are rounded


def why_not(device: torch.device) -> None:
    """Always None: plain torch runs wherever the tensors are."""


class _Unit(NamedTuple):
    """The threshold as an integer: tau = mantissa * 2^exponent, and the scale that makes a low v an integer below 2^31."""

    mantissa: int
    exponent: int
    scale: tuple[float, float]  # two factors, as their product may leave the range of fp32
    candidate_above: float  # the largest value of the compute type that is <= tau

    @classmethod
    def of(cls, tau: float, dtype: torch.dtype) -> _Unit:
        rounded = torch.tensor(tau, dtype=torch.float64).to(dtype)
        if float(rounded) > tau:
            rounded = torch.nextafter(rounded, rounded.new_zeros(()))
        if tau == 0 or math.isinf(tau):
            return cls(0, 0, (0.0, 0.0), float(rounded))
        fraction, exponent = math.frexp(tau)
        k = max(min(31 - exponent, 1000), -1000)
        return cls(int(math.ldexp(fraction, 53)), exponent - 53, (2.0 ** (k // 2), 2.0 ** (k - k // 2)), float(rounded))


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
    cut = _find_cut(swept, rule.m2_threshold)
    dropped = swept.positions[_dropped(swept.v, swept.positions, cut)]
    keep.view(-1)[dropped] = False
    _, counts, floats = _finish(swept, cut, rule)
    return keep, counts, floats


def policy_loss(batch: Batch, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scales, cut, counts, floats), as the op m2po_kernels::policy_loss returns them."""
    dtype, device = compute_dtype(batch.log_probs), batch.log_probs.device
    per_token = torch.empty(batch.log_probs.shape, dtype=dtype, device=device) if rule.per_token else None
    swept = _sweep(batch, rule, loss_out=per_token)
    cut = _find_cut(swept, rule.m2_threshold)
    sums, counts, floats = _finish(swept, cut, rule)
    scales = _scales(batch.denominators, counts, rule, device)
    if per_token is not None:
        kept = ~_dropped(swept.v, swept.positions, cut)
        per_token.view(-1)[swept.positions[kept]] += swept.policy[kept]
        return per_token, scales, cut, counts, floats
    # A scale of 0 says that there is nothing to divide by: the loss is then 0, whatever the sums hold.
    loss = torch.where(scales > 0, sums * scales, 0.0).sum().to(dtype)
    return loss, scales, cut, counts, floats


def policy_loss_backward(grad_loss: Tensor, scales: Tensor, cut: Tensor, batch: Batch, rule: Rule, out: Tensor) -> None:
    """Writes d loss / d log_probs into `out` (shape and dtype of log_probs, any strides)."""
    dtype = compute_dtype(batch.log_probs)
    cut_v = _from_key(cut[0], dtype)
    for start, index in _tiles(batch.log_probs):
        t = _tile(batch, rule, index)
        moves = t.valid & (t.advantages != 0)
        if t.keep is not None:
            moves &= t.keep
        elif rule.rule == "m2po":
            # A dropped v exceeds the threshold, so there is no need to ask whether the token was a candidate.
            position = torch.arange(start, start + t.d.numel(), device=t.d.device)
            moves &= ~(t.region & ((t.v > cut_v) | ((t.v == cut_v) & (position <= cut[1]))))
        flat = _flat(t, rule)
        if flat is not None:
            moves &= ~flat
        factor = grad_loss[index].reshape(-1).double() if rule.per_token else grad_loss.double()
        weights = 1 if t.weights is None else t.weights
        coefficient = (-factor * scales[0]).to(dtype)
        moves &= coefficient != 0  # an infinite ratio times nothing is nothing
        grad = torch.where(moves, t.d.exp_() * (t.advantages * coefficient * weights), 0.0)
        if t.q is not None:
            coefficient = (rule.kl_coef * factor * scales[1]).to(dtype)
            grad -= torch.where(t.valid & (coefficient != 0), torch.expm1(t.q) * (coefficient * weights), 0.0)
        out[index] = grad.reshape(out[index].shape).to(out.dtype)


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
    unit: _Unit


def _sweep(batch: Batch, rule: Rule, keep_out: Tensor | None = None, loss_out: Tensor | None = None) -> _Swept:
    dtype, device = compute_dtype(batch.log_probs), batch.log_probs.device
    wide = wide_dtype(device)
    unit = _Unit.of(rule.m2_threshold, dtype)
    rows: list[tuple[Tensor, ...]] = []
    low_sums: list[Tensor] = []
    candidates: list[tuple[Tensor, Tensor, Tensor]] = []
    for start, index in _tiles(batch.log_probs):
        t = _tile(batch, rule, index)
        ratio = t.d.exp()
        policy = -(_effective_ratio(ratio, _flat(t, rule), t, rule) * t.advantages)
        off = t.advantages == 0
        kl = gone = over = None
        if t.weights is not None:
            policy = policy * t.weights
        if t.q is not None:
            kl = rule.kl_coef * torch.where(t.valid, torch.expm1(t.q) - t.q, 0.0)
            kl = kl if t.weights is None else kl * t.weights
        settled = t.region
        if t.keep is not None:
            gone = t.valid & ~t.keep
            off, settled = off | gone, settled & ~gone
        elif rule.rule == "m2po":
            over = t.region & (t.v > unit.candidate_above)
            chosen = over.nonzero().flatten()
            candidates.append((t.v[chosen], policy[chosen], chosen + start))
            off, settled = off | over, settled & ~over
        policy.masked_fill_(off, 0.0)
        if loss_out is not None:  # a candidate's policy term comes later
            loss_out[index] = (policy if kl is None else policy + kl).reshape(loss_out[index].shape)
        if keep_out is not None:
            keep_out[index] = t.valid.reshape(keep_out[index].shape)
        v_settled = torch.where(settled, t.v, 0.0)
        low_sums.append((v_settled * unit.scale[0] * unit.scale[1]).round_().to(torch.int64).sum())
        ratio.masked_fill_(~t.valid, 0.0)
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
    off = ~valid
    d, advantages = d.masked_fill_(off, 0.0), advantages.masked_fill(off, 0.0)
    q = None if q is None else q.masked_fill_(off, 0.0)
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
    return t.along > (high if high == -low else torch.where(t.advantages > 0, high, -low))


def _effective_ratio(ratio: Tensor, flat: Tensor | None, t: _Tile, rule: Rule) -> Tensor:
    if flat is None:
        return ratio
    if rule.rule == "clip":
        low = torch.where(t.d < 0, 1 - rule.clip_low, rule.ratio_cap)
        return torch.where(flat, torch.where(t.advantages > 0, 1 + rule.clip_high, low).to(ratio.dtype), ratio)
    return torch.where(flat, rule.ratio_cap, ratio)


def _sum(x: Tensor, wide: torch.dtype) -> Tensor:
    """fp64 sum in an order that depends on the length alone."""
    whole = x.numel() // ROW * ROW
    rows = torch.cat([x[:whole].view(-1, ROW).sum(1, dtype=wide), x[whole:].sum(dtype=wide)[None]])
    return rows.sum() if rows.numel() <= ROW else _sum(rows, wide)


def _find_cut(swept: _Swept, tau: float) -> Tensor:
    """int64 [2]: the bits of the smallest dropped v, and the last position dropped among its equals; (inf, -1) for none."""
    device = swept.v.device
    n = swept.v.numel()
    if n == 0:
        return torch.stack([_to_key(swept.v.new_full((), math.inf)), torch.tensor(-1, device=device)])
    # Ascending, the latest of equals first: what is kept is a run from the start.
    values, order = torch.sort(swept.v.flip(0), stable=True)
    if tau == 0:
        n_kept = torch.zeros((), dtype=torch.int64, device=device)
    else:
        n_kept = (_remaining_slack(values, swept, tau) >= 0).sum()
    at = n_kept.clamp(max=n - 1)
    some = n_kept < n
    smallest = torch.where(some, values[at], math.inf)
    return torch.stack([_to_key(smallest), torch.where(some, swept.positions.flip(0)[order[at]], -1)])


def _remaining_slack(values: Tensor, swept: _Swept, tau: float) -> Tensor:
    """tau * (low + run) - sum(low) - sum(run) for each run of `values` from the start: the top limb, whose sign is the sign."""
    mask = (1 << LIMB) - 1
    unit = swept.unit
    fraction, exponent = torch.frexp(values)
    digits = 24 if values.dtype == torch.float32 else 53
    mantissa = torch.ldexp(fraction, torch.tensor(digits, device=values.device)).to(torch.int64)
    shift = exponent.to(torch.int64) - digits - unit.exponent
    # From 2^85 on a value exceeds any slack of 2^31 tokens: counted as exactly that.
    huge = values.isinf() | (shift > 3 * LIMB + 1 - digits)
    n_low, low_sum = swept.counts[5], swept.low_sum
    low_limbs = (
        (low_sum << SLACK_BITS) & mask,
        (low_sum >> (LIMB - SLACK_BITS)) & mask,
        low_sum >> (2 * LIMB - SLACK_BITS),
    )
    run = torch.arange(1, values.numel() + 1, device=values.device)
    carry: Tensor | int = 0
    for limb in range(3):
        left = (shift - LIMB * limb).clamp(-62, LIMB)
        piece = torch.where(left >= 0, mantissa << left.clamp(min=0), mantissa >> (-left).clamp(min=0))
        piece = torch.where(left >= LIMB, 0, piece) if limb < 2 else piece
        piece = torch.where(huge, (1 << (LIMB + 1)) if limb == 2 else 0, piece if limb == 2 else piece & mask)
        tau_limb = (unit.mantissa >> (LIMB * limb)) & mask
        total = (n_low + run) * tau_limb - low_limbs[limb] - piece.cumsum(0) + carry
        carry = total >> LIMB
    return total


def _dropped(v: Tensor, positions: Tensor, cut: Tensor) -> Tensor:
    cut_v = _from_key(cut[0], v.dtype)
    return (v > cut_v) | ((v == cut_v) & (positions <= cut[1]))


def _to_key(v: Tensor) -> Tensor:
    return v.view(torch.int32 if v.dtype == torch.float32 else torch.int64).to(torch.int64)


def _from_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    return key.to(torch.int32).view(dtype) if dtype == torch.float32 else key.view(dtype)


def _finish(swept: _Swept, cut: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(sums of the policy and KL terms, counts, floats)."""
    wide = swept.sums.dtype
    gone = _dropped(swept.v, swept.positions, cut)
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
    top = torch.minimum(_from_key(cut[0], swept.v.dtype).to(wide), swept.gone_min)

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
    return torch.where(denominators > 0, 1.0 / denominators, 0.0)
