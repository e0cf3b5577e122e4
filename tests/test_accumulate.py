"""M2Accumulator on one rank: however the batch is split, the mask is that of the whole, and the losses add up to its loss."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from helpers import DTYPES, Result, Tokens, random_tokens, run, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_properties import DYADIC, EXTREME, OTHER, batches_with_threshold
from torch.utils.checkpoint import checkpoint
from worked_cases import CASES, ROLLOUTS

import m2po_kernels
from m2po_kernels import M2Accumulator, Selection, m2po_loss, m2po_loss_from_logits, select
from m2po_kernels.backends import eager
from m2po_kernels.errors import InvalidArgument, NonFiniteError

ROLLOUT_FILE = Path(m2po_kernels.__file__).parent / "data" / "smollm2_rollouts.safetensors"


def pieces(tokens: Tokens, *cuts: int) -> list[Tokens]:
    """Rows (tokens, where packed) up to each cut, and the rest."""
    ends = [0, *cuts, tokens.log_probs.shape[0]]
    return [tokens.map(lambda t, a=a, b=b: t[a:b]) for a, b in itertools.pairwise(ends)]


def accumulate(parts: list[Tokens], **options) -> tuple[M2Accumulator, list, Selection]:
    acc = M2Accumulator(**options)
    handles = [acc.add(*part) for part in parts]
    return acc, handles, acc.solve()


def assert_like_select(sel: Selection, handles: list, whole: Selection) -> None:
    """Mask and counts to the bit. Floats: n terms >= 0 added in another order, divided once; ratios perhaps of another exp.

    Two exps in fp32, each within 4 units of 2^-24 (docs/semantics.md), are 8 apart. expm1 likewise, and it is at most exp + 1;
    the difference expm1(d) - d is rounded once on either side.
    """
    masks = [sel.keep_of(part).reshape(-1) for part in handles]
    assert torch.equal(torch.cat(masks) if masks else whole.keep, whole.keep.reshape(-1))
    assert torch.equal(sel.keep, whole.keep.reshape(-1))
    assert torch.equal(sel.metrics.counts[:6], whole.metrics.counts[:6])
    got, want = sel.metrics.to_dict(), whole.metrics.to_dict()
    order, unit = (2 * whole.keep.numel() + 4) * 2.0**-53, 2.0**-24
    for name, value in want.items():
        bound = order + {"ratio_mean": 8 * unit, "ratio_max": 8 * unit, "approx_kl": 2 * unit}.get(name, 0.0)
        floor = 8 * unit * (got["ratio_mean"] + 1) if name == "approx_kl" else 0.0
        same = math.isclose(got[name], value, rel_tol=bound, abs_tol=floor) or (math.isnan(value) and math.isnan(got[name]))
        assert same, (name, got[name], value)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_worked_case_split_every_way(case, device):
    """Into one part, two and three, empty ones among them."""
    tokens = case.tokens(device=device).map(torch.flatten)
    whole = select(*tokens, m2_threshold=case.tau)
    n = tokens.log_probs.numel()
    for cuts in [(), *((i,) for i in range(n + 1)), *itertools.combinations_with_replacement(range(n + 1), 2)]:
        _, handles, sel = accumulate(pieces(tokens, *cuts), m2_threshold=case.tau)
        assert torch.cat([sel.keep_of(p) for p in handles]).int().tolist() == torch.tensor(case.keep).flatten().tolist()
        assert_like_select(sel, handles, whole)


@pytest.mark.parametrize("rollout", ROLLOUTS, ids=lambda r: r[0])
def test_recorded_rollouts_in_micro_batches(rollout, device):
    name, region, candidates, n_dropped, m2_before, m2_after, loss = rollout
    data = {k: v.to(device) for k, v in load_file(ROLLOUT_FILE).items()}
    tokens = Tokens(data[name], data["behavior_log_probs"], data["advantages"], data["mask"])
    parts = pieces(tokens, 7, 64, 65, 150)
    _, handles, sel = accumulate(parts)
    assert_like_select(sel, handles, select(*tokens))
    assert sel.metrics.counts[1:4].tolist() == [region, candidates, n_dropped]
    assert float(sel.metrics.m2_before) == pytest.approx(m2_before, abs=5e-9)
    assert float(sel.metrics.m2_after) == pytest.approx(m2_after, abs=5e-9)
    total = sum(float(m2po_loss(*p, selection=sel, part=h).loss) for p, h in zip(parts, handles, strict=True))
    assert total == pytest.approx(loss, abs=1e-8)


@pytest.mark.parametrize("scope", ["quadrants", "all"])
@pytest.mark.parametrize("tau", [0.0, 1e-30, 0.003, 0.04, 0.5, 1e30, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_is_that_of_select(dtype, tau, scope, device):
    for seed in range(3):
        tokens = random_tokens((7, 40), seed=seed, spread=(0.1, 0.4, 2.0)[seed], dtype=dtype, device=device)
        _, handles, sel = accumulate(pieces(tokens, 1, 5), m2_threshold=tau, scope=scope)
        assert_like_select(sel, handles, select(*tokens, m2_threshold=tau, scope=scope))


@given(
    case=batches_with_threshold(DYADIC + OTHER + EXTREME),
    cuts=st.lists(st.integers(0, 24), max_size=4),
    nonfinite=st.sampled_from(["propagate", "drop"]),
    sync=st.booleans(),
)
def test_any_split_gives_the_mask_of_the_whole(case, cuts, nonfinite, sync, device):
    tokens, tau = case
    tokens = tokens.to(device)
    acc = M2Accumulator(m2_threshold=tau, nonfinite=nonfinite)
    cuts = sorted(min(c, tokens.log_probs.numel()) for c in cuts)
    handles = [acc.add(*part) for part in pieces(tokens, *cuts)]
    sel = acc.solve(sync=sync)
    whole = select(*tokens, m2_threshold=tau, nonfinite=nonfinite)
    assert torch.equal(torch.cat([sel.keep_of(p) for p in handles]), whole.keep)
    assert torch.equal(sel.metrics.counts[:6], whole.metrics.counts[:6])
    assert same_bits(sel.metrics.m2_cut, whole.metrics.m2_cut)


@pytest.mark.parametrize(
    "options",
    [{}, {"kl_coef": 0.1}, {"ratio_cap": 1.5}, {"denominator": "kept"}, {"denominator": 77}, {"reduction": "sum"}],
    ids=str,
)
def test_losses_of_the_parts_add_up(options, device, backend):
    """Gradients have the bits of the unsplit call: each token has the same mask and the same denominator."""
    tokens = random_tokens((12, 40), seed=3, device=device)
    ref = tokens.behavior_log_probs - 0.1

    def loss(piece: Tokens, ref: torch.Tensor, **selected) -> Result:
        given_ref = {"ref_log_probs": ref} if "kl_coef" in options else {}
        return run(m2po_loss, piece, **options, **given_ref, **selected, backend=backend)

    whole = loss(tokens, ref)
    parts = pieces(tokens, 1, 6)
    _, handles, sel = accumulate(parts)
    results = [loss(p, r, selection=sel, part=h) for p, r, h in zip(parts, (ref[:1], ref[1:6], ref[6:]), handles, strict=True)]
    assert int(sel.metrics.dropped_tokens) > 0
    assert same_bits(torch.cat([r.grad for r in results]), whole.grad)
    # Each part's loss is rounded once to fp32, the whole's too; before that all are fp64.
    size = max(abs(float(r.loss)) for r in (*results, whole))
    assert float(sum(r.loss.double() for r in results)) == pytest.approx(float(whole.loss), abs=4 * 2.0**-24 * size)


def test_reduction_none(device, backend):
    tokens = random_tokens((6, 20), device=device)
    parts = pieces(tokens, 2)
    _, handles, sel = accumulate(parts)
    whole = run(m2po_loss, tokens, reduction="none", backend=backend)
    got = [
        run(m2po_loss, p, reduction="none", selection=sel, part=h, backend=backend) for p, h in zip(parts, handles, strict=True)
    ]
    assert same_bits(torch.cat([g.loss for g in got]), whole.loss)


def test_sequence_mean_over_sequences_that_are_split(device, backend):
    """Columns split in two: each part holds a piece of every sequence, so the lengths and their number come from outside."""
    tokens = random_tokens((6, 40), device=device)
    lengths = tokens.mask.sum(1)
    whole = run(m2po_loss, tokens, reduction="sequence-mean", backend=backend)
    halves = [Tokens(*(t[:, cols].contiguous() for t in tokens)) for cols in (slice(None, 13), slice(13, None))]
    # Position order is that of adding, so ties may fall otherwise than in the whole: this batch has none at the cut.
    _, handles, sel = accumulate(halves)
    n = int((lengths > 0).sum())
    options = {"reduction": "sequence-mean", "sequence_lengths": lengths, "denominator": n, "selection": sel, "backend": backend}
    got = [run(m2po_loss, p, **options, part=h) for p, h in zip(halves, handles, strict=True)]
    assert same_bits(torch.cat([g.grad for g in got], 1), whole.grad)
    # Each loss is rounded once to fp32; before that all are fp64.
    size = max(abs(float(r.loss)) for r in (*got, whole))
    assert float(sum(g.loss.double() for g in got)) == pytest.approx(float(whole.loss), abs=4 * 2.0**-24 * size)
    with pytest.raises(InvalidArgument, match=r"denominator is None.*sequence-mean.*part"):
        m2po_loss(*halves[0], reduction="sequence-mean", selection=sel, part=handles[0])


def test_selection_is_positional(device, backend):
    """By the time of the loss the forward may give other bits; an evaluation pass and other parts may come in between."""
    tokens = random_tokens((8, 30), seed=5, device=device)
    parts = pieces(tokens, 4)
    acc, handles, sel = accumulate(parts)
    later = [dataclasses.replace(p, log_probs=p.log_probs + 0.05 * torch.randn_like(p.log_probs)) for p in parts]
    for i in (1, 0, 1):
        m2po_loss(*tokens, backend=backend)  # an evaluation pass
        got = run(m2po_loss, later[i], selection=sel, part=handles[i], backend=backend)
        mask = dataclasses.replace(sel, keep=select(*tokens).keep[[slice(0, 4), slice(4, 8)][i]], parts=())
        want = run(m2po_loss, later[i], selection=mask, backend=backend)
        assert same_bits(got.grad, want.grad)
        assert same_bits(got.loss, want.loss)
    acc.close()


@pytest.mark.parametrize("check", ["0", "1"])
def test_recomputation_under_activation_checkpointing(check, device, backend, monkeypatch):
    monkeypatch.setenv("M2PO_CHECK", check)
    tokens = random_tokens((8, 30), device=device)
    parts = pieces(tokens, 4)
    _, handles, sel = accumulate(parts)
    weight = torch.tensor(0.5, device=device, requires_grad=True)

    def loss(w: torch.Tensor, i: int) -> torch.Tensor:
        p = parts[i]
        return m2po_loss(p.log_probs + w, *list(p)[1:], selection=sel, part=handles[i], backend=backend).loss

    for i in range(2):
        (want,) = torch.autograd.grad(loss(weight, i), weight)
        (got,) = torch.autograd.grad(checkpoint(loss, weight, i, use_reentrant=False), weight)
        assert same_bits(got, want)


def test_from_logits_with_a_part(device, backend):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, 50, generator=g).to(device)
    ids = torch.randint(50, (4, 9), generator=g).to(device)
    lp = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    other = random_tokens((4, 9), device=device)
    tokens = Tokens(lp, lp - 0.5 * torch.randn(4, 9, generator=g).to(device), other.advantages, other.mask)
    parts = pieces(tokens, 1)
    _, handles, sel = accumulate(parts)
    rest = list(parts[1])[1:]
    leaf = logits[1:].clone().requires_grad_()
    out = m2po_loss_from_logits(leaf, ids[1:], *rest, selection=sel, part=handles[1], backend=backend)
    out.loss.backward()
    terms = m2po_loss(lp[1:], *rest, selection=sel, part=handles[1], reduction="none", backend=backend).loss
    want, size = (x.double().sum() / sel.metrics.valid_tokens for x in (terms, terms.abs()))
    # Two ways to a log-prob, each within 2^-20 of it for logits below 8: the terms differ by as much, relatively.
    assert float(out.loss.detach()) == pytest.approx(float(want), abs=2.0**-19 * float(size))
    assert bool((leaf.grad[~sel.keep_of(handles[1])] == 0).all())


def test_compiled_loss_with_a_part(device, backend):
    """More parts and more steps than graphs may be made for one function."""
    tokens = random_tokens((24, 20), device=device)
    parts = pieces(tokens, *range(2, 24, 2))
    assert len(parts) > torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    compiled = torch.compile(m2po_loss, fullgraph=True, backend="aot_eager")
    for step in range(torch._dynamo.config.recompile_limit + 1):
        acc, handles, sel = accumulate(parts)
        for p, h in zip(parts, handles, strict=True):
            got = run(compiled, p, selection=sel, part=h, backend=backend)
            assert h.used
            if step == 0:
                want = run(m2po_loss, p, selection=sel, part=h, backend=backend)
                assert same_bits(got.grad, want.grad)
        acc.close()
    with pytest.raises(InvalidArgument, match="accumulator of this selection"):
        sel.keep_of(accumulate(parts)[1][0])
    torch._dynamo.reset()


def test_a_failed_add_can_be_repeated(device, monkeypatch):
    """As after an out-of-memory error that a trainer catches: nothing of the failed call stays behind."""
    parts = pieces(random_tokens((6, 50), device=device), 2, 4)
    _, _, want = accumulate(parts)
    acc = M2Accumulator()
    handles = [acc.add(*parts[0])]
    with monkeypatch.context() as patched:
        patched.setattr(eager, "collect", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            acc.add(*parts[1])
    handles += [acc.add(*part) for part in parts[1:]]
    sel = acc.solve()
    assert torch.equal(sel.keep, want.keep)
    assert torch.equal(torch.cat([sel.keep_of(h).flatten() for h in handles]), want.keep)


@pytest.mark.parametrize("tau", [0.04, 0.1**2, 0.3**2, 0.7**2, 0.123**2, 0.55**2])
def test_fp64_v_just_below_the_threshold(tau, device):
    """Rounded up to it, they leave a slack below 0. Alone; and with candidates, which then all go."""
    d = math.sqrt(tau)
    while d * d > tau:
        d = math.nextafter(d, 0)
    for extra in ([], [2 * d], [2 * d, 3 * d, 2 * d]):
        values = torch.tensor([d] * 8 + extra, dtype=torch.float64, device=device)
        tokens = Tokens(values, torch.zeros_like(values), torch.ones_like(values), values > 0)
        parts = pieces(tokens, 3)
        _, handles, sel = accumulate(parts, m2_threshold=tau)
        assert_like_select(sel, handles, select(*tokens, m2_threshold=tau))
        assert sel.metrics.counts[3] == len(extra)
        total = sum(
            float(m2po_loss(*p, selection=sel, part=h, denominator="kept").loss) for p, h in zip(parts, handles, strict=True)
        )
        assert total == pytest.approx(float(m2po_loss(*tokens, m2_threshold=tau, denominator="kept").loss), rel=1e-15)


def test_a_nonfinite_reference_counts_as_in_the_whole_batch(device):
    tokens = random_tokens((6, 50), device=device)
    reference = tokens.behavior_log_probs.clone()
    reference[tuple(tokens.mask.nonzero()[0])] = math.nan
    options = {"nonfinite": "drop"}
    whole = m2po_loss(*tokens, ref_log_probs=reference, kl_coef=0.1, **options)
    acc = M2Accumulator(**options)
    parts, references = pieces(tokens, 2), (reference[:2], reference[2:])
    handles = [acc.add(*p, ref_log_probs=r) for p, r in zip(parts, references, strict=True)]
    sel = acc.solve()
    assert sel.metrics.valid_tokens == whole.metrics.valid_tokens
    assert sel.metrics.nonfinite_tokens == 1
    losses = [
        m2po_loss(*p, ref_log_probs=r, kl_coef=0.1, selection=sel, part=h, **options).loss
        for p, r, h in zip(parts, references, handles, strict=True)
    ]
    assert float(sum(losses)) == pytest.approx(float(whole.loss), rel=1e-6)


def test_what_is_masked_out_changes_nothing(device):
    tokens = random_tokens((6, 50), device=device)
    _, _, want = accumulate(pieces(tokens, 2))
    for value in (math.nan, math.inf, -1e30):
        spoiled = Tokens(*(t.masked_fill(~tokens.mask, value) for t in list(tokens)[:3]), tokens.mask)
        _, _, sel = accumulate(pieces(spoiled, 2))
        assert torch.equal(sel.keep, want.keep)
        assert same_bits(sel.metrics.floats, want.metrics.floats)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "per sequence", "packed"])
def test_every_input_of_select_is_taken(layout, device):
    tokens = random_tokens((6, 50), dtype=torch.bfloat16, device=device)
    options = {}
    if layout == "transposed":
        tokens = tokens.map(lambda t: t.t().contiguous().t())
    elif layout == "expanded":
        tokens = dataclasses.replace(tokens, advantages=tokens.advantages[:, :1].expand(6, 50))
    elif layout == "per sequence":
        tokens = dataclasses.replace(tokens, advantages=tokens.advantages[:, 0].clone(), mask=tokens.mask.to(torch.float32))
    else:
        options = {"cu_seqlens": torch.arange(0, 301, 50, device=device)}
        tokens = dataclasses.replace(tokens.map(torch.flatten), advantages=tokens.advantages[:, 0].clone())
    acc = M2Accumulator()
    part = acc.add(*tokens, **options)
    sel = acc.solve()
    assert torch.equal(sel.keep_of(part), select(*tokens, **options).keep)


def test_nothing_tracks_gradients_or_keeps_the_inputs(device):
    tokens = random_tokens((6, 50), device=device)
    tokens.log_probs.requires_grad_()
    acc, handles, sel = accumulate([tokens])
    assert not sel.keep.requires_grad
    before = sel.keep.clone()
    tokens.mask.zero_()
    assert torch.equal(sel.keep_of(handles[0]).view(-1), before)
    with pytest.raises(InvalidArgument, match=r"parts \[0\] of 1.*never given to a loss"):
        acc.close()


def test_nothing_added():
    acc = M2Accumulator()
    sel = acc.solve()
    assert sel.keep.shape == (0,)
    assert sel.metrics.to_dict() == select(*(torch.zeros(0) for _ in range(4))).metrics.to_dict()
    acc.close()


@pytest.mark.parametrize("nonfinite", ["propagate", "drop", "error"])
def test_nonfinite(nonfinite, device):
    tokens = random_tokens((6, 50), device=device)
    place = tokens.mask[3].nonzero()[4].item()
    tokens.log_probs[3, place] = math.nan
    acc = M2Accumulator(nonfinite=nonfinite)
    handles = [acc.add(*part) for part in pieces(tokens, 2)]
    if nonfinite == "error":
        with pytest.raises(NonFiniteError, match=f"1 of .* valid tokens.*flat index {50 + place} of part 1"):
            acc.solve()
        return
    assert_like_select(acc.solve(), handles, select(*tokens, nonfinite=nonfinite))


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 3000))
def test_ties_in_numbers(seed, n):
    """bfloat16 with few values: hundreds of equals at the cut, over several parts."""
    g = torch.Generator().manual_seed(seed)
    d = torch.tensor([0.05, 0.2, 0.25, 0.5])[torch.randint(4, (n,), generator=g)]
    tokens = Tokens(d.to(torch.bfloat16), torch.zeros(n), torch.ones(n), torch.ones(n))
    cuts = sorted(torch.randint(0, n + 1, (3,), generator=g).tolist())
    _, handles, sel = accumulate(pieces(tokens, *cuts))
    assert torch.equal(torch.cat([sel.keep_of(p) for p in handles]), select(*tokens).keep)
