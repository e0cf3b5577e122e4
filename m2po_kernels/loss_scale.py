"""What a trainer that divides losses or averages gradients must multiply each loss by, so that the parts add up to the whole.

Losses with `selection=` of one optimizer batch add up to the loss of that batch, over its micro-batches and ranks alike: each
is divided by the tokens of all. A division or an average that comes on top has to be taken back.
"""

from __future__ import annotations

from typing import Any

from .distributed import Ranks
from .errors import InvalidArgument, InvalidType, describe


def loss_scale(group: Any = None, *, micro_batches: int = 1) -> int:
    """The factor for a trainer that averages gradients over `group` and divides each loss by `micro_batches`.

    group: the ranks over which gradients are averaged: those of DDP; of FSDP and FSDP2 all ranks that hold different data (the
        whole mesh of HSDP, not one dimension of it). A ProcessGroup, a DeviceMesh of one dimension, or None where gradients
        are summed (FSDP2 after set_gradient_divide_factor(1.0)) or one process trains alone.
    micro_batches: what the trainer divides each loss by for gradient accumulation; 1 if it does not.

    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    return Ranks(group).size * _positive("micro_batches", micro_batches)


def megatron_loss_scale(*, num_microbatches: int, data_parallel_size: int, context_parallel_size: int = 1) -> int:
    """The factor for Megatron-Core with calculate_per_token_loss=False and a loss function that returns (loss, 1, report).

    The schedule divides by the returned number of tokens, here 1, and by num_microbatches; the gradient is then averaged over
    the data-parallel and context-parallel ranks. The loss of a function of two results, (loss, report), is multiplied by the
    context-parallel size first, in releases whose forward_step_calc_loss does so: leave context_parallel_size at 1 there.
    (forward_step_calc_loss in megatron/core/pipeline_parallel/schedules.py of Megatron-LM, at 00611e6.)

    Raises InvalidArgument, InvalidType (in m2po_kernels.errors).
    """
    return (
        _positive("num_microbatches", num_microbatches)
        * _positive("data_parallel_size", data_parallel_size)
        * _positive("context_parallel_size", context_parallel_size)
    )


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be an integer >= 1; got {describe(value)}")
    if value < 1:
        raise InvalidArgument(f"{name} must be >= 1; got {value}")
    return value
