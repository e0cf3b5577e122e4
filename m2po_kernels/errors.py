"""Every error the package raises on purpose. Each names the argument, what came and what was expected."""

from __future__ import annotations


class M2POError(Exception):
    """Base of all errors of this package."""


class InvalidArgument(M2POError, ValueError):
    """An argument has a value, shape or device that the function cannot take."""


class InvalidType(M2POError, TypeError):
    """An argument has a type or dtype that the function cannot take."""


class MissingBehaviorLogProbs(InvalidArgument):
    """The rollout engine's log-probs are missing. Nothing falls back to the current ones: that would hide the staleness."""


class NonFiniteError(InvalidArgument):
    """`nonfinite="error"` met a NaN or an infinity at a valid token."""


class BackendUnavailable(InvalidArgument):
    """A backend that was asked for by name cannot serve this call; the message says why."""


def describe(value: object) -> str:
    """`value` in a few words, for an error message: a tensor by dtype, shape and device, anything else by its repr."""
    dtype, shape, device = (getattr(value, name, None) for name in ("dtype", "shape", "device"))
    if dtype is not None and shape is not None:
        return f"a {dtype} tensor of shape {list(shape)} on {device}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
