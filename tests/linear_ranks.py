"""What each rank of test_linear_ranks.py runs: a process of its own, so that gloo connects as it does in training."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from linear_helpers import Case, assert_close_as_torch, dense_log_probs, dense_loss, gradients, loss_tensors, make_case
from torch import Tensor

from m2po_kernels import linear_log_probs, linear_m2po_loss
from m2po_kernels.errors import InvalidArgument
from m2po_kernels.linear import vocab_parallel, walk
from m2po_kernels.reference import linear_loss_oracle, linear_oracle

VOCAB = 157
SHARDED = ("weight", "bias", "lora_b")
# Where each rank's rows begin, and their number: even with padding, uneven, and with shards that hold nothing.
SPLITS = {
    2: {"padded": [(0, 80), (80, 80)], "uneven": [(0, 20), (20, 137)], "empty": [(0, 157), (157, 0)]},
    4: {"padded": [(0, 40), (40, 40), (80, 40), (120, 40)], "empty": [(0, 0), (0, 100), (100, 57), (157, 9)]},
}


def shard(case: Case, split: list[tuple[int, int]], rank: int) -> tuple[Case, dict]:
    """This rank's part of the case, NaN in the padding, and the options that say so."""
    start, rows = split[rank]

    def part(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        own = tensor.new_full((rows, *tensor.shape[1:]), float("nan"))
        inside = max(0, min(rows, VOCAB - start))
        own[:inside] = tensor[start : start + inside]
        return own

    mine = Case(**{**vars(case), **{name: part(getattr(case, name)) for name in SHARDED}})
    return mine.leaves(), {"vocab_size": VOCAB, "vocab_start": start, "tp_group": dist.group.WORLD}


def assert_gradients(got, dense, want, split, rank: int, reduced: bool) -> None:
    """Shards against their rows of the whole; what is partial after summing it over the ranks."""
    start, rows = split[rank]
    inside = max(0, min(rows, VOCAB - start))
    for name, grad in got.items():
        exact, theirs = getattr(want, name), dense[name]
        if name in SHARDED:
            assert bool((grad[inside:] == 0).all()), f"padding of d {name}"
            if inside:
                # The largest value of the whole sets the floor, as a row's share of the sums does not depend on the split.
                whole = exact.clone()
                whole[start : start + inside] = grad[:inside].double()
                assert_close_as_torch(whole.to(grad.dtype), theirs, exact, f"d {name}", want.log_probs)
            continue
        if not reduced:
            dist.all_reduce(grad)
        assert_close_as_torch(grad, theirs, exact, f"d {name}", want.log_probs)


def log_probs_and_entropy(split, rank: int, **scaling) -> None:
    case = make_case((6, 7), vocab=VOCAB, bias=True, lora=3)
    g = torch.Generator().manual_seed(5)
    flow, entropy_flow = torch.randn(6, 7, generator=g), torch.randn(6, 7, generator=g)
    want = linear_oracle(
        case.hidden, case.weight, case.token_ids, **case.head, **scaling, grad_log_probs=flow, grad_entropy=entropy_flow
    )
    whole = case.leaves()
    dense_lp, dense_entropy = dense_log_probs(whole, **scaling)
    dense = gradients(whole, (dense_lp, flow), (dense_entropy, entropy_flow))
    for reduced in (False, True):
        mine, where = shard(case, split, rank)
        lp, entropy = linear_log_probs(
            mine.hidden, mine.weight, mine.token_ids, **mine.head, **where, **scaling, return_entropy=True, entropy_grad=True,
            reduce_hidden=reduced, max_workspace_bytes=20_000,
        )  # fmt: skip
        assert_close_as_torch(lp.detach(), dense_lp.detach(), want.log_probs, "log-prob", want.log_probs)
        assert_close_as_torch(entropy.detach(), dense_entropy.detach(), want.entropy, "entropy", want.log_probs)
        same_on_every_rank(lp.detach(), entropy.detach())
        assert_gradients(gradients(mine, (lp, flow), (entropy, entropy_flow)), dense, want, split, rank, reduced)


def loss(split, rank: int, **options) -> None:
    case = make_case((6, 30), vocab=VOCAB, bias=True)
    tokens = loss_tensors(case)
    whole = case.leaves()
    theirs = dense_loss(whole, tokens, {}, **options)
    exact_loss, exact = linear_loss_oracle(case.hidden, case.weight, case.token_ids, *tokens, head=case.head, **options)
    dense = gradients(whole, (theirs.loss, torch.ones(())))
    calls: list[int] = []
    gather = vocab_parallel.gather
    vocab_parallel.gather = lambda *args: calls.append(1) or gather(*args)
    for reduced in (False, True):
        mine, where = shard(case, split, rank)
        out = linear_m2po_loss(
            mine.hidden, mine.weight, mine.token_ids, *tokens, **mine.head, **where, **options, reduce_hidden=reduced,
            max_workspace_bytes=20_000,
        )  # fmt: skip
        assert_close_as_torch(out.loss.detach(), theirs.loss.detach(), exact_loss.loss, "loss", exact.log_probs)
        same_on_every_rank(out.loss.detach(), out.metrics.floats)
        assert 0 < int(out.metrics.dropped_tokens) == exact_loss.metrics["dropped_tokens"]
        assert_gradients(gradients(mine, (out.loss, torch.ones(()))), dense, exact, split, rank, reduced)
    vocab_parallel.gather = gather
    counted = torch.tensor([len(calls), -len(calls)])
    dist.all_reduce(counted, op=dist.ReduceOp.MAX)
    assert counted[0] == -counted[1] > 2, "the ranks did not make the same number of chunks"


def same_on_every_rank(*tensors: Tensor) -> None:
    """Bit for bit."""
    for tensor in tensors:
        bits = tensor.reshape(-1).view(torch.uint8)
        others = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(others, bits)
        assert all(torch.equal(bits, other) for other in others)


def worked_cases(ranks: int, rank: int) -> None:
    """V1: 5 tokens padded to 8 over four ranks, all logits 0: -ln 5 everywhere. V2: two ranks, d logits of token 0."""
    hidden, ids = torch.zeros(1, 3), torch.tensor([0])
    if ranks == 4:
        lp = linear_log_probs(hidden, torch.zeros(2, 3), ids, vocab_size=5, vocab_start=2 * rank, tp_group=dist.group.WORLD)
        assert abs(float(lp) + 1.6094379) < 1e-7
    if ranks == 2:
        bias = torch.zeros(2, requires_grad=True)
        lp = linear_log_probs(
            hidden, torch.zeros(2, 3), ids, bias=bias, vocab_size=4, vocab_start=2 * rank, tp_group=dist.group.WORLD
        )
        lp.backward(torch.ones(1))
        assert bias.grad.tolist() == ([0.75, -0.25] if rank == 0 else [-0.25, -0.25])


def ids_outside(split, rank: int) -> None:
    """As on a device, where no id is checked: NaN, as with a whole head, and not a probability of 0."""
    case = make_case((3,), vocab=VOCAB)
    mine, where = shard(case, split, rank)
    checked, walk.check_values = walk.check_values, lambda *_: None
    try:
        lp = linear_log_probs(mine.hidden, mine.weight, torch.tensor([-100, VOCAB, 1]), **where)
    finally:
        walk.check_values = checked
    assert lp.isnan().tolist() == [True, True, False]


def edges(split, rank: int) -> None:
    """A shard whose tokens are all banned, a confident token, and a batch without rows."""
    case = make_case((4, 5), vocab=VOCAB, bias=True)
    mine, where = shard(case, split, rank)
    banned = mine.bias.detach().clone()
    if rank == 1:
        banned[:] = -torch.inf
    start, rows = split[1]
    ids = torch.full((4, 5), 0 if start > 0 else start + rows)  # a token that is not banned
    lp = linear_log_probs(mine.hidden, mine.weight, ids, bias=banned, **where)
    full = case.bias.clone()
    full[start : start + rows] = -torch.inf
    want = linear_oracle(case.hidden, case.weight, ids, bias=full).log_probs
    assert bool(((lp.detach() - want).abs() < 1e-5).all())
    lp.sum().backward()
    assert bool(mine.weight.grad[: max(0, VOCAB - split[rank][0])].isfinite().all())

    sure = torch.zeros(1, 1)
    weight = torch.zeros(split[rank][1], 1)
    bias = torch.zeros(split[rank][1], requires_grad=True)
    with torch.no_grad():
        first = split[0][1] > 0
        owner = 0 if first else 1
        if rank == owner:
            bias[0] = 25.0
    token = torch.tensor([split[owner][0]])
    lp = linear_log_probs(sure, weight, token, bias=bias, **where)
    exact = -torch.log1p((VOCAB - 1) * torch.exp(torch.tensor(-25.0, dtype=torch.float64)))
    assert abs(float(lp.detach()) / float(exact) - 1) < 1e-6
    lp.backward(torch.ones(1))
    if rank == owner:
        assert abs(float(bias.grad[0]) / -float(exact) - 1) < 1e-6

    none = linear_log_probs(mine.hidden, mine.weight, ids, mask=torch.zeros(4, 5), bias=mine.bias, **where)
    assert bool((none == 0).all())
    with pytest.raises(InvalidArgument, match=r"token_ids must be in \[0, 157\)"):
        linear_log_probs(mine.hidden, mine.weight, torch.full((4, 5), VOCAB), bias=mine.bias, **where)


def main(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    worked_cases(ranks, rank)
    for split in SPLITS[ranks].values():
        log_probs_and_entropy(split, rank)
        log_probs_and_entropy(split, rank, temperature=0.7, logit_scale=-1.3, logit_softcap=4.0)
        loss(split, rank)
        loss(split, rank, reduction="sequence-mean", ratio_cap=1.5)
    edges(SPLITS[ranks]["padded"], rank)
    ids_outside(SPLITS[ranks]["padded"], rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
