"""1,000 random batches: eager decides as the oracle does, and every other backend's mask has the bits of eager's."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers import Tokens, assert_mask, decision, random_tokens

from m2po_kernels import select
from m2po_kernels.reference import select_sorted

PARTS, BATCHES = 10, 100
THRESHOLDS = (0.04, 0.04, 0.04, 0.003, 0.5, 0.0, 1e-30, math.inf)


def layout_of(tokens: Tokens, name: str) -> Tokens:
    """The same values, laid out otherwise in memory."""
    if name == "transposed":
        return tokens.map(lambda t: t.t().contiguous().t())
    if name == "every other":
        return tokens.map(lambda t: t.repeat_interleave(2, 1)[:, ::2])
    if name == "rows of a frame":  # 8 tokens and more between rows, the first at a multiple of 16 bytes
        return tokens.map(lambda t: torch.nn.functional.pad(t, (0, 16 - t.shape[1] % 16))[:, : t.shape[1]])
    return tokens


@pytest.mark.parametrize("part", range(PARTS), ids=lambda i: f"part{i}")
def test_masks_of_random_batches(part, device, backend):
    draw = random.Random(part)
    dropped = 0
    for seed in range(part * BATCHES, (part + 1) * BATCHES):
        shape = (draw.randint(1, 6), draw.choice([draw.randint(1, 40), 8 * draw.randint(1, 8)]))
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        tokens = random_tokens(shape, seed=seed, spread=10 ** draw.uniform(-1.5, 0.7), dtype=dtype)
        tau, scope = draw.choice(THRESHOLDS), draw.choice(["quadrants", "quadrants", "all"])
        laid_out = layout_of(tokens, draw.choice(["as they are", "transposed", "every other", "rows of a frame"]))
        options = {"m2_threshold": tau, "scope": scope}
        keep = select(*laid_out.to(device), **options, backend=backend).keep.cpu()
        if backend == "eager":
            v, region, valid = decision(tokens, scope)
            assert_mask(keep, select_sorted(v, region, valid, tau), v, region, tau)
        else:
            assert torch.equal(keep, select(*tokens, **options, backend="eager").keep), (seed, options)
        dropped += int((tokens.mask & ~keep).sum())
    assert dropped > 10 * BATCHES
