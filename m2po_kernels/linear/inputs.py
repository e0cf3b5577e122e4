"""Checks what comes in, and says which hidden state goes with which token: the one place that knows the off-by-one.

A causal model's hidden state at position t gives the distribution of the token at t + 1.

- shift=0: the caller has paired them already; hidden [..., H] and token_ids [...] go together element by element. That is how
  verl does it on packed sequences: token_ids = input_ids.roll(-1), with the last position of each sequence masked out.
- shift=1: hidden [..., L, H] and token_ids [..., L] are of the same positions; the token at t goes with the hidden state at
  t - 1, the first token with none. Results are [..., L - 1].
- logits_to_keep=K: only the last K of those results are wanted, [..., K]; token_ids may be the last K alone. With shift=1 this is
  how TRL and verl align a padded batch of prompts and completions: logits[:, -K - 1 : -1] with input_ids[:, -K:].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgument, InvalidType, describe
from ..inputs import FLOAT_DTYPES


class Alignment(NamedTuple):
    """Each sequence has `tokens` results; the first goes with position `first` of the `positions` in hidden."""

    tokens: int
    positions: int
    first: int


def align(hidden: Tensor, token_ids: Tensor, shift: int, logits_to_keep: int | None) -> tuple[Tensor, Alignment]:
    """The token of each result, and where the hidden states of a sequence lie."""
    if isinstance(shift, bool) or shift not in (0, 1):
        raise InvalidArgument(f"shift must be 0 or 1; got {shift!r}")
    lead = hidden.shape[:-1]
    positions = lead[-1]
    if positions < shift:
        raise InvalidArgument(f"hidden must have at least one position per sequence with shift=1; got {describe(hidden)}")
    keep = positions - shift
    if logits_to_keep is not None:
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int):
            raise InvalidType(f"logits_to_keep must be an integer, or None; got {describe(logits_to_keep)}")
        if not 0 <= logits_to_keep <= keep:
            raise InvalidArgument(f"logits_to_keep must be in [0, {keep}], the results a sequence has; got {logits_to_keep}")
        keep = logits_to_keep
    shapes = [lead] if logits_to_keep is None else [lead, (*lead[:-1], keep)]
    if tuple(token_ids.shape) not in [tuple(shape) for shape in shapes]:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidArgument(f"token_ids must have shape {expected}, as hidden is {describe(hidden)}; got {describe(token_ids)}")
    return token_ids[..., token_ids.shape[-1] - keep :], Alignment(keep, positions, positions - shift - keep)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
) -> None:
    """Raises InvalidType or InvalidArgument where types, shapes or devices do not fit, or where a weight is not all here."""
    for name, tensor in [("hidden", hidden), ("weight", weight), ("bias", bias), ("lora_a", lora_a), ("lora_b", lora_b)]:
        if tensor is None and name not in ("hidden", "weight"):
            continue
        _check_whole(name, tensor)
        assert tensor is not None
        if tensor.dtype not in FLOAT_DTYPES:
            raise InvalidType(f"{name} must be float32, bfloat16, float16 or float64; got {describe(tensor)}")
        if tensor.device != hidden.device:
            raise InvalidArgument(f"{name} must be on the device of hidden, {hidden.device}; got {describe(tensor)}")
    if not isinstance(token_ids, Tensor) or token_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidType(f"token_ids must be an int32 or int64 tensor; got {describe(token_ids)}")
    if token_ids.device != hidden.device:
        raise InvalidArgument(f"token_ids must be on the device of hidden, {hidden.device}; got {describe(token_ids)}")
    if hidden.dim() < 2 or hidden.shape[-1] == 0:
        raise InvalidArgument(f"hidden must have shape [..., H], with a dimension before H >= 1; got {describe(hidden)}")
    width = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        raise InvalidArgument(f"weight must have shape [V, {width}], as hidden is {describe(hidden)}; got {describe(weight)}")
    vocab = weight.shape[0]
    if bias is not None and bias.shape != (vocab,):
        raise InvalidArgument(f"bias must have shape [{vocab}], one per row of weight; got {describe(bias)}")
    if (lora_a is None) != (lora_b is None):
        raise InvalidArgument("lora_a and lora_b go together; got one of them")
    if lora_a is not None and lora_b is not None:
        if lora_a.dim() != 2 or lora_a.shape[1] != width:
            raise InvalidArgument(f"lora_a must have shape [r, {width}]; got {describe(lora_a)}")
        if lora_b.shape != (vocab, lora_a.shape[0]):
            raise InvalidArgument(f"lora_b must have shape [{vocab}, {lora_a.shape[0]}]; got {describe(lora_b)}")


def _check_whole(name: str, tensor: object) -> None:
    """A shard in place of the tensor must not pass for a small vocabulary."""
    if not isinstance(tensor, Tensor):
        raise InvalidType(f"{name} must be a torch.Tensor; got {describe(tensor)}")
    if hasattr(tensor, "full_tensor"):
        raise InvalidArgument(
            f"{name} is a DTensor (FSDP2 or tensor parallelism): gather it first, {name}.full_tensor(), or keep the head out of "
            "fully_shard; a head split over the vocabulary goes as its local shard with tp_group and vocab_start"
        )
    if tensor.numel() == 0 and hasattr(tensor, "ds_id"):
        raise InvalidArgument(
            f"{name} is empty because ZeRO-3 partitioned it: gather it first, with "
            f"deepspeed.zero.GatheredParameters([{name}]), around forward and backward"
        )


def check_vocab(weight: Tensor, vocab_size: int | None, vocab_start: int | None, tp_group: object) -> int:
    """The size of the whole vocabulary. Raises InvalidType or InvalidArgument."""
    rows = weight.shape[0]
    for name, value in [("vocab_size", vocab_size), ("vocab_start", vocab_start)]:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidType(f"{name} must be an integer; got {describe(value)}")
    if tp_group is not None:
        if not hasattr(tp_group, "group_name"):
            raise InvalidType(f"tp_group must be a torch.distributed.ProcessGroup; got {describe(tp_group)}")
        if vocab_size is None:
            raise InvalidArgument("vocab_size is None with tp_group: pass the size of the whole vocabulary, without padding")
        if vocab_start is None:
            raise InvalidArgument("vocab_start is None with tp_group: pass the id of the first token of this rank's shard")
        if vocab_size < 1 or vocab_start < 0:
            raise InvalidArgument(f"vocab_size must be >= 1 and vocab_start >= 0; got {vocab_size} and {vocab_start}")
        return vocab_size
    if vocab_start:
        raise InvalidArgument(f"vocab_start goes with tp_group; got vocab_start={vocab_start} and no tp_group")
    if rows == 0:
        raise InvalidArgument(f"weight must have a row per token of the vocabulary, [V, H] with V >= 1; got {describe(weight)}")
    if vocab_size is None:
        return rows
    if not 1 <= vocab_size <= rows:
        raise InvalidArgument(f"vocab_size must be in [1, {rows}], as weight has {rows} rows; got {vocab_size}")
    return vocab_size


def products_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the products are computed in: autocast's dtype where it is on, as in F.linear; else the wider of the two."""
    device = hidden.device.type
    own = torch.promote_types(hidden.dtype, weight.dtype)
    if own != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return own
