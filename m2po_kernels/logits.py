"""selective_log_softmax and m2po_loss_from_logits: from a model's logits, without a copy of them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops_logits  # noqa: F401  (registers torch.ops.m2po_kernels)
from .errors import InvalidArgument, InvalidType, describe
from .inputs import FLOAT_DTYPES, compute_dtype
from .logits_args import LogitsArgs
from .loss import m2po_loss
from .parts import Part
from .results import LossOutput, Selection
from .rule import check_number


def selective_log_softmax(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    entropy_grad: bool = False,
    inplace: bool = False,
    shift: int = 0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each chosen token, log_softmax(softcap(logit_scale * x) / temperature)[token]; makes no copy of the logits.

    logits: [..., V] with one to three leading dimensions, float32, bfloat16, float16 or float64, any strides (of three
        leading dimensions two neighbours must be mergeable without a copy). Alone gets a gradient. -inf is probability 0; NaN or
        +inf makes the row's results NaN.
    token_ids: [...] int32 or int64, the leading dimensions of the logits. An id outside [0, vocab_size) is an error on a CPU
        and gives NaN on other devices, where looking would make the host wait.
    temperature: > 0; a number, or a floating-point tensor of the result's shape (checked by value on a CPU only).
    logit_softcap: cap > 0: softcap(x) = cap * tanh(x / cap). None: no cap.
    vocab_size: columns from here on are padding; they are not read and their gradient is 0. Default V.
    return_entropy: also return the entropy (nats) of each row, without gradient unless entropy_grad=True.
    inplace: backward writes the gradient over the logits and allocates nothing of their size. The logits may then have no other
        use, and only one backward is possible: anything else raises.
    shift: 1 takes logits and token_ids of the same [B, T + 1] positions, pairs row t with token t + 1 and returns [B, T];
        the last row of each sequence gets gradient 0. It saves a slice, whose own backward would allocate all logits again.
    backend: "eager", "native", "cuda", "triton", or None for the first that serves the call.

    Returns log_probs, or (log_probs, entropy): float32, float64 for float64 logits. A row's result has the same bits alone
    and in any batch. A row whose incoming gradient is 0 gets gradient 0 whatever it holds; native and triton, and eager on a
    CPU, do not read it. Second derivatives raise. Where the token's own logit is -inf its log-prob is -inf, and the
    row's gradient NaN unless the incoming one is 0. Under torch.compile inplace=True gives the same gradient, but torch decides
    where it lies.
    Raises InvalidArgument, InvalidType, BackendUnavailable (all in m2po_kernels.errors).
    """
    _check_tensors(logits, token_ids, shift)
    shape = (*logits.shape[:-2], logits.shape[-2] - shift)
    args = LogitsArgs(
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        logit_scale=logit_scale,
        logit_softcap=check_softcap(logit_softcap),
        vocab_size=_vocab_size(vocab_size, logits),
        shift=shift,
        with_entropy=return_entropy,
        entropy_grad=entropy_grad,
    )
    if entropy_grad and not return_entropy:
        raise InvalidArgument("entropy_grad=True goes with return_entropy=True; got return_entropy=False")
    if inplace and any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise InvalidArgument(f"inplace=True needs logits of their own memory; got expanded ones, with strides {logits.stride()}")
    rows = _as_rows(logits, shift)
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures = check_temperatures(temperature, "logits", logits, shape).reshape(rows.shape[0], rows.shape[1] - shift)
    log_probs, entropy = torch.ops.m2po_kernels.selective_log_softmax(
        rows, token_ids.reshape(rows.shape[:2]), temperatures, *args.args(), inplace, backend
    )
    log_probs = log_probs.reshape(shape)
    return (log_probs, entropy.reshape(shape)) if return_entropy else log_probs


