"""linear_m2po_loss: loss, gradients and metrics against dense fp64, and the work that was done for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import same_bits
from linear_helpers import (
    HALF_ULP,
    Case,
    assert_close_as_torch,
    assert_gradients,
    dense_loss,
    gradients,
    loss_tensors,
    make_case,
    workspace_for,
)
from torch.utils.flop_counter import FlopCounterMode

from m2po_kernels import M2Accumulator, linear_log_probs, linear_m2po_loss, m2po_loss, select
from m2po_kernels.errors import InvalidArgument, MissingBehaviorLogProbs, NonFiniteError
from m2po_kernels.linear import ops
from m2po_kernels.linear.plan import Work
from m2po_kernels.reference import linear_loss_oracle

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sequence-mean", "ratio_cap": 1.2},
    {"reduction": "sum", "scope": "all"},
    {"reduction": "none"},
    {"reduction": "sequence-mean", "nonfinite": "drop"},
    {"denominator": "kept"},
    {"denominator": "kept", "kl_coef": 0.1},
    {"denominator": 17.0, "m2_threshold": 0.01},
    {"denominator": 0},
    {"kl_coef": 0.2, "m2_threshold": 0.01},
    {"m2_threshold": 0.0},
    {"m2_threshold": math.inf},
]


def with_reference(options: dict, behavior: torch.Tensor) -> dict:
    return options | ({"ref_log_probs": behavior - 0.1} if options.get("kl_coef") else {})


def assert_matches(case: Case, tokens, options: dict, scaling: dict | None = None, **call: Any):
    """One call with its gradients against fp64, and its metrics against those of m2po_loss. Returns its output."""
    scaling = scaling or {}
    options = with_reference(options, tokens[0])
    ours, dense = case.leaves(), case.leaves()
    out = linear_m2po_loss(ours.hidden, ours.weight, ours.token_ids, *tokens, **ours.head, **scaling, **options, **call)
    theirs = dense_loss(dense, tokens, scaling, **options)
    wide = torch.promote_types(case.hidden.dtype, case.weight.dtype) == torch.float64
    flow = torch.full_like(out.loss, 1.5)
    loss, exact = linear_loss_oracle(
        case.hidden, case.weight, case.token_ids, *tokens, head=case.head | scaling, grad_output=1.5,
        log_probs_dtype=torch.float64 if wide else torch.float32, **options,
    )  # fmt: skip
    assert int(out.metrics.dropped_tokens) == loss.metrics["dropped_tokens"]
    assert int(out.metrics.valid_tokens) == loss.metrics["valid_tokens"]
    assert out.metrics.counts[:3].tolist() == theirs.metrics.counts[:3].tolist()
    assert_close_as_torch(out.loss.detach(), theirs.loss.detach(), loss.loss, "loss", exact.log_probs)
    got, want = gradients(ours, (out.loss, flow)), gradients(dense, (theirs.loss, flow))
    assert_gradients(got, want, exact)
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gather_rows", [True, False])
def test_against_dense_fp64(gather_rows, options, device, backend):
    case = make_case((6, 30), bias=True, lora=3)
    tokens = loss_tensors(case)
    out = assert_matches(
        case, tokens, options, gather_rows=gather_rows, backend=backend, max_workspace_bytes=workspace_for(25, case)
    )
    if options.get("m2_threshold", 0.04) < 0.1 and "denominator" not in options:
        assert 0 < int(out.metrics.dropped_tokens) < int(out.metrics.candidate_tokens) or options.get("m2_threshold") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("hidden_dtype", [None, torch.float32], ids=str)
def test_types(hidden_dtype, dtype):
    """The selection of the bf16 logits is given, as fp64 logits would select others."""
    case = make_case((6, 30), dtype=dtype, hidden_dtype=hidden_dtype)
    tokens = loss_tensors(case, spread=0.05)
    assert_matches(case, tokens, {"m2_threshold": math.inf})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dropping_and_recomputing_in_16_bits(dtype):
    """Against the same log-probs and m2po_loss: the mask and the work; the gradients, which either way rounds as often."""
    case = make_case((6, 30), dtype=dtype)
    tokens = loss_tensors(case)
    ours, theirs = case.leaves(), case.leaves()
    out = linear_m2po_loss(ours.hidden, ours.weight, ours.token_ids, *tokens)
    want = m2po_loss(linear_log_probs(theirs.hidden, theirs.weight, theirs.token_ids), *tokens)
    assert out.metrics.dropped_tokens == want.metrics.dropped_tokens > 0
    assert int(out.work[2]) > 0
    got, expected = gradients(ours, (out.loss, torch.ones(()))), gradients(theirs, (want.loss, torch.ones(())))
    for name, grad in got.items():
        # d logits, what is made of them, and its scaling are rounded on either side.
        bound = 6 * HALF_ULP[dtype] * float(expected[name].abs().max())
        assert bool(((grad.float() - expected[name].float()).abs() <= bound).all()), name


PER_TOKEN = torch.linspace(0.5, 2.0, 180).view(6, 30)


@pytest.mark.parametrize(
    "scaling",
    [{"temperature": 0.7, "logit_scale": 1.3}, {"logit_softcap": 5.0, "vocab_size": 157}, {"temperature": PER_TOKEN}],
    ids=["temperature", "softcap", "temperatures"],
)
def test_scalings(scaling, device, backend):
    case = make_case((6, 30))
    assert_matches(case, loss_tensors(case, **scaling), {}, scaling, backend=backend)


def test_packed_sequences():
    case = make_case((50,))
    behavior, _, mask = loss_tensors(case)
    tokens = (behavior, torch.tensor([1.0, 0.0, -0.5]), mask)
    cu_seqlens = torch.tensor([0, 20, 22, 50])
    options = {"reduction": "sequence-mean", "cu_seqlens": cu_seqlens}
    ours, dense = case.leaves(), case.leaves()
    out = linear_m2po_loss(ours.hidden, ours.weight, ours.token_ids, *tokens, **options)
    want = dense_loss(dense, tokens, {}, **options)
    assert abs(float((out.loss - want.loss).detach())) < 1e-6
    got, theirs = gradients(ours, (out.loss, torch.ones(()))), gradients(dense, (want.loss, torch.ones(())))
    assert all(bool(((got[n] - theirs[n]).abs() < 1e-6).all()) for n in got)
    assert bool((got["hidden"][20:22] == 0).all())
    assert bool((got["hidden"] != 0).any())


def test_whole_padded_batch_of_a_trainer():
    """Prompts and completions in one batch, aligned inside: the loss of the slice, and d hidden in the whole."""
    case = make_case((4, 20))
    part = Case(case.hidden[:, 11:19], case.weight, case.token_ids[:, 12:])
    tokens = loss_tensors(part)
    whole, sliced = case.leaves(), part.leaves()
    out = linear_m2po_loss(whole.hidden, whole.weight, whole.token_ids, *tokens, shift=1, logits_to_keep=8)
    want = linear_m2po_loss(sliced.hidden, sliced.weight, sliced.token_ids, *tokens)
    assert same_bits(out.loss.detach(), want.loss.detach())
    got, exact = gradients(whole, (out.loss, torch.ones(()))), gradients(sliced, (want.loss, torch.ones(())))
    assert same_bits(got["weight"], exact["weight"])
    assert same_bits(got["hidden"][:, 11:19].contiguous(), exact["hidden"])
    assert int((got["hidden"] != 0).any(-1).sum()) == int((exact["hidden"] != 0).any(-1).sum()) > 0


# The row rules.


def work_of(case: Case, tokens, **options: Any) -> tuple[Work, int]:
    """Rows as reported, and the operations that torch counts in the products of the op."""
    counted: list[int] = []
    original = ops.loss_forward

    def counting(*args):
        with FlopCounterMode(display=False) as counter:
            result = original(*args)
        counted.append(counter.get_total_flops())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "loss_forward", counting)
        out = linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens, **options)
    assert out.work is not None
    return Work(*out.work.tolist()), counted[0]


@pytest.mark.parametrize(
    "wanted", [("hidden", "weight"), ("hidden",), ("weight",), ()], ids=lambda wanted: "+".join(wanted) or "none"
)
def test_work_is_what_the_rules_leave(wanted):
    case = make_case((8, 40))
    behavior, advantages, mask = loss_tensors(case)
    advantages[:3] = 0
    tokens = (behavior, advantages, mask)
    case = Case(**{**vars(case), **{name: getattr(case, name).requires_grad_() for name in wanted}})
    out = m2po_loss(linear_log_probs(case.hidden, case.weight, case.token_ids).detach(), *tokens)
    kept_candidates = int(out.metrics.candidate_tokens - out.metrics.dropped_tokens)
    active = int((mask & (advantages != 0)).sum())
    assert 0 < kept_candidates < int(out.metrics.candidate_tokens) < active < mask.numel()
    work, flops = work_of(case, tokens, max_workspace_bytes=workspace_for(50, case))
    settled = active - int(out.metrics.candidate_tokens)
    assert work == (Work(active, settled, kept_candidates) if wanted else Work(active, 0, 0))
    assert flops == work.flops(*case.weight.shape, hidden_grad="hidden" in wanted, weight_grad="weight" in wanted)
    if len(wanted) == 2:
        vh = case.weight.numel()
        assert flops == 2 * vh * active + 4 * vh * settled + 6 * vh * kept_candidates


def test_given_selection_settles_every_row():
    case = make_case((8, 40)).leaves()
    tokens = loss_tensors(case)
    lp = linear_log_probs(case.hidden, case.weight, case.token_ids).detach()
    sel = select(lp, *tokens)
    work, flops = work_of(case, tokens, selection=sel)
    rows = int((sel.keep & (tokens[1] != 0)).sum())
    assert work == Work(rows, rows, 0)
    assert flops == 6 * case.weight.numel() * rows
    out = linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens, selection=sel)
    want = dense_loss(case, tokens, {}, selection=sel)
    assert abs(float((out.loss - want.loss).detach())) < 1e-6
    got, theirs = gradients(case, (out.loss, torch.ones(()))), gradients(case, (want.loss, torch.ones(())))
    assert all(bool(((got[n] - theirs[n]).abs() < 1e-6).all()) for n in got)
    assert out.metrics.dropped_tokens == want.metrics.dropped_tokens > 0


def test_kl_term_makes_every_valid_row_count():
    case = make_case((8, 40)).leaves()
    tokens = loss_tensors(case)
    options = with_reference({"kl_coef": 0.1}, tokens[0])
    work, flops = work_of(case, tokens, **options)
    valid = int(tokens[2].sum())
    candidates = int(dense_loss(case, tokens, {}, **options).metrics.candidate_tokens)
    assert work == Work(valid, valid - candidates, candidates)
    assert flops == work.flops(*case.weight.shape)


@pytest.mark.parametrize("gather_rows", [True, False])
def test_rows_that_do_not_count_are_never_read(gather_rows, device, backend):
    case = make_case((6, 30))
    behavior, advantages, mask = loss_tensors(case)
    options = {"gather_rows": gather_rows, "backend": backend, "max_workspace_bytes": workspace_for(20, case)}

    def call(hidden, ids, behavior, advantages):
        leaves = Case(hidden, case.weight, ids).leaves()
        out = linear_m2po_loss(leaves.hidden, leaves.weight, ids, behavior, advantages, mask, **options)
        return out, gradients(leaves, (out.loss, torch.ones(())))

    want, want_grads = call(case.hidden, case.token_ids, behavior, advantages)
    dirty_ids = torch.where(mask, case.token_ids, -100)
    holes = [torch.where(mask, t, math.nan) for t in (behavior, advantages)]
    got, grads = call(torch.where(mask[..., None], case.hidden, math.nan), dirty_ids, *holes)
    assert same_bits(got.loss.detach(), want.loss.detach())
    assert same_bits(got.metrics.floats, want.metrics.floats)
    assert all(same_bits(grads[n], want_grads[n]) for n in grads)
    if gather_rows:  # nor is a row without advantage
        active = mask & (advantages != 0)
        got, grads = call(torch.where(active[..., None], case.hidden, math.nan), case.token_ids, behavior, advantages)
        assert same_bits(got.loss.detach(), want.loss.detach())
        assert all(same_bits(grads[n], want_grads[n]) for n in grads)


@pytest.mark.parametrize("gather_rows", [True, False])
def test_a_row_of_nan_that_is_left_out_stays_out_of_the_gradients(gather_rows):
    case = make_case((6, 30))
    behavior, advantages, mask = loss_tensors(case)
    at = tuple((mask & (advantages != 0)).nonzero()[5])
    spoiled = case.hidden.clone()
    spoiled[at] = math.nan
    without = mask.clone()
    without[at] = False

    def call(hidden, mask):
        leaves = Case(hidden, case.weight, case.token_ids).leaves()
        tokens = (behavior, advantages, mask)
        out = linear_m2po_loss(leaves.hidden, leaves.weight, leaves.token_ids, *tokens, nonfinite="drop", gather_rows=gather_rows)
        return out, gradients(leaves, (out.loss, torch.ones(())))

    (got, grads), (want, want_grads) = call(spoiled, mask), call(case.hidden, without)
    torch.testing.assert_close(got.loss, want.loss)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name])
    leaves = Case(spoiled, case.weight, case.token_ids).leaves()
    log_probs = linear_log_probs(leaves.hidden, leaves.weight, leaves.token_ids, gather_rows=gather_rows)
    grads = gradients(leaves, (log_probs, without.float()))
    assert all(bool(grad.isfinite().all()) for grad in grads.values())


def test_log_probs_and_entropy_on_request():
    case = make_case((6, 30))
    tokens = loss_tensors(case)
    plain = linear_m2po_loss(case.hidden, case.weight, case.token_ids, *tokens)
    assert plain.log_probs is None
    assert plain.entropy is None
    leaves = case.leaves()
    asked = linear_m2po_loss(
        leaves.hidden, leaves.weight, case.token_ids, *tokens, return_log_probs=True, return_entropy=True, reduction="sum"
    )
    lp, entropy = linear_log_probs(case.hidden, case.weight, case.token_ids, mask=tokens[2], return_entropy=True)
    assert same_bits(asked.log_probs, lp)
    assert same_bits(asked.entropy, entropy)
    assert not asked.log_probs.requires_grad
    assert not asked.entropy.requires_grad
    valid, active = int(tokens[2].sum()), int((tokens[2] & (tokens[1] != 0)).sum())
    assert asked.work[0] == valid > active == plain.work[0]  # forward only for the others:
    assert asked.work[1] <= active


@pytest.mark.parametrize("case_of", ["empty", "all masked", "no advantage"])
def test_batches_without_a_row(case_of):
    case = make_case((3, 0) if case_of == "empty" else (3, 5)).leaves()
    shape = case.token_ids.shape
    mask = torch.zeros(shape) if case_of == "all masked" else torch.ones(shape)
    advantages = torch.zeros(shape) if case_of == "no advantage" else torch.ones(shape)
    out = linear_m2po_loss(case.hidden, case.weight, case.token_ids, torch.zeros(shape), advantages, mask)
    assert float(out.loss.detach()) == 0
    assert out.work.tolist() == [0, 0, 0]
    assert int(out.metrics.valid_tokens) == int(mask.sum())
    got = gradients(case, (out.loss, torch.ones(())))
    assert all(bool((g == 0).all()) for g in got.values())


def test_stale_batch_with_many_candidates():
    """Most rows wait, and the gaps that they leave in a chunk are closed."""
    case = make_case((10, 30))
    tokens = loss_tensors(case, spread=1.0)
    out = assert_matches(case, tokens, {"m2_threshold": 0.3}, max_workspace_bytes=workspace_for(37, case))
    _, settled, recomputed = out.work.tolist()
    assert recomputed > 10
    assert int(out.metrics.candidate_tokens) > settled / 3


# Errors.


def test_errors():
    case = make_case((4, 5))
    behavior, advantages, mask = loss_tensors(case)
    head = (case.hidden, case.weight, case.token_ids)
    with pytest.raises(MissingBehaviorLogProbs):
        linear_m2po_loss(*head, None, advantages, mask)
    with pytest.raises(InvalidArgument, match="mask must have the shape"):
        linear_m2po_loss(*head, behavior, advantages, mask[:, :-1])
    with pytest.raises(InvalidArgument, match="token_ids must be in"):
        linear_m2po_loss(case.hidden, case.weight, torch.full((4, 5), 157), behavior, advantages, torch.ones(4, 5))
    with pytest.raises(InvalidArgument, match="hidden must have shape"):
        linear_m2po_loss(case.hidden[None], case.weight, case.token_ids[None], behavior, advantages, mask)
    bad = behavior.clone()
    bad.view(-1)[(mask & (advantages != 0)).flatten().nonzero()[0]] = math.inf
    with pytest.raises(NonFiniteError, match="1 of"):
        linear_m2po_loss(*head, bad, advantages, mask, nonfinite="error")


def test_micro_batches_add_up_to_the_whole():
    """One selection over three micro-batches: loss and gradients as close to the whole batch's in fp64 as one call's."""
    case = make_case((9, 11), seed=4)
    tokens = loss_tensors(case, seed=4)
    dense = case.leaves()
    theirs = dense_loss(dense, tokens, {})
    loss, exact = linear_loss_oracle(case.hidden, case.weight, case.token_ids, *tokens, head=case.head)
    assert loss.metrics["dropped_tokens"] > 0
    accumulator = M2Accumulator()
    rows = [slice(0, 4), slice(4, 5), slice(5, 9)]
    with torch.no_grad():
        log_probs = [linear_log_probs(case.hidden[r], case.weight, case.token_ids[r]) for r in rows]
    parts = [accumulator.add(lp, *(t[r] for t in tokens)) for lp, r in zip(log_probs, rows, strict=True)]
    selection = accumulator.solve()
    assert int(selection.metrics.dropped_tokens) == loss.metrics["dropped_tokens"]
    ours, losses = case.leaves(), []
    for r, part in zip(rows, parts, strict=True):
        of_part = (t[r] for t in tokens)
        out = linear_m2po_loss(ours.hidden[r], ours.weight, ours.token_ids[r], *of_part, selection=selection, part=part)
        out.loss.backward()
        losses.append(out.loss.detach())
    accumulator.close()
    assert_close_as_torch(torch.stack(losses).sum(), theirs.loss.detach(), loss.loss, "loss", exact.log_probs)
    got = {name: t.grad for name, t in ours.parameters().items()}
    assert_gradients(got, gradients(dense, (theirs.loss, torch.ones(()))), exact)
