"""Which backend computes a call, and why. One `why_not` serves the choice, the errors, the test skips and `m2po doctor`."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from .errors import BackendUnavailable
from .logits_args import LogitsArgs
from .rule import Batch, Rule

Call: TypeAlias = "tuple[Batch, Rule] | tuple[Tensor, LogitsArgs]"

# For each device type the backends in order of choice; "*" is every other device.
ORDER = {"cpu": ("native", "eager"), "cuda": ("cuda", "triton", "eager"), "*": ("eager",)}
BACKENDS = ("eager", "native", "triton", "cuda")


@functools.cache
def load(name: str) -> ModuleType:
    """The backend's module; raises BackendUnavailable for a name that is none."""
    if name not in BACKENDS:
        raise BackendUnavailable(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None; got {name!r}")
    return importlib.import_module(f"{__package__}.backends.{name}")


def why_not(name: str, device: torch.device | str = "cpu") -> str | None:
    """None if backend `name` can serve tensors on `device` in this process, else the reason in one line."""
    return load(name).why_not(torch.device(device))


def candidates(device: torch.device) -> tuple[str, ...]:
    """The backends for `device` in order of choice, whether or not they are available."""
    return ORDER.get(device.type, ORDER["*"])


def choose(device: torch.device, backend: str | None = None, call: Call | None = None) -> str:
    """The name of the backend that serves tensors on `device`: `backend`, else $M2PO_BACKEND, else the first available in ORDER.

    call: what is to be computed, where the choice is for that alone: a backend may decline it (`declines`) for its dtype or size.
    A forced backend that cannot serve raises BackendUnavailable with its reason; it never falls back.
    """
    forced = backend or os.environ.get("M2PO_BACKEND")
    if forced:
        reason = _reason(forced, device, call)
        if reason:
            source = "backend" if backend else "M2PO_BACKEND"
            raise BackendUnavailable(f"{source}={forced!r} cannot serve tensors on {device}: {reason}")
        return forced
    return next(name for name in candidates(device) if _reason(name, device, call) is None)


def _reason(name: str, device: torch.device, call: Call | None) -> str | None:
    reason = why_not(name, device)
    if reason is not None or call is None:
        return reason
    from_logits = isinstance(call[1], LogitsArgs)
    if from_logits and not hasattr(load(name), "log_softmax"):
        return "it does not start from logits"
    declines = getattr(load(name), "declines_logits" if from_logits else "declines", None)
    return declines(*call) if declines else None


def backend_for(batch: Batch, rule: Rule) -> ModuleType:
    """The backend module that computes this call."""
    return load(choose(batch.log_probs.device, rule.backend, (batch, rule)))


def backend_for_logits(logits: Tensor, args: LogitsArgs, backend: str | None) -> ModuleType:
    """The backend module that computes the log-probs, or their gradient, from these logits."""
    return load(choose(logits.device, backend, (logits, args)))
