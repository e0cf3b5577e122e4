"""M2Accumulator used wrongly: what is refused, when, and with which words."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import Tokens, random_tokens
from test_accumulate import accumulate, pieces

from m2po_kernels import M2Accumulator, m2po_loss
from m2po_kernels.errors import InvalidArgument, InvalidType, MissingBehaviorLogProbs


def test_order_of_misuse(device):
    tokens = random_tokens((4, 10), device=device)
    acc, (part,), sel = accumulate([tokens])
    other, (foreign,), _ = accumulate([tokens])
    with pytest.raises(InvalidArgument, match=r"add\(\) after solve\(\)"):
        acc.add(*tokens)
    with pytest.raises(InvalidArgument, match=r"solve\(\) was called before"):
        acc.solve()
    with pytest.raises(InvalidArgument, match="part must be a handle"):
        m2po_loss(*tokens, selection=sel, part=foreign)
    with pytest.raises(InvalidArgument, match="part must be a handle"):
        sel.keep_of(3)
    with pytest.raises(InvalidArgument, match="part is None"):
        m2po_loss(*tokens, selection=sel)
    with pytest.raises(InvalidArgument, match="part goes with selection="):
        m2po_loss(*tokens, part=part)
    with pytest.raises(InvalidArgument, match=r"selection was made for \[4, 10\]"):
        m2po_loss(*pieces(tokens, 2)[0], selection=sel, part=part)
    with pytest.raises(InvalidArgument, match="m2_threshold must be left out"):
        m2po_loss(*tokens, m2_threshold=0.1, selection=sel, part=part)
    m2po_loss(*tokens, selection=sel, part=part)
    acc.close()
    with pytest.raises(InvalidArgument, match="never given"):
        other.close()


def test_inputs_that_do_not_go_together():
    tokens = random_tokens((4, 10))
    acc = M2Accumulator()
    acc.add(*tokens)
    with pytest.raises(InvalidArgument, match="must not be float64"):
        acc.add(*tokens.to(dtype=torch.float64))
    acc.add(*tokens.to(dtype=torch.bfloat16))
    with pytest.raises(InvalidArgument, match="must be float64"):
        M2Accumulator(dtype=torch.float64).add(*tokens)
    with pytest.raises(InvalidArgument, match="must be on meta"):
        M2Accumulator(device="meta").add(*tokens)
    with pytest.raises(InvalidType, match="dtype must be"):
        M2Accumulator(dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="m2_threshold must be >= 0"):
        M2Accumulator(m2_threshold=-1)


def test_missing_behavior_log_probs_are_an_error_of_solve():
    lp, _, adv, mask = random_tokens((4, 10))
    acc = M2Accumulator()
    acc.add(lp, lp, adv, mask)
    acc.add(lp, None, adv, mask)
    with pytest.raises(MissingBehaviorLogProbs, match=r"None for 1 micro-batches.*; rank 0 of 1: parts \[1\]"):
        acc.solve()


def test_check_finds_parts_that_were_mixed_up(device, monkeypatch):
    """Parts of one shape, swapped: nothing but their values can tell. Without the check it passes, which is why there is one."""
    tokens = random_tokens((8, 30), device=device)
    a, b = pieces(tokens, 4)
    _, (first, _), sel = accumulate([a, b])
    m2po_loss(*b, selection=sel, part=first)
    monkeypatch.setenv("M2PO_CHECK", "1")
    _, (first, second), sel = accumulate([a, b])
    with pytest.raises(InvalidArgument, match="part 0 was added with another mask, behavior_log_probs or advantages"):
        m2po_loss(*b, selection=sel, part=first)
    m2po_loss(*b, selection=sel, part=second)
    moved = dataclasses.replace(a, log_probs=a.log_probs + 1)
    m2po_loss(*moved, selection=sel, part=first)  # log_probs may be others by now
    spoiled = Tokens(*(t.masked_fill(~a.mask, math.nan) for t in list(a)[:3]), a.mask)
    m2po_loss(*spoiled, selection=sel, part=first)  # and what is masked out may be anything
    for field in ("behavior_log_probs", "advantages", "mask"):
        value = getattr(a, field).clone()
        at = tuple(a.mask.nonzero()[0].tolist())
        value[at] = 0 if field == "mask" else value[at] + 1
        with pytest.raises(InvalidArgument, match="part 0 was added with another"):
            m2po_loss(*dataclasses.replace(a, **{field: value}), selection=sel, part=first)
    nothing = torch.zeros(2, 3, device=device)  # the mask alone tells, where values are 0
    _, (zero,), of_zeros = accumulate([Tokens(nothing, nothing, nothing, nothing)])
    with pytest.raises(InvalidArgument, match="part 0 was added with another"):
        m2po_loss(nothing, nothing, nothing, nothing + 1, selection=of_zeros, part=zero)
    swapped = a.behavior_log_probs.flip(0)
    with pytest.raises(InvalidArgument, match="part 0 was added with another"):
        m2po_loss(*dataclasses.replace(a, behavior_log_probs=swapped), selection=sel, part=first)


def test_check_must_be_0_or_1(monkeypatch):
    monkeypatch.setenv("M2PO_CHECK", "yes")
    with pytest.raises(InvalidArgument, match="M2PO_CHECK must be 0 or 1; got 'yes'"):
        accumulate([random_tokens((4, 10))])
