"""The gradient of M2PO over a whole batch in fp64, written from the paper and from nothing of m2po_kernels."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

Gradient = dict[str, Tensor]


def kept(d: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Algorithm 1 on the valid tokens of a batch: drops the largest d^2 of the trust region while their mean is above threshold."""
    in_region = ((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0))
    v = (d.double() ** 2).tolist()
    region = sorted(in_region.nonzero().flatten().tolist(), key=lambda i: v[i])
    while region and math.fsum(v[i] for i in region) / len(region) > threshold:
        region.pop()
    keep = ~in_region
    keep[region] = True
    return keep


def gradient(
    model: Any,
    weights: dict[str, Tensor],
    batches: list[dict[str, Tensor]],
    *,
    per_batch: bool = False,
    threshold: float = 0.04,
    ratio_cap: float = math.inf,
) -> Gradient:
    """batches: [B, T], as AReaL trains on them. per_batch: the wrong way, a selection for each of them, as a control."""
    model = copy.deepcopy(model).double().train()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    rows = []
    for batch in batches:
        ids, behavior = batch["input_ids"], batch["logprobs"]
        logits = model(input_ids=ids).logits.log_softmax(-1)
        log_probs = logits.gather(-1, ids.roll(-1, -1)[..., None])[..., 0]
        mask = batch["loss_mask"].bool() & ~behavior.isnan()
        rows.append((log_probs[mask], behavior[mask].double(), batch["advantages"][mask].double()))
    keep = [kept(x.detach() - b, a, threshold) for x, b, a in rows]
    x, b, a = (torch.cat(column) for column in zip(*rows, strict=True))
    if not per_batch:
        keep = [kept(x.detach() - b, a, threshold)]
    ratio = (x - b).exp()
    ratio = torch.where((a < 0) & (ratio > ratio_cap), ratio_cap, ratio)
    (-(ratio * a)[torch.cat(keep)].sum() / len(x)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def difference(one: Gradient, other: Gradient) -> float:
    """Relative, in the 2-norm of all parameters together."""
    assert one.keys() == other.keys()
    a = torch.cat([one[name].double().flatten() for name in one])
    b = torch.cat([other[name].double().flatten() for name in one])
    return ((a - b).norm() / b.norm()).item()
