"""The contract's hand-made cases and the bundled real rollouts, on every backend and dtype."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import DTYPES, Tokens, assert_matches_oracle, oracle_of, run
from safetensors.torch import load_file
from worked_cases import CASES, D_T1, D_T2, ROLLOUTS

import m2po_kernels
from m2po_kernels import m2po_loss, select
from m2po_kernels.reference import log_ratio, select_literal, trust_region

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_worked_case_has_the_written_answer(case, device, backend):
    tokens = case.tokens(device=device)
    keep = select(*tokens, m2_threshold=case.tau, backend=backend).keep
    assert keep.cpu().int().tolist() == case.keep
    result = run(m2po_loss, tokens, m2_threshold=case.tau, backend=backend)
    if case.loss is not None:
        assert float(result.loss) == pytest.approx(case.loss, abs=5e-8 * max(1, abs(case.loss)) + 5e-8)
    if case.grad is not None:
        torch.testing.assert_close(result.grad, torch.tensor(case.grad), rtol=1e-6, atol=5e-8)
        zero = torch.tensor(case.grad) == 0
        assert bool((result.grad[zero] == 0).all())
    for name, value in case.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=2e-6), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_worked_case_matches_the_oracle_of_the_rounded_inputs(case, dtype, device, backend):
    tokens = case.tokens(dtype)
    lp, blp, adv, mask = tokens
    d, v = log_ratio(lp, blp)
    region = trust_region(d, adv, mask)
    expected = select_literal(torch.where(mask, v, 0), region, mask, case.tau)
    on_device = tokens.to(device)
    sel = select(*on_device, m2_threshold=case.tau, backend=backend)
    assert torch.equal(sel.keep.cpu(), expected)
    result = run(m2po_loss, on_device, m2_threshold=case.tau, backend=backend)
    if case.name == "T12":  # its first d is beyond exp's range in fp32, so its ratio metrics are inf and the oracle's are not
        assert float(result.grad[0]) == 0
        assert float(result.loss) == pytest.approx(-float(d[1].double().exp()) / 2, rel=1e-6)
        return
    assert_matches_oracle(result, m2po_loss, tokens, m2_threshold=case.tau)


def test_threshold_is_compared_as_a_double(device, backend):
    """T11: v is fp32(.1), above the double .1 by 1.5e-9. A tau rounded to fp32 would equal it and keep the token."""
    tokens = BY_NAME["T11"].tokens(device=device)
    v = float(tokens.log_probs[0] * tokens.log_probs[0])
    assert v == float(torch.tensor(0.1)) > 0.1
    assert select(*tokens, m2_threshold=0.1, backend=backend).keep.tolist() == [False]
    assert select(*tokens, m2_threshold=v, backend=backend).keep.tolist() == [True]


def test_zero_advantage_contributes_exactly_nothing(device, backend):
    """T12, with a d that overflows exp beside a token that counts: not one bit of loss or gradient comes from it."""
    tokens = BY_NAME["T12"].tokens(device=device)
    alone = tokens.map(lambda t: t[1:])
    with_it = run(m2po_loss, tokens, denominator=2, backend=backend)
    without = run(m2po_loss, alone, denominator=2, backend=backend)
    assert torch.equal(with_it.loss, without.loss)
    assert with_it.grad.tolist() == [0.0, *without.grad.tolist()]


@pytest.mark.parametrize(("d", "size"), [(D_T1, 4), (D_T2, 4)], ids=["T1", "T2"])
def test_selection_of_the_whole_applied_to_parts_adds_up(d, size, device, backend):
    tokens = Tokens(torch.tensor(d), torch.zeros(len(d)), torch.ones(len(d)), torch.ones(len(d), dtype=torch.bool)).to(device)
    sel = select(*tokens, backend=backend)
    whole = run(m2po_loss, tokens, backend=backend)
    by_selection = run(m2po_loss, tokens, selection=sel, backend=backend)
    assert torch.equal(whole.loss, by_selection.loss)
    assert torch.equal(whole.grad, by_selection.grad)
    parts = []
    for piece in (slice(None, size), slice(size, None)):
        mine = dataclasses.replace(sel, keep=sel.keep[piece])
        part = tokens.map(lambda t, piece=piece: t[piece])
        parts.append(run(m2po_loss, part, selection=mine, backend=backend))
    assert torch.equal(torch.cat([p.grad for p in parts]), whole.grad)
    assert sum(float(p.loss) for p in parts) == pytest.approx(float(whole.loss), rel=2.0**-22)
    assert sum(p.metrics["dropped_tokens"] for p in parts) == whole.metrics["dropped_tokens"]
    # On its own the first part of T1 and the second of T2 exceed the threshold: selecting per part is another answer.
    alone = torch.cat(
        [select(*tokens.map(lambda t, p=p: t[p]), backend=backend).keep for p in (slice(0, size), slice(size, None))]
    )
    assert not torch.equal(alone, sel.keep)


@pytest.fixture(scope="module")
def rollouts() -> dict[str, torch.Tensor]:
    return load_file(Path(m2po_kernels.__file__).parent / "data" / "smollm2_rollouts.safetensors")


@pytest.mark.parametrize(
    ("name", "region", "candidates", "dropped", "before", "after", "loss"), ROLLOUTS, ids=[r[0] for r in ROLLOUTS]
)
def test_real_rollouts(rollouts, name, region, candidates, dropped, before, after, loss, device, backend):
    tokens = Tokens(rollouts[name], rollouts["behavior_log_probs"], rollouts["advantages"], rollouts["mask"])
    on_device = tokens.to(device)
    sel = select(*on_device, backend=backend)
    result = run(m2po_loss, on_device, backend=backend)
    for metrics in (sel.metrics, m2po_loss(*on_device, backend=backend).metrics):
        assert int(metrics.valid_tokens) == 5470
        assert int(metrics.trust_region_tokens) == region
        assert int(metrics.candidate_tokens) == candidates
        assert int(metrics.dropped_tokens) == dropped
        assert float(metrics.m2_before) == pytest.approx(before, abs=5e-9)
        assert float(metrics.m2_after) == pytest.approx(after, abs=5e-9)
    assert float(oracle_of(m2po_loss, tokens).loss) == pytest.approx(loss, abs=5e-9)
    assert float(result.loss) == pytest.approx(loss, abs=5e-9 + 2.0**-28)  # half a written digit and one fp32 ulp
    assert_matches_oracle(result, m2po_loss, tokens)

    d, v = log_ratio(tokens.log_probs, tokens.behavior_log_probs)
    valid = tokens.mask != 0
    inside = trust_region(d, tokens.advantages[:, None].expand(d.shape), valid)
    assert torch.equal(sel.keep.cpu(), select_literal(v, inside, valid, 0.04))
