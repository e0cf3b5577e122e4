"""What `m2po check` runs: the worked cases, the bundled rollouts and seeded random batches, in named groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import ROLLOUT_FIGURES, WORKED_CASES, RolloutFigures, WorkedCase
from .rollouts import bundled

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SEEDS = (0, 1, 2)
STALENESS = ("healthy", "stale", "very stale", "all candidates", "ties")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One call: four tensors on the CPU, the keywords of the loss, and what is published about the result, if anything."""

    group: str
    name: str
    inputs: Inputs
    options: dict[str, Any] = field(default_factory=dict)
    clip: bool = False  # grpo_loss instead of m2po_loss
    strided: bool = False  # every second element of buffers twice as wide
    grad_output: float = 1.0
    published: WorkedCase | RolloutFigures | None = None


def all_cases(rollouts: bool = True) -> Iterator[Case]:
    """Every case, group by group, made one at a time. rollouts: with the bundled ones, which safetensors reads."""
    for worked in WORKED_CASES:
        for dtype in DTYPES:
            published = worked if dtype == torch.float32 else None
            options = {"m2_threshold": worked.m2_threshold}
            yield Case("worked T1-T12", f"{worked.name} {_short(dtype)}", worked.tensors(dtype), options, published=published)
    for figures in ROLLOUT_FIGURES if rollouts else ():
        name = figures.column.removeprefix("log_probs_")
        yield Case(f"rollouts {name}", name, bundled(figures.column), published=figures)
    for dtype in DTYPES:
        for staleness in STALENESS:
            for seed in SEEDS:
                inputs = random_batch(seed, staleness, dtype)
                yield Case(f"random {_short(dtype)}", f"{staleness}, {_short(dtype)}, seed {seed}", inputs)
    yield from _option_cases()


def random_batch(
    seed: int, staleness: str, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = (16, 257), spikes: bool = True
) -> Inputs:
    """(log_probs, behavior_log_probs, advantages [B], mask): sequences of random lengths with poison in the padding.

    staleness, one of STALENESS: log-ratios of spread 0.03, 0.25 or 1; all in T above any usual threshold; or multiples of
    1/8, exact in every dtype, so that many are equal. spikes: a few far log-ratios, some with exp(d) below 2^-126.
    """
    rng = _rng(seed)
    rows, columns = shape
    advantages = torch.randn(rows, generator=rng)
    advantages[::4] = 0.0
    behavior = torch.rand(shape, generator=rng).clamp(min=1e-6).log() * 0.7
    noise = torch.randn(shape, generator=rng)
    uniform = torch.rand(shape, generator=rng)
    sign = advantages.sign()[:, None]
    if staleness == "all candidates":
        moves = sign * (0.3 + uniform)
    elif staleness == "ties":
        behavior, moves = (behavior * 8).round() / 8, (noise * 2).round() / 8
    else:
        moves = noise * {"healthy": 0.03, "stale": 0.25, "very stale": 1.0}[staleness]
    if spikes and staleness != "all candidates":
        far = torch.rand(shape, generator=rng) < 0.003
        moves = torch.where(far, noise.clamp(-1.5, 1.5) + 0.5 * noise.sign(), moves)
        # Against the sign of A, so that it is kept and its tiny ratio reaches the gradient.
        moves[1, :2] = torch.tensor([-90.0, -100.0]) if advantages[1] > 0 else torch.tensor([0.5, 1.0])
    lengths = torch.randint(1, columns + 1, (rows,), generator=rng)
    lengths[0] = columns
    mask = torch.arange(columns) < lengths[:, None]
    poison = torch.tensor([math.nan, math.inf, -math.inf, 1e4])[(uniform * 4).long().clamp(max=3)]
    log_probs = torch.where(mask, behavior + moves, poison)
    return log_probs.to(dtype), torch.where(mask, behavior, poison.flip(0)).to(dtype), advantages.to(dtype), mask


