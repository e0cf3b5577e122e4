"""Every collective of the package: explicit, outside autograd, of buffers whose size does not depend on the tokens.

torch.distributed is imported only where a group is given; no group means this process alone, never a default group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import InvalidArgument, InvalidType, describe


class Ranks:
    """Those who decide together: the ranks of one process group, or this process alone."""

    def __init__(self, group: Any = None, name: str = "group"):
        """group: None, a ProcessGroup, or a DeviceMesh of one dimension. Raises InvalidType or InvalidArgument, naming `name`."""
        self._group = None if group is None else _process_group(group, name)
        self.rank, self.size = 0, 1
        if self._group is not None:
            import torch.distributed as dist

            self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def sum(self, buffer: Tensor) -> Tensor:
        """int64 `buffer` summed over the ranks, in place: one collective. Integers, so that no rank sees another sum."""
        if self._group is not None:
            import torch.distributed as dist

            dist.all_reduce(buffer, group=self._group)
        return buffer

    def slots(self, values: Tensor) -> Tensor:
        """int64 [size, n]: `values` (int64 or fp64 [n], by its bits) in the row of this rank, else 0; `sum` fills the others."""
        bits = values.view(torch.int64)
        table = torch.zeros(self.size, bits.numel(), dtype=torch.int64, device=values.device)
        table[self.rank] = bits
        return table

    def default_device(self) -> torch.device:
        """Where a rank without tokens puts its buffers: the current CUDA device if the group has NCCL, else the CPU."""
        if self._group is not None and torch.cuda.is_available():
            import torch.distributed as dist

            if "nccl" in dist.get_backend_config(self._group):  # by device, as "cpu:gloo,cuda:nccl"
                return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def others(self) -> set[int]:
        """Global ranks of the group, without this one."""
        if self._group is None:
            return set()
        import torch.distributed as dist

        return set(dist.get_process_group_ranks(self._group)) - {dist.get_rank()}


def check_disjoint(ranks: Ranks, replicas: Ranks) -> None:
    """Raise InvalidArgument if a rank is said to hold both the same tokens and other tokens than this one."""
    both = sorted(ranks.others() & replicas.others())
    if both:
        raise InvalidArgument(
            f"replicated_over shares the ranks {both} with group: ranks that hold the same tokens must not be in group, where "
            "they would be counted twice; expected only ranks whose tokens differ (of a mesh: its data-parallel dimension)"
        )


def replicas_differ(replicas: Ranks, digest: Tensor) -> bool:
    """Whether any rank of `replicas` holds other tokens than another. One collective and one host sync. digest: int64 [n]."""
    table = replicas.sum(replicas.slots(digest))
    return bool((table != table[0]).any())


def check_sharded(ranks: Ranks, digest: Tensor) -> None:
    """Raise InvalidArgument, on all ranks alike, if two hold the same tokens. digest: int64 [n], all 0 where there are none."""
    rows = ranks.sum(ranks.slots(digest)).tolist()
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(rows):
        if any(row):
            holders.setdefault(tuple(row), []).append(rank)
    same = [found for found in holders.values() if len(found) > 1]
    if same:
        raise InvalidArgument(
            f"group: its ranks {same[0]} hold the same tokens, which would be counted {len(same[0])} times; "
            "expected ranks with different tokens (name ranks that repeat these as replicated_over=, not as group)"
        )


def _process_group(group: Any, name: str) -> Any:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(f"{name} needs torch.distributed.init_process_group first; got {describe(group)}")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(f"{name} must be a DeviceMesh of one dimension, such as mesh['dp']; got {describe(group)}")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(f"{name} must be a group of which this rank is a member; got GroupMember.NON_GROUP_MEMBER")
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidType(f"{name} must be a ProcessGroup, a DeviceMesh of one dimension, or None; got {describe(group)}")
    return group
