"""The factors by which trainers that divide or average must multiply. With DDP and FSDP2 they are used in test_distributed.py."""

from __future__ import annotations

import pytest
from helpers import random_tokens

from m2po_kernels import M2Accumulator, loss_scale, m2po_loss, megatron_loss_scale
from m2po_kernels.errors import InvalidArgument, InvalidType


def test_factors():
    assert loss_scale() == 1
    assert loss_scale(micro_batches=4) == 4
    assert megatron_loss_scale(num_microbatches=4, data_parallel_size=8, context_parallel_size=2) == 64


def test_megatron_divides_the_factor_away():
    """Its schedule and its average over the ranks, written out: what arrives is the sum of the losses."""
    micro_batches, data, context = 3, 2, 2
    tokens = random_tokens((micro_batches * data * context, 20))
    acc = M2Accumulator()
    batches = [tokens.map(lambda t, i=i: t[i : i + 1]) for i in range(len(tokens.log_probs))]
    parts = [acc.add(*batch) for batch in batches]
    sel = acc.solve()
    scale = megatron_loss_scale(num_microbatches=micro_batches, data_parallel_size=data, context_parallel_size=context)
    arrives, terms = 0.0, 0.0
    for batch, part in zip(batches, parts, strict=True):
        loss = m2po_loss(*batch, selection=sel, part=part).loss
        arrives += float(loss * scale / 1 / micro_batches) / (data * context)
        terms += abs(float(loss))
    # Each loss is rounded to fp32, then three times more; the whole once.
    assert arrives == pytest.approx(float(m2po_loss(*tokens).loss), abs=5 * 2.0**-24 * terms)


def test_what_is_no_factor():
    with pytest.raises(InvalidArgument, match="micro_batches must be >= 1; got 0"):
        loss_scale(micro_batches=0)
    with pytest.raises(InvalidType, match="num_microbatches must be an integer"):
        megatron_loss_scale(num_microbatches=1.5, data_parallel_size=1)
    with pytest.raises(InvalidArgument, match="group needs torch"):
        loss_scale("dp")
