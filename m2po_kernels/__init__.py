"""Fused M2PO kernels: exact second-moment token selection and the policy loss. See README.md and docs/semantics.md."""

from ._version import __version__
from .accumulate import M2Accumulator
from .errors import M2POError
from .linear import LinearLossOutput, linear_log_probs, linear_m2po_loss
from .logits import m2po_loss_from_logits, selective_log_softmax
from .loss import grpo_loss, m2po_loss
from .loss_scale import loss_scale, megatron_loss_scale
from .parts import Part
from .results import LossOutput, Metrics, Selection
from .selection import select

__all__ = [
    "LinearLossOutput",
    "LossOutput",
    "M2Accumulator",
    "M2POError",
    "Metrics",
    "Part",
    "Selection",
    "__version__",
    "grpo_loss",
    "linear_log_probs",
    "linear_m2po_loss",
    "loss_scale",
    "m2po_loss",
    "m2po_loss_from_logits",
    "megatron_loss_scale",
    "select",
    "selective_log_softmax",
]
