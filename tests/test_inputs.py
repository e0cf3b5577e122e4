"""Every wrong input: one of the package's errors, naming the argument, what came and what was expected."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import random_tokens

from m2po_kernels import M2POError, grpo_loss, m2po_loss, select
from m2po_kernels.errors import (
    BackendUnavailable,
    InvalidArgument,
    InvalidType,
    MissingBehaviorLogProbs,
    NonFiniteError,
    describe,
)

FUNCTIONS = {"select": select, "m2po_loss": m2po_loss, "grpo_loss": grpo_loss}
EVERY = pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS.keys())
ARGUMENTS = ("log_probs", "behavior_log_probs", "advantages", "mask")


def good(shape: tuple[int, ...] = (3, 8)) -> dict[str, torch.Tensor]:
    return dict(zip(ARGUMENTS, random_tokens(shape), strict=True))


def refused(fn, error: type[Exception], *words: str, **changes: object) -> str:
    """Calls `fn` with one thing wrong; the message must be one line and hold each of `words`."""
    shape = changes.pop("shape", (3, 8))
    with pytest.raises(error) as caught:
        fn(**{**good(shape), **changes})
    message = str(caught.value)
    assert isinstance(caught.value, M2POError)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


@EVERY
def test_missing_behavior_log_probs(fn):
    message = refused(fn, MissingBehaviorLogProbs, "behavior_log_probs", "None", "rollout", behavior_log_probs=None)
    assert "pass" in message


@EVERY
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("value", [[0.1, 0.2], 3.0, "text"], ids=repr)
def test_not_a_tensor(fn, name, value):
    refused(fn, InvalidType, name, "torch.Tensor", repr(value), **{name: value})


@EVERY
@pytest.mark.parametrize("name", ["log_probs", "behavior_log_probs", "advantages"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtype_that_is_no_log_prob(fn, name, dtype):
    refused(fn, InvalidType, name, str(dtype), "float32", **{name: torch.zeros(3, 8).to(dtype)})


@EVERY
def test_complex_mask(fn):
    refused(fn, InvalidType, "mask", "complex64", "bool", mask=torch.zeros(3, 8, dtype=torch.complex64))


@EVERY
@pytest.mark.parametrize("shape", [(), (2, 3, 8)], ids=str)
def test_log_probs_of_another_rank(fn, shape):
    refused(fn, InvalidArgument, "log_probs", "[B, T]", str(list(shape)), log_probs=torch.zeros(shape))


@EVERY
@pytest.mark.parametrize("name", ["behavior_log_probs", "mask"])
@pytest.mark.parametrize("shape", [(3, 7), (8,), (3, 1), (1, 8), (24,)], ids=str)
def test_shape_unlike_log_probs(fn, name, shape):
    refused(fn, InvalidArgument, name, "[3, 8]", str(list(shape)), **{name: torch.zeros(shape)})


@EVERY
@pytest.mark.parametrize("shape", [(8,), (1,), (), (3, 7), (1, 8), (3, 8, 1)], ids=str)
def test_shape_of_advantages(fn, shape):
    refused(fn, InvalidArgument, "advantages", "[3]", "[3, 1]", "[3, 8]", str(list(shape)), advantages=torch.zeros(shape))


@EVERY
def test_device_unlike_log_probs(fn):
    for name in ARGUMENTS[1:]:
        refused(fn, InvalidArgument, name, "cpu", "meta", **{name: torch.zeros(3, 8, device="meta")})


@EVERY
@pytest.mark.parametrize("cu", [[0, 3, 7], [1, 8], [0, 5, 3, 8], [0, 9], [8], [0, -1, 8]], ids=str)
def test_cu_seqlens_that_do_not_fit(fn, cu):
    refused(fn, InvalidArgument, "cu_seqlens", "8", shape=(8,), cu_seqlens=torch.tensor(cu, dtype=torch.int32))


@EVERY
def test_cu_seqlens_of_another_kind(fn):
    refused(fn, InvalidType, "cu_seqlens", "[0, 8]", shape=(8,), cu_seqlens=[0, 8])
    for wrong in (torch.tensor([0.0, 8.0]), torch.tensor([[0, 8]]), torch.empty(0, dtype=torch.int32)):
        refused(fn, InvalidArgument, "cu_seqlens", str(wrong.dtype), "[S + 1]", shape=(8,), cu_seqlens=wrong)
    refused(fn, InvalidArgument, "cu_seqlens", "[3, 8]", cu_seqlens=torch.tensor([0, 8]))
    refused(
        fn, InvalidArgument, "advantages", "[8]", "[2]", shape=(8,), cu_seqlens=torch.tensor([0, 3, 8]), advantages=torch.zeros(3)
    )
    refused(fn, InvalidArgument, "advantages", "[8]", "cu_seqlens", shape=(8,), advantages=torch.zeros(2))


@pytest.mark.parametrize("fn", [select, m2po_loss])
@pytest.mark.parametrize("value", [-0.1, math.nan, -math.inf])
def test_threshold_out_of_range(fn, value):
    refused(fn, InvalidArgument, "m2_threshold", repr(value), ">= 0", m2_threshold=value)


@pytest.mark.parametrize("fn", [select, m2po_loss])
@pytest.mark.parametrize("value", [None, "0.04", True, torch.tensor(0.04)], ids=repr)
def test_threshold_of_another_type(fn, value):
    refused(fn, InvalidType, "m2_threshold", "number", m2_threshold=value)


@pytest.mark.parametrize("fn", [select, m2po_loss])
def test_unknown_choices(fn):
    refused(fn, InvalidArgument, "scope", "'quadrants'", "'all'", "'micro-batch'", scope="micro-batch")
    refused(fn, InvalidArgument, "nonfinite", "'propagate'", "'drop'", "'error'", "'ignore'", nonfinite="ignore")


LOSSES = pytest.mark.parametrize("fn", [m2po_loss, grpo_loss])


@LOSSES
def test_options_of_the_losses(fn):
    refused(fn, InvalidArgument, "reduction", "'token-mean'", "'mean'", reduction="mean")
    refused(fn, InvalidArgument, "nonfinite", "'ignore'", nonfinite="ignore")
    for value in (-1.0, math.inf, math.nan):
        refused(fn, InvalidArgument, "kl_coef", repr(value), kl_coef=value, ref_log_probs=torch.zeros(3, 8))
    refused(fn, InvalidType, "kl_coef", "'0.1'", kl_coef="0.1", ref_log_probs=torch.zeros(3, 8))
    for value in (1.0, 0.5, -2.0, math.nan):
        refused(fn, InvalidArgument, "ratio_cap", repr(value), "> 1", ratio_cap=value)
    refused(fn, InvalidType, "ratio_cap", "'3'", ratio_cap="3")
    refused(fn, InvalidArgument, "ref_log_probs", "kl_coef=0.1", kl_coef=0.1)
    refused(fn, InvalidArgument, "ref_log_probs", "[3, 8]", "[3, 7]", kl_coef=0.1, ref_log_probs=torch.zeros(3, 7))
    refused(fn, InvalidType, "ref_log_probs", "int64", kl_coef=0.1, ref_log_probs=torch.zeros(3, 8, dtype=torch.int64))


@LOSSES
def test_denominators(fn):
    for value in (-1, math.nan, math.inf):
        refused(fn, InvalidArgument, "denominator", repr(value), ">= 0", denominator=value)
    refused(fn, InvalidArgument, "denominator", "one", "[2]", denominator=torch.ones(2))
    refused(fn, InvalidArgument, "denominator", "meta", denominator=torch.ones((), device="meta"))
    refused(fn, InvalidArgument, "denominator", "'valid'", denominator="valid")
    refused(fn, InvalidType, "denominator", "[3]", denominator=[3])
    for reduction in ("sum", "none"):
        refused(fn, InvalidArgument, "denominator", reduction, "3", reduction=reduction, denominator=3)


def test_kept_goes_with_token_mean_alone():
    refused(m2po_loss, InvalidArgument, "denominator", "kept", "sequence-mean", reduction="sequence-mean", denominator="kept")
    refused(grpo_loss, InvalidArgument, "denominator", "kept", denominator="kept")


@LOSSES
def test_sequence_lengths(fn):
    mean = {"reduction": "sequence-mean"}
    refused(fn, InvalidArgument, "sequence_lengths", "token-mean", sequence_lengths=torch.ones(3))
    refused(fn, InvalidArgument, "sequence_lengths", "[3]", "[4]", sequence_lengths=torch.ones(4), **mean)
    refused(fn, InvalidType, "sequence_lengths", "torch.Tensor", sequence_lengths=[1, 2, 3], **mean)
    refused(fn, InvalidArgument, "cu_seqlens", "sequence-mean", shape=(8,), **mean)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_clip_low(value):
    refused(grpo_loss, InvalidArgument, "clip_low", repr(value), "[0, 1]", clip_low=value)


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_clip_high(value):
    refused(grpo_loss, InvalidArgument, "clip_high", repr(value), ">= 0", clip_high=value)
    refused(grpo_loss, InvalidType, "clip_high", "'0.2'", clip_high="0.2")


def test_selection_of_something_else():
    sel = select(**good())
    refused(m2po_loss, InvalidType, "selection", "select()", selection=sel.keep)
    refused(m2po_loss, InvalidArgument, "selection", "[3, 8]", "[4, 8]", shape=(4, 8), selection=sel)
    refused(m2po_loss, InvalidArgument, "m2_threshold", "0.04", "0.5", selection=sel, m2_threshold=0.5)
    refused(m2po_loss, InvalidArgument, "scope", "quadrants", "all", selection=sel, scope="all")
    assert m2po_loss(**good(), selection=sel, m2_threshold=0.04, scope="quadrants").loss.dim() == 0


@EVERY
def test_unknown_backend(fn):
    refused(fn, BackendUnavailable, "backend", "'eager'", "'native'", "'cuda9'", backend="cuda9")


def test_errors_are_value_or_type_errors_of_one_base():
    for error in (InvalidArgument, MissingBehaviorLogProbs, NonFiniteError, BackendUnavailable):
        assert issubclass(error, M2POError)
        assert issubclass(error, ValueError)
    assert issubclass(InvalidType, M2POError)
    assert issubclass(InvalidType, TypeError)


def test_describe_is_short():
    assert describe(torch.zeros(2, 3)) == "a torch.float32 tensor of shape [2, 3] on cpu"
    assert describe("x" * 500) == "'" + "x" * 76 + "..."
    assert describe(None) == "None"
