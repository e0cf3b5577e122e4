"""The metrics of linear_m2po_loss: over which tokens each is taken, with and without a given selection."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import same_bits
from linear_helpers import loss_tensors, make_case

from m2po_kernels import linear_log_probs, linear_m2po_loss, m2po_loss, select


@pytest.mark.parametrize("in_two_steps", [False, True])
@pytest.mark.parametrize("scope", ["quadrants", "all"])
def test_metrics_with_a_given_selection(scope, in_two_steps):
    """What it dropped is not computed: counted in T all the same, and where its v would be needed the metric says so."""
    case = make_case((6, 30))
    tokens = loss_tensors(case)
    behavior, advantages, mask = tokens
    lp = linear_log_probs(case.hidden, case.weight, case.token_ids)
    sel = select(lp, *tokens, scope=scope)
    assert int(sel.metrics.dropped_tokens) > 0
    want = m2po_loss(lp, *tokens, selection=sel).metrics
    options = {"reduction": "sequence-mean", "nonfinite": "drop"} if in_two_steps else {}
    head = (case.hidden, case.weight, case.token_ids)
    got = linear_m2po_loss(*head, *tokens, selection=sel, **options).metrics
    for name in ("valid_tokens", "trust_region_tokens", "candidate_tokens", "dropped_tokens", "nonfinite_tokens"):
        assert getattr(got, name) == getattr(want, name), name
    for name in ("masked_fraction", "trust_region_fraction"):
        assert float(getattr(got, name)) == pytest.approx(float(getattr(want, name))), name
    assert math.isnan(got.m2_cut)
    computed = mask & sel.keep & (advantages != 0)
    d = (lp - behavior)[computed].double()
    clipped = torch.where(advantages[computed] > 0, d > math.log(1.2), d < math.log(0.8))
    assert float(got.clip_fraction) == pytest.approx(float(clipped.double().mean()))
    assert float(got.approx_kl) == pytest.approx(float((d.expm1() - d).mean()), rel=1e-5)
    assert got.m2_before == got.m2_after
    # Where every valid token is computed they are those of m2po_loss.
    whole = linear_m2po_loss(*head, *tokens, selection=sel, return_log_probs=True, **options)
    expected = m2po_loss(whole.log_probs, *tokens, selection=sel, **options).metrics
    assert same_bits(whole.metrics.floats, expected.floats)
    assert torch.equal(whole.metrics.counts, expected.counts)


def test_metrics_of_ratio_and_kl_are_over_the_computed_rows():
    case = make_case((6, 30))
    tokens = loss_tensors(case)
    out = linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens)
    whole = linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens, return_log_probs=True)
    lp = whole.log_probs
    d = (lp - tokens[0])[tokens[2] & (tokens[1] != 0)].double()
    got = out.metrics.to_dict()
    for name, want in [("ratio_mean", d.exp().mean()), ("ratio_max", d.exp().max()), ("approx_kl", (d.expm1() - d).mean())]:
        assert math.isclose(got[name], float(want), rel_tol=1e-5), name
    reference = m2po_loss(lp, *tokens).metrics.to_dict()
    assert whole.metrics.to_dict() == reference
    for name in ("m2_before", "m2_after", "masked_fraction", "trust_region_fraction", "m2_cut", "clip_fraction", "valid_tokens"):
        assert math.isclose(got[name], reference[name], rel_tol=1e-5), name
    assert got["ratio_mean"] != reference["ratio_mean"]
