"""Which backend computes a call, and why. One `why_not` serves the choice, the errors, the test skips and `m2po doctor`."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from .errors import BackendUnavailable
from .rule import Batch, Rule

# For each device type the backends in order of choice; "*" is every other device.
ORDER = {"cpu": ("native", "eager"), "*": ("eager",)}
BACKENDS = ("eager", "native")


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


def choose(device: torch.device, backend: str | None = None) -> str:
    """The name of the backend that serves tensors on `device`: `backend`, else $M2PO_BACKEND, else the first available in ORDER.

    A forced backend that cannot serve raises BackendUnavailable with its reason; it never falls back.
    """
    forced = backend or os.environ.get("M2PO_BACKEND")
    if forced:
        reason = why_not(forced, device)
        if reason:
            source = "backend" if backend else "M2PO_BACKEND"
            raise BackendUnavailable(f"{source}={forced!r} cannot serve tensors on {device}: {reason}")
        return forced
    return next(name for name in candidates(device) if why_not(name, device) is None)


def backend_for(batch: Batch, rule: Rule) -> ModuleType:
    """The backend module that computes this call."""
    return load(choose(batch.log_probs.device, rule.backend))
