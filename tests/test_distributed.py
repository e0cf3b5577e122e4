"""Selection over ranks, with gloo in 1, 2 and 4 processes: the mask of one process that has all tokens, bit for bit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import distributed_jobs as jobs
import pytest
import torch
from helpers import Tokens, random_tokens, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import DYADIC, EXTREME, OTHER, batches_with_threshold
from worked_cases import CASES
from world import TIMEOUT, Raised, World

from m2po_kernels import m2po_loss, select

KB = 1024
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def split(tokens: Tokens, cuts: list[int]) -> list[Tokens]:
    """Contiguous runs of the flat tokens; `cuts` ascending."""
    ends = [0, *cuts, tokens.log_probs.numel()]
    return [tokens.map(lambda t, a=a, b=b: t.flatten()[a:b].clone()) for a, b in itertools.pairwise(ends)]


def solve(world: World, shares: list[list[Tokens]], solving: dict | None = None, **options) -> list[jobs.Solved]:
    """shares: the micro-batches of each rank."""
    results = world.run(jobs.solve, *((len(shares), share, options, solving) for share in shares))
    for result in results:
        assert isinstance(result, jobs.Solved), result
    return results


def assert_one_selection(results: list[jobs.Solved], tokens: Tokens, **options) -> None:
    """The mask in rank order is that of the whole; metrics are the same on all ranks to the bit, and those of the whole."""
    whole = select(*tokens, **options)
    assert torch.equal(torch.cat([r.keep for r in results]), whole.keep.flatten())
    for result in results:
        assert same_bits(result.counts, results[0].counts)
        assert same_bits(result.floats, results[0].floats)
        assert result.collectives == results[0].collectives <= (8 if tokens.log_probs.dtype == torch.float64 else 4)
        assert result.sent <= 256 * KB
    assert torch.equal(results[0].counts[:6], whole.metrics.counts[:6])
    same_terms = [0, 1, 2, 3, 4, 8]  # added in another order and divided once; the others come through another exp perhaps
    order = (2 * tokens.log_probs.numel() + 4) * 2.0**-53
    got, want = results[0].floats[same_terms], whole.metrics.floats[same_terms]
    torch.testing.assert_close(got, want, rtol=order, atol=0, equal_nan=True)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_even_and_ragged_ranks(world, size, dtype):
    for seed in range(3):
        tokens = random_tokens((8, 25), seed=seed, dtype=dtype)
        for cuts in ([200 * i // size for i in range(1, size)], [3, 5, 170][: size - 1]):
            shares = [split(piece, [piece.log_probs.numel() // 3]) for piece in split(tokens, cuts)]
            results = solve(world, shares)
            assert_one_selection(results, tokens)
            assert int(results[0].counts[3]) > 0
            loss = m2po_loss(*tokens).loss.double()
            rounding = 2.0**-24 if dtype != torch.float64 else 2.0**-53
            size_of_loss = sum(abs(r.loss) for r in results) + abs(float(loss))
            assert abs(sum(r.loss for r in results) - float(loss)) <= 4 * rounding * size_of_loss


def empty(dtype: torch.dtype = torch.float32) -> Tokens:
    return random_tokens((0, 5), dtype=dtype)


@pytest.mark.parametrize("lonely", [0, 1, 3])
def test_ranks_without_tokens_without_candidates_and_with_all(world, lonely):
    """One rank has every candidate; of the others one has only low tokens, one an empty micro-batch, one adds nothing."""
    tokens = random_tokens((4, 50), seed=lonely)
    calm = random_tokens((2, 50), spread=0.0, seed=5)
    shares: list[list[Tokens]] = [[calm], [empty()], []]
    shares.insert(lonely, [tokens])
    flat = [t.map(torch.flatten) for share in shares for t in share]
    whole = Tokens(*(torch.cat(parts) for parts in zip(*flat, strict=True)))
    assert_one_selection(solve(world, shares), whole)
    masked = [[Tokens(*list(calm)[:3], calm.mask & False)] for _ in range(4)]
    assert_one_selection(solve(world, masked), Tokens(*list(calm)[:3], calm.mask & False).map(lambda t: t.repeat(4, 1)))


@SIZES
def test_nothing_anywhere(world, size):
    results = solve(world, [[] for _ in range(size)])
    assert results[0].counts.tolist() == [0, 0, 0, 0, 0, 0, -1]
    assert results[0].collectives == (1 if size else 0)


def test_ties_fall_in_the_order_of_rank_and_position(world):
    """300 equals at the cut over four ranks, beside 30 low tokens each: how many go is exact, and they are the first ones."""
    d = [torch.tensor([0.05] * 30 + [0.25] * n) for n in (70, 0, 130, 100)]
    shares = [Tokens(x, torch.zeros_like(x), torch.ones_like(x), torch.ones_like(x)) for x in d]
    whole = Tokens(*(torch.cat(parts) for parts in zip(*shares, strict=True)))
    for tau, dropped in ((0.02, [70, 0, 130, 51]), (0.0402, [70, 0, 28, 0]), (0.0452, [4, 0, 0, 0])):
        results = solve(world, [[share] for share in shares], m2_threshold=tau)
        assert_one_selection(results, whole, m2_threshold=tau)
        assert [int((~r.keep).sum()) for r in results] == dropped
        for result, n in zip(results, dropped, strict=True):
            assert not result.keep[30 : 30 + n].any()


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("T1", "T2")], ids=lambda c: c.name)
def test_worked_case_split_every_way(world, case):
    """T1 and T2 over two ranks at each place, and over four."""
    tokens = case.tokens()
    n = tokens.log_probs.numel()
    whole = select(*tokens).keep
    assert whole.int().tolist() == case.keep
    for cuts in [
        *([i] for i in range(n + 1)),
        *(list(c) for c in itertools.combinations_with_replacement(range(0, n + 1, 2), 3)),
    ]:
        results = solve(world, [[share] for share in split(tokens, cuts)])
        assert torch.equal(torch.cat([r.keep for r in results]), whole)


@settings(max_examples=60)
@given(
    case=batches_with_threshold(DYADIC + OTHER + EXTREME),
    size=st.sampled_from([2, 4]),
    cuts=st.lists(st.integers(0, 24), min_size=7, max_size=7),
    sync=st.booleans(),
)
def test_random_splits_into_micro_batches_and_ranks(world, case, size, cuts, sync):
    tokens, tau = case
    n = tokens.log_probs.numel()
    pieces = split(tokens, sorted(min(c, n) for c in cuts))
    per_rank = len(pieces) // size
    shares = [pieces[i * per_rank : (i + 1) * per_rank] for i in range(size)]
    results = solve(world, shares, {"sync": sync}, m2_threshold=tau)
    assert torch.equal(torch.cat([r.keep for r in results]), select(*tokens, m2_threshold=tau).keep)
    assert all(same_bits(r.floats, results[0].floats) and same_bits(r.counts, results[0].counts) for r in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_number_of_collectives_and_bytes(world, dtype):
    """Whatever the number of tokens; one collective where nothing is to be dropped, unless no sync is allowed."""
    most = 8 if dtype == torch.float64 else 4
    sent = set()
    for n in (8, 20000):
        stale, calm = (random_tokens((2, n), spread=s, dtype=dtype) for s in (0.6, 0.01))
        shares = [[stale], [calm]]
        assert [r.collectives for r in solve(world, shares)] == [most] * 2
        sent |= {r.sent for r in solve(world, shares)}
        assert [r.collectives for r in solve(world, [[calm], [calm]])] == [1, 1]
        late = solve(world, [[calm], [calm]], {"sync": False})
        assert [r.collectives for r in late] == [most] * 2
        assert_one_selection(late, calm.map(lambda t: t.repeat(2, 1)))
    assert len(sent) == 1
    assert sent.pop() < 128 * KB


def test_no_group_is_this_rank_alone(world):
    shares = [random_tokens((2, 30), seed=seed) for seed in range(4)]
    results = world.run(jobs.solve, *((0, [share], {}) for share in shares))
    for result, share in zip(results, shares, strict=True):
        assert torch.equal(result.keep, select(*share).keep.flatten())
        assert result.collectives == 0


def assert_all_raise(results: list, kind: str, *words: str) -> None:
    for result in results:
        assert isinstance(result, Raised), result
        assert result.kind == kind, result
        for word in words:
            assert word in result.message, result


def test_missing_behavior_log_probs_are_an_error_on_all_ranks(world):
    tokens = random_tokens((2, 10))
    missing = Tokens(tokens.log_probs, None, tokens.advantages, tokens.mask)
    results = world.run(jobs.solve, *((4, [missing if rank == 2 else tokens], {}) for rank in range(4)))
    assert_all_raise(results, "MissingBehaviorLogProbs", "None for 1 micro-batches of the group")
    assert "rank 2 of 4: parts [0]" in results[2].message
    assert "rank 0 of 4: none" in results[0].message
    assert_one_selection(solve(world, [[tokens], []]), tokens)  # nobody is left waiting


@pytest.mark.parametrize("empty_handed", [False, True])
def test_adapters_count_the_unscored_tokens_of_all_ranks(world, empty_handed):
    shares = [random_tokens((2, 30), seed=seed) for seed in range(2)]
    for tokens, unscored in zip(shares, (slice(0, 3), slice(20, 27)), strict=True):
        tokens.behavior_log_probs[:, unscored] = math.nan
    parts = [[shares[0]], [] if empty_handed else [shares[1]]]
    unscored = sum(int((t.mask.bool() & t.behavior_log_probs.isnan()).sum()) for part in parts for t in part)
    valid = sum(int(t.mask.sum()) for part in parts for t in part) - unscored
    one, other = world.run(jobs.select_in_window, *((part,) for part in parts))
    assert one == other
    assert one[:2] == (unscored, valid)


def test_a_rank_whose_adapter_raises_leaves_no_other_waiting(world):
    tokens = random_tokens((2, 30))
    missing = Tokens(tokens.log_probs, None, tokens.advantages, tokens.mask)
    assert_all_raise(world.run(jobs.select_in_window, ([tokens],), ([missing],)), "MissingBehaviorLogProbs", "None for 1")
    shares = split(tokens, [17])
    one, other = world.run(jobs.select_in_window, *(([share],) for share in shares))
    assert one == other
    assert one[1] == int(tokens.mask.sum())


def test_without_a_sync_nobody_waits_for_the_rank_that_raises(world):
    tokens = random_tokens((2, 30))
    missing = Tokens(tokens.log_probs, None, tokens.advantages, tokens.mask)
    one, other = world.run(jobs.solve_without_reading, ([tokens],), ([missing],))
    assert one[1] == 4
    assert other.kind == "MissingBehaviorLogProbs"
    shares = split(tokens, [17])
    results = world.run(jobs.solve_without_reading, *(([share],) for share in shares))
    assert torch.equal(torch.cat([keep for keep, _ in results]), select(*tokens).keep.flatten())
    assert [calls for _, calls in results] == [4, 4]


def test_nonfinite_error_is_raised_on_all_ranks(world):
    tokens = random_tokens((2, 10))
    spoiled = random_tokens((2, 10))
    spoiled.log_probs[spoiled.mask] = math.nan
    options = {"nonfinite": "error"}
    results = world.run(jobs.solve, *((2, [share], options) for share in (tokens, spoiled)))
    assert_all_raise(results, "NonFiniteError", f"{int(spoiled.mask.sum())} of ")
    assert "flat index" in results[1].message


@pytest.mark.parametrize(
    "other", [{"m2_threshold": 0.05}, {"scope": "all"}, {"nonfinite": "drop"}, {"dtype": torch.float64}], ids=str
)
def test_other_settings_on_one_rank_are_an_error_on_all(world, other):
    results = world.run(jobs.solve, *((4, [], other if rank == 1 else {}) for rank in range(4)))
    assert_all_raise(results, "InvalidArgument", "must be the same on all ranks")


def test_another_sync_on_one_rank_is_an_error_on_all(world):
    """With nothing to drop, sync=True would leave after one collective, and the others wait for it in the next."""
    calm = random_tokens((2, 10), spread=0.0)
    results = world.run(jobs.solve, *((4, [calm], {}, {"sync": rank != 1}) for rank in range(4)))
    assert_all_raise(results, "InvalidArgument", "and sync must be the same on all ranks")


def test_fp64_with_a_negative_slack_over_ranks(world):
    """Low v that round up to tau: no rank has a candidate, and none may be found."""
    d = torch.full((4, 3), math.sqrt(0.04) * (1 - 2**-52), dtype=torch.float64)
    tokens = Tokens(d, torch.zeros_like(d), torch.ones_like(d), torch.ones_like(d, dtype=torch.bool))
    results = solve(world, [[share] for share in split(tokens, [3, 6, 9])])
    assert_one_selection(results, tokens)
    assert int(results[0].counts[3]) == 0
    assert results[0].collectives == 1  # the early exit


def test_replicas_are_not_counted_twice(world):
    """dp x tp = 2 x 2: ranks 0 and 1 hold one share, 2 and 3 the other."""
    tokens = random_tokens((4, 30))
    shares = split(tokens, [70])
    whole = select(*tokens).keep.flatten()
    for check in ("0", "1"):
        results = world.run(jobs.solve_over_mesh, *(([shares[rank // 2]], check, ("dp", "tp")) for rank in range(4)))
        assert not any(isinstance(r, Raised) for r in results), results
        assert torch.equal(torch.cat([results[0], results[2]]), whole)
        assert torch.equal(torch.cat([results[1], results[3]]), whole)


def test_replicas_that_differ_are_found(world):
    """One bit of one log-prob on one rank."""
    tokens = random_tokens((4, 30))
    shares = [split(tokens, [70])[rank // 2] for rank in range(4)]
    at = shares[3].mask.nonzero()[0]
    shares[3] = Tokens(shares[3].log_probs.clone(), *list(shares[3])[1:])
    shares[3].log_probs[at] = torch.nextafter(shares[3].log_probs[at], torch.zeros(1))
    results = world.run(jobs.solve_over_mesh, *(([share], "1", ("dp", "tp")) for share in shares))
    assert_all_raise(results, "InvalidArgument", "replicated_over: its ranks hold different tokens")


def test_replicas_passed_as_sharded_are_found(world):
    """The negative control: without the check it passes and counts each token twice."""
    tokens = random_tokens((4, 30))
    unnoticed = world.run(jobs.solve_checked, *(([tokens], "0") for _ in range(2)))
    assert not any(isinstance(r, Raised) for r in unnoticed), unnoticed
    results = world.run(jobs.solve_checked, *(([tokens], "1") for _ in range(2)))
    assert_all_raise(results, "InvalidArgument", "group: its ranks [0, 1] hold the same tokens")
    # On a mesh: data-parallel ranks 0 and 2 hold the same, 1 and 3 do not. The pairs of replicas see that too; none waits.
    other, third = random_tokens((4, 30), seed=1), random_tokens((4, 30), seed=2)
    crossed = world.run(jobs.solve_over_mesh, *(([share], "1", ("dp", "tp")) for share in (tokens, other, tokens, third)))
    assert_all_raise(crossed[::2], "InvalidArgument", "group: its ranks [0, 1] hold the same tokens")
    assert_all_raise(crossed[1::2], "InvalidArgument", "replicated_over: its ranks hold different tokens")
    apart = world.run(jobs.solve_checked, *(([share], "1") for share in split(tokens, [60])))
    assert torch.equal(torch.cat(apart), select(*tokens).keep.flatten())
    masked = Tokens(*list(tokens)[:3], tokens.mask & False)  # padding on two ranks is no replica
    assert not any(isinstance(r, Raised) for r in world.run(jobs.solve_checked, *(([masked], "1") for _ in range(2))))


def test_groups_that_cannot_be(world):
    for messages in world.run(jobs.refused_groups, *(() for _ in range(4))):
        assert [m.split(":")[0] for m in messages] == ["InvalidArgument", "InvalidType", "InvalidArgument", "InvalidArgument"]
        assert "DeviceMesh of one dimension" in messages[0]
        assert "got 'dp'" in messages[1]
        assert "replicated_over shares the ranks" in messages[2]
        assert "member" in messages[3]


@pytest.mark.parametrize(
    ("how", "size"), [("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4), ("fsdp2 sums", 2), ("fsdp2 sums", 4), ("hsdp", 4)]
)
def test_training_step_is_the_unsplit_step(world, how, size):
    """Three micro-batches a rank, of unequal numbers of valid tokens. Each gradient within the rounding of its own terms."""
    per_rank, rows, width = 3, 2, 10
    g = torch.Generator().manual_seed(size)
    x = torch.randn(size * per_rank * rows, width, 6, generator=g, dtype=torch.float64)
    model = jobs.Policy()
    with torch.no_grad():
        behavior = model(x) + 0.4 * torch.randn(x.shape[:2], generator=g, dtype=torch.float64)
    advantages = torch.randn(x.shape[:2], generator=g, dtype=torch.float64)
    mask = torch.rand(x.shape[:2], generator=g) < torch.linspace(0.1, 1, len(x))[:, None]
    tokens = Tokens(behavior, behavior, advantages, mask)  # log-probs are the model's

    log_probs = model(x)
    out = m2po_loss(log_probs, *list(tokens)[1:])
    assert int(out.metrics.dropped_tokens) > 0
    want = torch.autograd.grad(out.loss, list(model.parameters()), retain_graph=True)
    per_token = m2po_loss(log_probs, *list(tokens)[1:], reduction="none").loss.flatten() / mask.sum()
    sizes = [torch.zeros_like(p) for p in model.parameters()]
    for i in mask.flatten().nonzero().flatten().tolist():
        terms = torch.autograd.grad(per_token[i], list(model.parameters()), retain_graph=True)
        sizes = [s + t.abs() for s, t in zip(sizes, terms, strict=True)]
    # A sum over n tokens in another order and grouping: at most n + ranks + micro-batches roundings a side; each term passes
    # through some 30 roundings (the model, exp, the products), which other shapes of a matrix product may do otherwise.
    roundings = 2 * (tokens.mask.numel() + size + per_rank + 30)

    rows_of = torch.arange(len(x)).view(size, per_rank, rows)
    batches = [[(x[r], tokens.map(lambda t, r=r: t[r])) for r in rows_of[rank]] for rank in range(size)]
    results = world.run(jobs.train, *((size, how, batches[rank]) for rank in range(size)))
    for result in results:
        assert not isinstance(result, Raised), result
        for got, grad, scale in zip(result[0], want, sizes, strict=True):
            assert bool(((got - grad).abs() <= roundings * 2.0**-53 * scale).all())
    total = sum(result[1] for result in results)
    assert abs(total - float(out.loss.detach())) <= roundings * 2.0**-53 * float(per_token.detach().abs().sum())


@pytest.mark.parametrize("die_at", [1, 3])
def test_a_rank_that_dies_in_mid_solve_ends_the_others(die_at):
    """The others get an error within the group's timeout."""
    world = World(2)
    try:
        tokens = random_tokens((4, 30), seed=1)
        solve(world, [[tokens], [tokens]])  # all are there
        begin = time.monotonic()
        results = world.run(jobs.solve, (2, [tokens], {}, {"sync": False}), (2, [tokens], {}, {"sync": False}, die_at))
        assert time.monotonic() - begin < TIMEOUT
        assert isinstance(results[0], Raised)
        assert results[0].kind in ("RuntimeError", "DistBackendError", "DistNetworkError"), results[0]
        assert results[1].kind == "exit"
    finally:
        world.close()
