"""Micro-batches of TRL, and the sequences of one that go through the model where the others have no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m2po_kernels import LinearLossOutput, linear_m2po_loss

IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def valid(inputs: dict[str, Any]) -> Tensor:
    """Which tokens of the completions the policy sampled, bool [B, T]."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1) != 0


def model_inputs(inputs: dict[str, Any], rows: Tensor | None) -> dict[str, Any]:
    """What the model takes. rows: which sequences, bool [B]; None: all, as it must be with images."""
    parts = {"input_ids": ("prompt_ids", "completion_ids"), "attention_mask": ("prompt_mask", "completion_mask")}
    whole = {name: torch.cat([inputs[part] for part in pair], dim=1) for name, pair in parts.items()}
    whole |= {name: inputs[name] for name in IMAGES if inputs.get(name) is not None}
    return whole if rows is None else {name: value[rows] for name, value in whole.items()}


def spread(values: Tensor, rows: Tensor | None) -> Tensor:
    """The values of those sequences at their places among all; 0 in the others."""
    return values if rows is None else values.new_zeros(len(rows), *values.shape[1:]).index_put((rows,), values)


def loss_of_rows(hidden: Tensor, weight: Tensor, ids: Tensor, *, rows: Tensor | None, **terms: Any) -> LinearLossOutput:
    """`linear_m2po_loss` of a whole micro-batch from hidden states of those sequences, if the others have no gradient."""
    return linear_m2po_loss(spread(hidden, rows), weight, spread(ids, rows), **terms)
