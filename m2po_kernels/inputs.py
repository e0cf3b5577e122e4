"""Checks the tensors of a call and brings them to one shape, without copying them and without a host sync.

The single exception: `cu_seqlens` on a CPU is checked by value; on another device it is trusted, as reading it would sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InvalidArgument, InvalidType, MissingBehaviorLogProbs, describe
from .rule import Batch, check_number

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on the devices that have no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def compute_dtype(log_probs: Tensor) -> torch.dtype:
    """The type in which d, v and the gradient are computed: fp64 for fp64 log-probs, else fp32."""
    return torch.float64 if log_probs.dtype == torch.float64 else torch.float32


def check_batch(
    log_probs: Tensor,
    behavior_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Batch, Tensor | None]:
    """The batch with advantages and mask expanded to the shape of `log_probs`, and the sequence index of each packed token.

    Raises InvalidType, InvalidArgument or MissingBehaviorLogProbs; each names the argument.
    """
    _check_float("log_probs", log_probs)
    if log_probs.dim() not in (1, 2):
        raise InvalidArgument(f"log_probs must have shape [B, T], or [N] when packed; got {describe(log_probs)}")
    if behavior_log_probs is None:
        raise MissingBehaviorLogProbs(
            "behavior_log_probs is None: pass the log-prob that the rollout engine gave to each token when it sampled it "
            "(vLLM and SGLang return it on request). The current log_probs are no substitute: with them nothing would look stale."
        )
    same_shape = [("behavior_log_probs", behavior_log_probs), ("mask", mask)]
    if ref_log_probs is not None:
        same_shape.append(("ref_log_probs", ref_log_probs))
    for name, tensor in same_shape:
        if name == "mask":
            _check_tensor(name, tensor)
            if tensor.is_complex():
                raise InvalidType(f"mask must be bool or 0/1 of a real dtype; got {describe(tensor)}")
        else:
            _check_float(name, tensor)
        _check_device(name, tensor, log_probs)
        if tensor.shape != log_probs.shape:
            raise InvalidArgument(f"{name} must have the shape of log_probs, {list(log_probs.shape)}; got {describe(tensor)}")

    ids = None if cu_seqlens is None else _sequence_ids(cu_seqlens, log_probs)
    _check_float("advantages", advantages)
    _check_device("advantages", advantages, log_probs)
    return Batch(
        log_probs, behavior_log_probs, _expand_advantages(advantages, log_probs, cu_seqlens, ids), mask, ref_log_probs
    ), ids


def sequence_weights(
    batch: Batch, ids: Tensor | None, cu_seqlens: Tensor | None, sequence_lengths: Tensor | None, nonfinite: str
) -> tuple[Tensor, Tensor]:
    """For "sequence-mean": the per-token weight 1 / (valid tokens of its sequence), and the 0-d count of sequences with any."""
    log_probs = batch.log_probs
    packed = log_probs.dim() == 1
    if packed and (cu_seqlens is None or ids is None):
        raise InvalidArgument(
            'cu_seqlens is None: reduction="sequence-mean" of packed tokens needs it, int32 or int64 of shape [S + 1]'
        )
    n_sequences = cu_seqlens.numel() - 1 if cu_seqlens is not None else log_probs.shape[0]
    if sequence_lengths is not None:
        _check_tensor("sequence_lengths", sequence_lengths)
        _check_device("sequence_lengths", sequence_lengths, log_probs)
        if sequence_lengths.shape != (n_sequences,):
            raise InvalidArgument(
                f"sequence_lengths must have shape [{n_sequences}], one per sequence; got {describe(sequence_lengths)}"
            )
        lengths = sequence_lengths
    else:
        valid = batch.mask != 0
        if nonfinite == "drop":
            valid = valid & ~nonfinite_positions(batch)
        if ids is not None:
            lengths = torch.zeros(n_sequences, dtype=torch.int64, device=log_probs.device).index_add_(
                0, ids, valid.to(torch.int64)
            )
        else:
            lengths = valid.sum(1)
    has_any = lengths > 0
    weights = torch.where(has_any, 1.0 / lengths.clamp(min=1).to(wide_dtype(log_probs.device)), 0.0).to(compute_dtype(log_probs))
    per_token = weights[ids] if ids is not None else weights[:, None].expand(log_probs.shape)
    return per_token, has_any.sum()


def nonfinite_positions(batch: Batch) -> Tensor:
    """Where d or any input used is NaN or infinite, valid or not. bool, shape of log_probs."""
    dtype = compute_dtype(batch.log_probs)
    current = batch.log_probs.detach().to(dtype)
    finite = (current - batch.behavior_log_probs.to(dtype)).isfinite() & batch.advantages.to(dtype).isfinite()
    if batch.ref_log_probs is not None:
        finite = finite & (batch.ref_log_probs.to(dtype) - current).isfinite()
    return ~finite


def given_denominators(denominator: float | str | Tensor, log_probs: Tensor) -> Tensor:
    """`denominator=` as fp64 [2] on the device of log_probs: one for the policy term, one for the KL term."""
    dtype = wide_dtype(log_probs.device)
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise InvalidArgument(f"denominator must be one number or a tensor of one element; got {describe(denominator)}")
        _check_device("denominator", denominator, log_probs)
        return denominator.detach().to(dtype).reshape(1).expand(2)
    if isinstance(denominator, str):
        raise InvalidArgument(f'denominator must be a number, a tensor of one element or "kept"; got {denominator!r}')
    check_number("denominator", denominator, ">= 0 and finite", lambda x: 0 <= x < float("inf"))
    return torch.full((2,), float(denominator), dtype=dtype, device=log_probs.device)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InvalidType(f"{name} must be a torch.Tensor; got {describe(value)}")


def _check_float(name: str, value: object) -> None:
    _check_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.dtype not in FLOAT_DTYPES:
        raise InvalidType(f"{name} must be float32, bfloat16, float16 or float64; got {describe(value)}")


def _check_device(name: str, value: Tensor, log_probs: Tensor) -> None:
    if value.device != log_probs.device:
        raise InvalidArgument(f"{name} must be on the device of log_probs, {log_probs.device}; got {describe(value)}")


def _sequence_ids(cu_seqlens: Tensor, log_probs: Tensor) -> Tensor:
    _check_tensor("cu_seqlens", cu_seqlens)
    _check_device("cu_seqlens", cu_seqlens, log_probs)
    if log_probs.dim() != 1:
        raise InvalidArgument(f"cu_seqlens goes with packed log_probs of shape [N]; got log_probs {describe(log_probs)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"cu_seqlens must be int32 or int64 of shape [S + 1]; got {describe(cu_seqlens)}")
    n = log_probs.numel()
    lengths = cu_seqlens.diff().to(torch.int64)
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != n or bool((lengths < 0).any()):
            raise InvalidArgument(
                f"cu_seqlens must start at 0, never fall and end at the number of tokens, {n}; got first {first}, last {last}"
                + (", and a negative length" if bool((lengths < 0).any()) else "")
            )
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=n)


def _expand_advantages(advantages: Tensor, log_probs: Tensor, cu_seqlens: Tensor | None, ids: Tensor | None) -> Tensor:
    shape = log_probs.shape
    if advantages.shape == shape:
        return advantages
    if log_probs.dim() == 2:
        if advantages.shape in ((shape[0],), (shape[0], 1)):
            return advantages.reshape(shape[0], 1).expand(shape)
        expected = f"[{shape[0]}], [{shape[0]}, 1] or {list(shape)}"
    elif cu_seqlens is not None and ids is not None:
        n_sequences = cu_seqlens.numel() - 1
        if advantages.shape == (n_sequences,):
            return advantages[ids]
        expected = f"[{shape[0]}] per token or [{n_sequences}] per sequence of cu_seqlens"
    else:
        expected = f"{list(shape)} (or per sequence, with cu_seqlens)"
    raise InvalidArgument(f"advantages must have shape {expected}; got {describe(advantages)}")
