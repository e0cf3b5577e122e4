"""Packed sequences, sequences split over calls, given selections, layouts and thread counts through the loss."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import DTYPES, Result, Tokens, assert_matches_oracle, assert_same, random_tokens, run

from m2po_kernels import grpo_loss, m2po_loss, select

BOTH = pytest.mark.parametrize("loss_fn", [m2po_loss, grpo_loss], ids=["m2po", "grpo"])
BOUNDS = [0, 7, 7, 31, 32, 120]  # an empty sequence and one of a single token


def packed(device: str, dtype=torch.float32) -> Tokens:
    tokens = random_tokens((120,), dtype=dtype, device=device, seed=5)
    tokens.mask[7:20] = False
    return tokens


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sum", "none"])
def test_packed_with_cu_seqlens(loss_fn, dtype, index_dtype, reduction, device, backend):
    tokens = packed(device, dtype)
    per_sequence = torch.tensor([1.0, 9.0, -0.5, 0.0, 2.0], dtype=dtype, device=device)
    cu_seqlens = torch.tensor(BOUNDS, dtype=index_dtype, device=device)
    options = {"cu_seqlens": cu_seqlens, "reduction": reduction, "kl_coef": 0.05, "ref_log_probs": tokens.log_probs - 0.125}
    for adv in (tokens.advantages, per_sequence):
        given = dataclasses.replace(tokens, advantages=adv)
        assert_matches_oracle(run(loss_fn, given, **options, backend=backend), loss_fn, given, **options)


@BOTH
def test_sequence_without_valid_tokens_is_not_counted(loss_fn, device, backend):
    tokens = random_tokens((6, 20), device=device)
    tokens.mask[2] = False
    with_it = run(loss_fn, tokens, reduction="sequence-mean", backend=backend)
    without = run(loss_fn, tokens.map(lambda t: t[[0, 1, 3, 4, 5]]), reduction="sequence-mean", backend=backend)
    assert torch.equal(with_it.loss, without.loss)
    assert torch.equal(with_it.grad[[0, 1, 3, 4, 5]], without.grad)


@BOTH
def test_padded_is_packed(loss_fn, device, backend):
    tokens = random_tokens((6, 20), device=device)
    cu_seqlens = torch.arange(0, 121, 20, dtype=torch.int32, device=device)
    for reduction in ("token-mean", "sequence-mean"):
        rows = run(loss_fn, tokens, reduction=reduction, backend=backend)
        flat = run(loss_fn, tokens.map(torch.flatten), reduction=reduction, cu_seqlens=cu_seqlens, backend=backend)
        assert torch.equal(rows.grad.flatten(), flat.grad)
        assert float(rows.loss) == pytest.approx(float(flat.loss), rel=2.0**-22)


@BOTH
def test_sequences_split_over_parts_add_up_with_their_lengths(loss_fn, device, backend):
    tokens = random_tokens((5, 30), device=device)
    tokens.mask[1] = False
    lengths = tokens.mask.sum(1)
    n_sequences = int((lengths > 0).sum())
    fixed = {} if loss_fn is grpo_loss else {"selection": select(*tokens, backend=backend)}
    whole = run(loss_fn, tokens, reduction="sequence-mean", backend=backend, **fixed)
    parts = []
    for piece in (slice(0, 11), slice(11, 30)):
        mine = {k: dataclasses.replace(s, keep=s.keep[:, piece]) for k, s in fixed.items()}
        part = tokens.map(lambda t, piece=piece: t[:, piece])
        parts.append(
            run(
                loss_fn,
                part,
                reduction="sequence-mean",
                sequence_lengths=lengths,
                denominator=n_sequences,
                backend=backend,
                **mine,
            )
        )
    assert torch.equal(torch.cat([p.grad for p in parts], 1), whole.grad)
    assert sum(float(p.loss) for p in parts) == pytest.approx(float(whole.loss), rel=1e-6)


@BOTH
def test_packed_sequence_lengths(loss_fn, device, backend):
    tokens = packed(device)
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    counted = torch.stack([tokens.mask[a:b].sum() for a, b in itertools.pairwise(BOUNDS)])
    options = {"reduction": "sequence-mean", "cu_seqlens": cu_seqlens, "backend": backend}
    assert_same(run(loss_fn, tokens, sequence_lengths=counted, **options), run(loss_fn, tokens, **options))


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sum", "none"])
@pytest.mark.parametrize("scope", ["quadrants", "all"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_given_selection_is_selecting_here(reduction, scope, kl_coef, device, backend):
    tokens = random_tokens((7, 50), device=device)
    options = {"kl_coef": kl_coef, "reduction": reduction, "backend": backend}
    if kl_coef:
        options["ref_log_probs"] = tokens.behavior_log_probs
    sel = select(*tokens, scope=scope, m2_threshold=0.02, backend=backend)
    given = run(m2po_loss, tokens, selection=sel, **options)
    here = run(m2po_loss, tokens, scope=scope, m2_threshold=0.02, **options)
    assert here.metrics["dropped_tokens"] > 0
    assert torch.equal(given.grad, here.grad)
    oracle = {k: v for k, v in options.items() if k != "backend"} | {"scope": scope, "m2_threshold": 0.02}
    assert_matches_oracle(given, m2po_loss, tokens, **oracle)


def test_given_selection_is_positional(device, backend):
    """It holds whatever the log-probs are by then, also where they would be dropped or kept now."""
    tokens = random_tokens((7, 50), device=device)
    sel = select(*tokens, backend=backend)
    moved = dataclasses.replace(tokens, log_probs=tokens.log_probs + 0.5)
    result = run(m2po_loss, moved, selection=sel, backend=backend)
    gone = (tokens.mask & ~sel.keep).cpu()
    assert gone.any()
    assert not result.grad[gone].any()
    stays = (sel.keep & (tokens.advantages != 0)).cpu()
    assert bool((result.grad[stays] != 0).all())
    assert result.metrics["dropped_tokens"] == int(gone.sum())


def test_given_selection_with_kept_denominator(device, backend):
    tokens = random_tokens((7, 50), device=device)
    sel = select(*tokens, backend=backend)
    given = run(m2po_loss, tokens, selection=sel, denominator="kept", backend=backend)
    assert_matches_oracle(given, m2po_loss, tokens, denominator="kept")


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["every third", "transposed", "expanded"])
def test_any_stride_gives_the_same_bits(loss_fn, dtype, layout, device, backend):
    tokens = random_tokens((12, 33), dtype=dtype, device=device)
    ref = tokens.behavior_log_probs.clone()
    if layout == "expanded":
        tokens, ref = tokens.map(lambda t: t[:, :1].expand(12, 33)), ref[:, :1].expand(12, 33)
        laid = (tokens, ref)
        tokens, ref = tokens.map(lambda t: t.contiguous()), ref.contiguous()
    elif layout == "transposed":
        laid = (tokens.map(lambda t: t.t().contiguous().t()), ref.t().contiguous().t())
    else:
        laid = (tokens.map(lambda t: t.repeat_interleave(3, 1)[:, ::3]), ref.repeat_interleave(3, 1)[:, ::3])
    for options in ({"kl_coef": 0.1}, {"reduction": "none"}, {"reduction": "sequence-mean"}):
        with_ref = [{**options, "ref_log_probs": r, "backend": backend} for r in (ref, laid[1])]
        assert_same(run(loss_fn, tokens, **with_ref[0]), run(loss_fn, laid[0], **with_ref[1]))


@BOTH
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "none"])
def test_threads_and_repeats_give_the_same_bits(loss_fn, reduction, threads, device, backend):
    tokens = random_tokens((30, 7001), device=device)
    results: list[Result] = []
    for n in (1, 2, 1, 2):
        threads(n)
        results.append(
            run(loss_fn, tokens, reduction=reduction, kl_coef=0.1, ref_log_probs=tokens.behavior_log_probs, backend=backend)
        )
    for r in results[1:]:
        assert_same(r, results[0])


@BOTH
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 1023, 1025, 4097])
def test_lengths_around_vector_and_block_sizes(loss_fn, n, device, backend):
    tokens = random_tokens((n,), seed=n, device=device)
    result = run(loss_fn, tokens, backend=backend)
    assert_matches_oracle(result, loss_fn, tokens)
    row = run(loss_fn, tokens.map(lambda t: t[None]), backend=backend)
    column = run(loss_fn, tokens.map(lambda t: t[:, None]), backend=backend)
    assert torch.equal(row.grad[0], result.grad)
    assert torch.equal(column.grad[:, 0], result.grad)


def test_metrics_that_may_overflow_are_inf_and_not_nan(device, backend):
    d = torch.tensor([100.0, -200.0, 0.1], device=device)
    metrics = run(m2po_loss, Tokens(d, torch.zeros_like(d), torch.zeros_like(d), torch.ones_like(d)), backend=backend).metrics
    assert metrics["ratio_max"] == math.inf
    assert metrics["ratio_mean"] == math.inf
    assert metrics["approx_kl"] == math.inf
    assert metrics["nonfinite_tokens"] == 0
