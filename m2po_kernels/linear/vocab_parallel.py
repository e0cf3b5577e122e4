"""The softmax of rows whose vocabulary is split over the ranks of a process group.

Each rank brings its largest z, the log of its other exponentials' sum, and the chosen token's z if it has it. One all-gather a
chunk; then every rank combines them in the order of the ranks, so that all hold the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Local(NamedTuple):
    """What one rank knows of each row. fp32 or fp64 [n]; a rank without columns: minus infinity, 0, minus infinity, 0."""

    top: Tensor  # the largest z here
    log_prob: Tensor  # of that column among the columns here
    token: Tensor  # z of the chosen token, minus infinity where it is not here
    entropy: Tensor  # of the softmax over the columns here; zeros if not asked for


class Combined(NamedTuple):
    """The same on every rank, but for `log_share`. [n], dtype as Local."""

    log_prob: Tensor  # of the chosen token
    log_share: Tensor  # log of this rank's share of the probability
    entropy: Tensor


def group_named(name: str):
    """The process group that LinearArgs.group names."""
    from torch.distributed.distributed_c10d import _resolve_process_group  # as torch's own functional collectives do

    return _resolve_process_group(name)  # type: ignore[arg-type]


def gather(local: Local, group_name: str) -> tuple[Tensor, int]:
    """([ranks, 4, n] with the fields of Local of every rank, own rank): the one collective of a chunk."""
    import torch.distributed as dist

    group = group_named(group_name)
    own = torch.stack(local)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return torch.stack(everyone), dist.get_rank(group)


def combine(everyone: Tensor, rank: int) -> Combined:
    """From all ranks' `Local` to the row's log-prob. In fp64, and without the largest term of the sum, as on one rank."""
    top, top_log_prob, token, own_entropy = everyone.double().unbind(1)  # [ranks, n] each
    log_sum = top - top_log_prob
    largest, at = log_sum.max(0, keepdim=True)
    others = (log_sum - largest).exp().scatter(0, at, 0.0)
    rest = torch.zeros_like(others[0])
    for term in others:  # in the order of the ranks
        rest = rest + term
    log_share = (log_sum - largest) - torch.log1p(rest)
    log_prob = torch.where(token == -torch.inf, -torch.inf, (token - top) + top_log_prob + log_share).amax(0)
    share = log_share.exp()
    entropy = torch.zeros_like(rest)
    for part, log_part, inside in zip(share, log_share, own_entropy, strict=True):
        entropy = entropy + torch.where(part > 0, part * (inside - log_part), 0.0)
    return Combined(*(t.to(everyone.dtype) for t in (log_prob, log_share[rank], entropy)))


def sum_over_ranks(tensor: Tensor, group_name: str) -> None:
    """All-reduces `tensor` in place."""
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group_named(group_name))