def m2po_loss_from_logits(
    logits: Tensor,
    token_ids: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    inplace: bool = False,
    shift: int = 0,
    m2_threshold: float = 0.04,
    scope: str = "quadrants",
    reduction: str = "token-mean",
    denominator: float | Tensor | str | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    ratio_cap: float | None = None,
    nonfinite: str = "propagate",
    selection: Selection | None = None,
    part: Part | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    backend: str | None = None,
) -> LossOutput:
    """`m2po_loss` of the log-probs that `selective_log_softmax` takes from the logits.

    logits: [B, T, V], or packed [N, V]; with shift=1 [B, T + 1, V]. token_ids: [B, T] or [N]; with shift=1 [B, T + 1].
    behavior_log_probs, advantages, mask: as in `m2po_loss`, [B, T] or [N] (also with shift=1). What logits, token_ids and a
        temperature tensor hold where mask is 0 changes nothing: an id of -100 there is no error.
    temperature, logit_scale, logit_softcap, vocab_size, inplace, shift: as in `selective_log_softmax`; others as in `m2po_loss`.

    A token without gradient (not valid, dropped, or without advantage and KL term) costs no work on its logits in backward beyond
    writing zeros.
    """
    _check_tensors(logits, token_ids, shift)
    shape = (*logits.shape[:-2], logits.shape[-2] - shift)
    if isinstance(mask, Tensor) and mask.shape == shape and mask.device == logits.device:  # else m2po_loss says what is wrong
        valid = mask != 0
        chosen = torch.where(valid, token_ids[..., shift:], 0)
        token_ids = torch.cat([token_ids[..., :shift], chosen], -1) if shift else chosen
        if isinstance(temperature, Tensor) and temperature.shape == shape and temperature.device == logits.device:
            temperature = torch.where(valid, temperature, 1.0)
    log_probs = selective_log_softmax(
        logits,
        token_ids,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        inplace=inplace,
        shift=shift,
        backend=backend,
    )
    assert isinstance(log_probs, Tensor)
    return m2po_loss(
        log_probs,
        behavior_log_probs,
        advantages,
        mask,
        m2_threshold=m2_threshold,
        scope=scope,
        reduction=reduction,
        denominator=denominator,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        ratio_cap=ratio_cap,
        nonfinite=nonfinite,
        selection=selection,
        part=part,
        cu_seqlens=cu_seqlens,
        sequence_lengths=sequence_lengths,
        backend=backend,
    )


def _check_tensors(logits: Tensor, token_ids: Tensor, shift: int) -> None:
    if not isinstance(logits, Tensor) or logits.dtype not in FLOAT_DTYPES:
        raise InvalidType(f"logits must be a float32, bfloat16, float16 or float64 tensor; got {describe(logits)}")
    if not isinstance(token_ids, Tensor) or token_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidType(f"token_ids must be an int32 or int64 tensor; got {describe(token_ids)}")
    if isinstance(shift, bool) or shift not in (0, 1):
        raise InvalidArgument(f"shift must be 0 or 1; got {shift!r}")
    if not 2 <= logits.dim() <= 4 or logits.shape[-1] == 0:
        raise InvalidArgument(f"logits must have shape [..., V], one to three dimensions before V >= 1; got {describe(logits)}")
    if token_ids.shape != logits.shape[:-1]:
        raise InvalidArgument(
            f"token_ids must have the leading dimensions of logits, {list(logits.shape[:-1])}; got {describe(token_ids)}"
        )
    if token_ids.device != logits.device:
        raise InvalidArgument(f"token_ids must be on the device of logits, {logits.device}; got {describe(token_ids)}")
    if logits.shape[-2] < shift:
        raise InvalidArgument(f"logits must have at least one position per sequence with shift=1; got {describe(logits)}")


def check_softcap(logit_softcap: float | None) -> float:
    """The soft-cap as LogitsArgs takes it: 0 for none."""
    if logit_softcap is None:
        return 0.0
    check_number("logit_softcap", logit_softcap, "> 0 and finite, or None", lambda x: x > 0)
    return logit_softcap


def _vocab_size(vocab_size: int | None, logits: Tensor) -> int:
    columns = logits.shape[-1]
    if vocab_size is None:
        return columns
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise InvalidType(f"vocab_size must be an integer, or None; got {describe(vocab_size)}")
    if not 1 <= vocab_size <= columns:
        raise InvalidArgument(f"vocab_size must be in [1, {columns}], as logits have {columns} columns; got {vocab_size}")
    return vocab_size


def check_temperatures(temperature: Tensor, name: str, start: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Per-token temperatures in the type of d; `start` is what the call starts from, its argument `name`."""
    if temperature.dtype not in FLOAT_DTYPES:
        raise InvalidType(f"temperature must be a number or a floating-point tensor; got {describe(temperature)}")
    if temperature.shape != shape:
        raise InvalidArgument(
            f"temperature must be a number or have the result's shape, {list(shape)}; got {describe(temperature)}"
        )
    if temperature.device != start.device:
        raise InvalidArgument(f"temperature must be on the device of {name}, {start.device}; got {describe(temperature)}")
    return temperature.detach().to(compute_dtype(start))


def _as_rows(logits: Tensor, shift: int) -> Tensor:
    """The logits as a [B, T, V] view."""
    if logits.dim() == 2:
        return logits.unsqueeze(0)
    if logits.dim() == 3:
        return logits
    a, b, t, _ = logits.shape
    s = logits.stride()
    if a == 1 or b == 1 or s[0] == b * s[1]:
        return logits.flatten(0, 1)
    if shift == 0 and (b == 1 or t == 1 or s[1] == t * s[2]):
        return logits.flatten(1, 2)
    raise InvalidArgument(
        f"logits of three leading dimensions must allow a view of two (a copy would cost their memory again); "
        f"got {describe(logits)} with strides {s}"
    )