def _option_cases() -> Iterator[Case]:
    for seed in SEEDS:
        reference = torch.randn((16, 257), generator=_rng(100 + seed)) * 0.1
        for staleness in ("healthy", "stale", "very stale"):
            log_probs, behavior, advantages, mask = inputs = random_batch(seed, staleness)
            ref = torch.where(mask, log_probs + reference, math.nan)
            kl = {"ref_log_probs": ref, "kl_coef": 0.05}
            options: list[tuple[str, dict[str, Any]]] = [
                ("scope=all", {"scope": "all"}),
                ("sequence-mean", {"reduction": "sequence-mean"}),
                ("sum", {"reduction": "sum"}),
                ("none", {"reduction": "none"}),
                ("kl_coef", kl),
                ("kl_coef", {**kl, "reduction": "sequence-mean"}),
                ("ratio_cap", {"ratio_cap": 1.5}),
                ("denominator=kept", {"denominator": "kept"}),
                ("denominator=kept", {"denominator": "kept", **kl}),
                ("denominator given", {"denominator": 12345.0}),
                ("threshold 0 and inf", {"m2_threshold": 0.0}),
                ("threshold 0 and inf", {"m2_threshold": math.inf}),
            ]
            tag = f"{staleness}, seed {seed}"
            for group, keywords in options:
                yield Case(group, tag, inputs, keywords)
            yield Case("grad_output, strided", tag, inputs, strided=True, grad_output=-3.0)
            yield Case("mixed dtypes", tag, (log_probs, behavior.bfloat16(), advantages.half(), mask.to(torch.uint8)))
            yield Case("grpo_loss", tag, inputs, {"clip_low": 0.2, "clip_high": 0.28}, clip=True)
            yield Case("grpo_loss", tag, inputs, {**kl, "ratio_cap": 3.0, "reduction": "sequence-mean"}, clip=True)
            yield from _packed(tag, inputs)
        yield from _edges(seed)
    long = (1, (1 << 20) + 3)
    log_probs, behavior, _, mask = random_batch(7, "stale", shape=long, spikes=False)
    yield Case("2^20 + 3 tokens", "stale", (log_probs, behavior, torch.randn(long, generator=_rng(7)), mask))


def _packed(tag: str, inputs: Inputs) -> Iterator[Case]:
    log_probs, behavior, advantages, mask = inputs
    lengths = mask.sum(1)
    packed = (log_probs[mask], behavior[mask], advantages, torch.rand(int(lengths.sum()), generator=_rng(3)) < 0.9)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    for reduction in ("token-mean", "sequence-mean"):
        yield Case("packed, cu_seqlens", f"{tag}, {reduction}", packed, {"cu_seqlens": cu_seqlens, "reduction": reduction})


def _edges(seed: int) -> Iterator[Case]:
    log_probs, behavior, advantages, mask = random_batch(seed, "stale")
    group = "edges"
    yield Case(group, "nothing valid", (log_probs, behavior, advantages, torch.zeros_like(mask)))
    yield Case(group, "empty", (log_probs[:, :0], behavior[:, :0], advantages, mask[:, :0]))
    yield Case(group, "one token", (log_probs[1:2, 2:3], behavior[1:2, 2:3], advantages[1:2], torch.ones(1, 1)))
    infinite = behavior.clone()
    infinite[1, 0] = infinite[2, 0] = -math.inf if float(advantages[1]) > 0 else math.inf
    first_rows = (log_probs[1:2], infinite[1:2], advantages[1:2], mask[1:2])
    yield Case(group, "infinite v in T", first_rows)
    holes = log_probs.clone()
    holes[:, 1] = math.nan
    yield Case(group, "nonfinite=drop", (holes, behavior, advantages, mask), {"nonfinite": "drop"})
    for shares in (0, 1):  # a whole batch of equals, in T or not
        same = torch.full((4, 33), 0.5 if shares else -0.5)
        yield Case(group, "all equal", (same, torch.zeros(4, 33), torch.ones(4), torch.ones(4, 33)))


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}[dtype]
