"""M2PO over a whole batch in fp64, written from the paper and from nothing of m2po_kernels. What adapters are compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Tokens(NamedTuple):
    """The valid tokens of one micro-batch, each [N]; only log_probs has a gradient."""

    log_probs: Tensor
    behavior: Tensor
    advantages: Tensor
    reference: Tensor | None = None


def kept(d: Tensor, advantages: Tensor, threshold: float, *, scope: str = "quadrants") -> Tensor:
    """Algorithm 1: drops the largest d^2 of the trust region ("all": of all tokens) while their mean is above the threshold."""
    in_region = ((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0)) | (scope == "all")
    v = (d.detach().double() ** 2).tolist()
    region = sorted(in_region.nonzero().flatten().tolist(), key=lambda i: v[i])
    while region and math.fsum(v[i] for i in region) / len(region) > threshold:
        region.pop()
    keep = ~in_region
    keep[region] = True
    return keep


def loss(
    micro_batches: Sequence[Tokens],
    *,
    per_micro_batch: bool = False,
    threshold: float = 0.04,
    kl_coef: float = 0.0,
    ratio_cap: float = math.inf,
    scope: str = "quadrants",
) -> Tensor:
    """Of all of them as one batch. per_micro_batch: the wrong way, a selection for each of them, as a control."""
    x, b, a = (torch.cat([m[i] for m in micro_batches]).double() for i in range(3))
    if per_micro_batch:
        parts = ((m.log_probs.double() - m.behavior.double(), m.advantages) for m in micro_batches)
        keep = torch.cat([kept(*part, threshold, scope=scope) for part in parts])
    else:
        keep = kept(x - b, a, threshold, scope=scope)
    ratio = (x - b).exp()
    ratio = torch.where((a < 0) & (ratio > ratio_cap), ratio_cap, ratio)
    total = -(ratio * a)[keep].sum()
    if kl_coef:
        q = torch.cat([m.reference for m in micro_batches if m.reference is not None]).double() - x
        total = total + kl_coef * (q.exp() - q - 1).sum()
    return total / len(x)


def in_fp64(model: Any, weights: Tensors) -> Any:
    """A copy of the model that computes in fp64, with these weights."""
    model = copy.deepcopy(model).double().train()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return model


def difference(one: Tensors, other: Tensors) -> float:
    """Relative, in the 2-norm of all parameters together."""
    assert one.keys() == other.keys()
    a = torch.cat([one[name].double().flatten() for name in one])
    b = torch.cat([other[name].double().flatten() for name in one])
    return ((a - b).norm() / b.norm()).item()
