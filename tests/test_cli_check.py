"""`m2po check`: its own cases are what they say, it passes what is right, and it sees a backend that is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import torch
from cli_helpers import CPU, fails, flipped, invoke, mutate

from m2po_kernels import dispatch, reference
from m2po_kernels.cli import check as check_command
from m2po_kernels.cli.batches import Case, all_cases, random_batch
from m2po_kernels.cli.cases import ROLLOUT_FIGURES, WORKED_CASES
from m2po_kernels.cli.oracle import Expected, compare
from m2po_kernels.cli.rollouts import bundled
from m2po_kernels.cli.staleness import measure


@functools.cache
def _cases() -> list[Case]:
    return list(all_cases())


# Its data


@pytest.mark.parametrize("case", WORKED_CASES, ids=lambda case: case.name)
def test_worked_cases_against_the_literal_loop(case) -> None:
    right = reference.m2po_oracle(*case.tensors(), m2_threshold=case.m2_threshold, select=reference.select_literal)
    assert right.keep.tolist() == (torch.tensor(case.keep) != 0).tolist()
    assert float(right.loss) == pytest.approx(case.loss, rel=1e-7, abs=5e-8)
    assert right.grad.flatten().tolist() == pytest.approx(
        torch.tensor(case.grad, dtype=torch.float64).flatten().tolist(), rel=1e-7, abs=5e-8
    )
    assert right.metrics["m2_before"] == pytest.approx(case.m2_before, rel=1e-6)
    assert right.metrics["m2_after"] == pytest.approx(case.m2_after, rel=1e-6)


def test_worked_cases_are_all_there() -> None:
    assert [case.name for case in WORKED_CASES] == [f"T{i}" for i in range(1, 13)]


@pytest.mark.parametrize("figures", ROLLOUT_FIGURES, ids=lambda figures: figures.column)
def test_published_figures_of_the_rollouts(figures) -> None:
    staleness = measure(bundled(figures.column), 0.04)
    assert (staleness.trust_region, staleness.candidates) == (figures.trust_region, figures.candidates)
    assert staleness.metrics["dropped_tokens"] == figures.dropped
    assert staleness.metrics["m2_before"] == pytest.approx(figures.m2_before, abs=6e-9)
    assert staleness.metrics["m2_after"] == pytest.approx(figures.m2_after, abs=6e-9)
    assert staleness.loss == pytest.approx(figures.loss, abs=2e-8)
    at = next(row for row in staleness.rows if row.m2_threshold == 0.04)
    assert at.dropped == figures.dropped
    n_clipped = staleness.clipped_up + staleness.clipped_down
    assert n_clipped / staleness.metrics["valid_tokens"] == pytest.approx(staleness.clipped_share)


@pytest.mark.parametrize("staleness", ["healthy", "stale", "very stale", "all candidates", "ties"])
def test_random_batches_are_what_they_say(staleness) -> None:
    log_probs, behavior, advantages, mask = random_batch(0, staleness)
    d, v = reference.log_ratio(log_probs, behavior)
    region = reference.trust_region(d, advantages[:, None], mask)
    share = float((v[region] > 0.04).double().mean())
    low, high = {
        "healthy": (0, 0.02),
        "stale": (0.2, 0.6),
        "very stale": (0.7, 0.95),
        "all candidates": (1, 1),
        "ties": (0.3, 1),
    }[staleness]
    assert low <= share <= high
    if staleness == "ties":
        assert v[region].unique().numel() < region.sum() / 10
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(random_batch(0, staleness, dtype)[3], mask)


# The command


def test_check_passes_on_every_backend() -> None:
    result = invoke("check", "--device", "cpu", "--json")
    report = json.loads(result.stdout)
    assert report["failures"] == []
    assert result.exit_code == 0
    available = {name for name in dispatch.BACKENDS if dispatch.why_not(name, CPU) is None}
    assert {row["backend"] for row in report["rows"]} == available
    assert set(report["not_run"]) == set(dispatch.BACKENDS) - available
    groups = {case.group for case in _cases()}
    assert len(report["rows"]) == len(available) * len(groups)
    assert all((row["cases"] or row["declined"]) and row["masks_equal"] == row["masks_compared"] for row in report["rows"])


def _first_rows(monkeypatch, *groups: str) -> None:
    cases = [case for case in _cases() if case.group in groups]
    monkeypatch.setattr(check_command, "all_cases", lambda: iter(cases))


def _scaled_gradient(factor):
    def backward(original, *args):
        original(*args)
        args[-1].mul_(factor)

    return "policy_loss_backward", backward


def _dropped_gets_gradient(original, *args):
    original(*args)
    out = args[-1]
    out[out == 0] = 1e-30


def _loss_off(original, *args):
    loss, *rest = original(*args)
    return loss * (1 + 4e-6), *rest


def _count_off(original, *args):
    *rest, counts, floats = original(*args)
    return *rest, counts + torch.tensor([0, 0, 0, 1, 0, 0, 0]), floats


def _raises(original, *args):
    raise RuntimeError("kernel crashed")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (*_scaled_gradient(1 + 2e-6), "gradient error"),
        (*_scaled_gradient(math.nan), "gradient error nan"),
        ("policy_loss_backward", _dropped_gets_gradient, "gradient error inf"),
        ("select", flipped, "mask differs at 1 tokens"),
        ("policy_loss", _loss_off, "loss error"),
        ("policy_loss", _count_off, "dropped_tokens is"),
        ("policy_loss", _raises, "raised RuntimeError: kernel crashed"),
    ],
    ids=["gradient", "NaN", "not zero", "mask", "loss", "metrics", "crash"],
)
def test_check_sees_a_wrong_backend(name, change, says, monkeypatch) -> None:
    _first_rows(monkeypatch, "random fp32", "rollouts step4")
    mutate(monkeypatch, name, change)
    result = invoke("check", "--backend", "eager", "--device", "cpu", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert any(says in failure for failure in report["failures"]), report["failures"][:3]
    assert any(failure.startswith("eager, ") for failure in report["failures"])
    table = invoke("check", "--backend", "eager", "--device", "cpu")
    assert table.exit_code == 1
    assert "FAILED" in table.stdout


@pytest.mark.parametrize(("dtype", "code"), [(torch.float64, 0), (torch.float32, 1)], ids=["fp64", "fp32"])
def test_check_lets_a_backend_decline_fp64_alone(dtype, code, monkeypatch) -> None:
    def declines(original, batch, rule):
        if batch.log_probs.dtype == dtype:
            raise dispatch.BackendUnavailable(f"no {dtype} here")
        return original(batch, rule)

    _first_rows(monkeypatch, "random fp32", "random fp64")
    mutate(monkeypatch, "policy_loss", declines)
    result = invoke("check", "--backend", "eager", "--device", "cpu")
    assert result.exit_code == code
    assert f"no {dtype} here" in result.stdout
    assert "declined" in result.stdout


def test_check_refuses_a_backend_that_cannot_run(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "why_not", lambda name, device: "no compiler" if name == "native" else None)
    assert fails("check", "--backend", "native") == "m2po: error: --backend native cannot run on cpu: no compiler"


@pytest.mark.parametrize("group", ["worked T1-T12", "rollouts step4"])
def test_check_compares_with_the_published_figures(group) -> None:
    case = next(case for case in _cases() if case.group == group and case.published)
    right = compare(case, Expected.of(case), "eager", CPU)
    assert right.problems == ()
    other = dataclasses.replace(case, published=dataclasses.replace(case.published, loss=case.published.loss * 1.001))
    assert any("published" in problem for problem in compare(other, Expected.of(other), "eager", CPU).problems)


def test_gradient_below_the_smallest_normal_may_be_flushed() -> None:
    log_probs = torch.tensor([[-95.0, 0.1]])
    case = Case("tiny", "tiny", (log_probs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)))
    expected = Expected.of(case)
    assert 0 < -float(expected.result.grad[0, 0]) < torch.finfo(torch.float32).smallest_normal
    assert compare(case, expected, "eager", CPU).problems == ()
