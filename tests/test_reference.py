"""The oracle against brute force, its two forms against each other, and where the upstream variants differ from the paper."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from helpers import random_tokens
from hypothesis import given
from hypothesis import strategies as st

from m2po_kernels.reference import (
    areal_mask,
    grpo_oracle,
    log_ratio,
    m2po_oracle,
    repository_clip_bounds,
    select_literal,
    select_sorted,
    trust_region,
)

SQUARES = st.sampled_from([0.0, 0.0025, 0.01, 0.04, 0.0441, 0.09, 0.25, 1.0, 9.0, math.inf])


def brute_force(v: list[float], region: list[bool], valid: list[bool], tau: float) -> list[bool]:
    """M from the definition of what the loop ends at, without the loop: the largest set it could stop with.

    Dropping goes down one total order (largest v first, then earliest position), so every set the loop can reach is a
    suffix of that order; it stops at the first whose mean does not exceed tau.
    """
    order = sorted((i for i, inside in enumerate(region) if inside), key=lambda i: (-v[i], i))
    for n_dropped in range(len(order) + 1):
        rest = [v[i] for i in order[n_dropped:]]
        if tau == math.inf or not rest or (math.inf not in rest and sum(map(Fraction, rest)) <= Fraction(tau) * len(rest)):
            return [ok and i not in order[:n_dropped] for i, ok in enumerate(valid)]
    raise AssertionError("the empty set always stops the loop")


@given(
    st.lists(st.tuples(SQUARES, st.booleans(), st.booleans()), max_size=7),
    st.sampled_from([0.0, 0.04, 0.0441, 0.25, 9.0, math.inf]),
)
def test_literal_loop_is_brute_force(tokens, tau):
    v, region, valid = ([t[0] for t in tokens], [t[1] and t[2] for t in tokens], [t[2] for t in tokens])
    got = select_literal(torch.tensor(v), torch.tensor(region).bool(), torch.tensor(valid).bool(), tau)
    assert got.tolist() == brute_force(torch.tensor(v).tolist(), region, valid, tau)


def test_sorted_twin_is_the_literal_loop():
    for seed, tau, spread in itertools.product(range(10), (0.0, 0.01, 0.04, 0.3, 2.0, math.inf), (0.1, 0.5)):
        lp, blp, adv, mask = random_tokens((5, 30), seed=seed, spread=spread)
        d, v = log_ratio(lp, blp)
        for scope in ("quadrants", "all"):
            region = trust_region(d, adv, mask, scope)
            assert torch.equal(select_sorted(v, region, mask, tau), select_literal(v, region, mask, tau)), (
                seed,
                tau,
                spread,
                scope,
            )


def test_the_first_of_equals_goes_first():
    v, yes = torch.tensor([0.0025, 0.09, 0.09, 0.09, 0.0025]), torch.ones(5, dtype=torch.bool)
    assert select_literal(v, yes, yes, 0.04).tolist() == [True, False, False, True, True]
    assert select_sorted(v, yes, yes, 0.04).tolist() == [True, False, False, True, True]


def test_log_ratio_is_rounded_once_to_the_compute_type():
    low = torch.tensor([-1.0078125], dtype=torch.bfloat16)
    d, v = log_ratio(low, torch.tensor([-1.0 - 2.0**-20]))
    assert d.dtype == v.dtype == torch.float32
    assert float(d) == -0.0078125 + 2.0**-20
    d, _ = log_ratio(torch.tensor([-1.0], dtype=torch.float64), torch.tensor([0.1]))
    assert d.dtype == torch.float64
    assert float(d) == -1.0 - float(torch.tensor(0.1))


def test_trust_region_is_the_two_clipping_quadrants():
    d, adv = torch.tensor([1.0, 1, 1, -1, -1, -1, 0, 0]), torch.tensor([1.0, 0, -1, 1, 0, -1, 1, -1])
    valid = torch.ones(8, dtype=torch.bool)
    assert trust_region(d, adv, valid).int().tolist() == [1, 0, 0, 0, 0, 1, 0, 0]
    assert trust_region(d, adv, valid, "all").all()


@pytest.mark.parametrize(
    "options", [{}, {"scope": "all"}, {"ratio_cap": 1.5}, {"kl_coef": 0.1}, {"denominator": "kept"}], ids=str
)
def test_oracle_gradient_is_the_derivative_of_its_loss(options):
    """By central differences in fp64, with M held, as Algorithm 1 has no derivative."""
    lp, blp, adv, mask = random_tokens((2, 6), dtype=torch.float64, seed=3)
    if "kl_coef" in options:
        options = {**options, "ref_log_probs": lp + 0.1 * torch.randn(lp.shape, dtype=torch.float64)}
    whole = m2po_oracle(lp, blp, adv, mask, **options)
    step = 1e-6
    for i in range(lp.numel()):
        shift = torch.zeros(lp.numel(), dtype=torch.float64).index_fill_(0, torch.tensor([i]), step).reshape(lp.shape)
        ends = [m2po_oracle(lp + sign * shift, blp, adv, mask, **options, select=lambda *_: whole.keep).loss for sign in (1, -1)]
        slope = float(ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(whole.grad.flatten()[i]), abs=2e-9), i


def test_grpo_oracle_is_min_of_clipped_and_unclipped():
    lp, blp, adv, mask = random_tokens((4, 30), dtype=torch.float64, seed=1)
    leaf = lp.clone().requires_grad_()
    ratio = (leaf - blp).exp()
    objective = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.3) * adv)
    loss = -(objective * mask).sum() / mask.sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    oracle = grpo_oracle(lp, blp, adv, mask, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(oracle.loss, loss.detach(), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(oracle.grad, grad, rtol=1e-13, atol=1e-16)


def test_areal_mask_differs_where_its_description_says():
    yes = torch.ones(2, dtype=torch.bool)
    at_tau = torch.tensor([0.25, 0.25])
    assert select_literal(at_tau, yes, yes, 0.25).tolist() == [True, True]
    assert areal_mask(at_tau, yes, 0.25).tolist() == [False, True]  # strictly below the threshold, or all but one
    far = torch.tensor([4.0, 1.0])
    assert select_literal(far, yes, yes, 0.04).tolist() == [False, False]
    assert areal_mask(far, yes, 0.04).tolist() == [False, True]  # never empties the batch
    # T is every valid token whatever its sign: one outside the quadrants can go, and zeros outside dilute the mean.
    d, adv = torch.tensor([-1.0, 0.1]), torch.tensor([1.0, 1.0])
    assert select_literal(d * d, trust_region(d, adv, yes), yes, 0.04).tolist() == [True, True]
    assert areal_mask(d * d, yes, 0.04).tolist() == [False, True]
    assert areal_mask(far, torch.tensor([False, True]), 2.0).tolist() == [False, True]
    assert areal_mask(torch.empty(0), torch.empty(0, dtype=torch.bool), 0.04).shape == (0,)
    below = torch.tensor([0.05, 0.01])
    assert areal_mask(below, yes, 0.04).tolist() == select_literal(below, yes, yes, 0.04).tolist() == [True, True]


def test_repository_clip_bounds_on_a_hand_made_example():
    """v sorted is .01, .04, .25, 1; with b = .5 the capped mean is (.01 + .04 + .25 + .25) / 4 = .1375."""
    v, yes = torch.tensor([1.0, 0.04, 0.25, 0.01], dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    low, high = repository_clip_bounds(v, yes, 0.1375, floor_low=0.0, floor_high=0.0)
    assert (low, high) == pytest.approx((1 - math.exp(-0.2), math.exp(0.2) - 1))  # the |d| before the point that reaches it
    low, high = repository_clip_bounds(v, yes, 0.2, floor_low=0.0, floor_high=0.0)
    assert (low, high) == pytest.approx((1 - math.exp(-0.5), math.exp(0.5) - 1))
    assert repository_clip_bounds(v, yes, 0.1375) == (0.3, 0.5)  # never tighter than the floors
    assert repository_clip_bounds(v, yes, 0.4) == (1.0, math.inf)  # within the budget: no clip
    assert repository_clip_bounds(v, ~yes, 0.04) == (1.0, math.inf)
    # Algorithm 1 drops the two largest there (mean of the rest .1 > .1375 is false only without the 1), and clips nothing.
    assert select_literal(v, yes, yes, 0.1375).tolist() == [False, True, True, True]


def test_oracle_handles_no_tokens():
    none = torch.empty(0, 5)
    result = m2po_oracle(none, none, none, none)
    assert float(result.loss) == 0
    assert result.grad.shape == (0, 5)
    assert result.metrics["valid_tokens"] == 0
