"""The gradient of M2PO over a whole batch in fp64, written from the paper and from nothing of m2po_kernels."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

Gradient = dict[str, Tensor]


def kept(d: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Algorithm 1 on the valid tokens of a batch: drops the largest d^2 of the trust region until their mean is at most threshold."""
    region = (((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0))).nonzero().flatten().tolist()
    v = (d.double() ** 2).tolist()
    region.sort(key=lambda i: v[i])
    while region and math.fsum(v[i] for i in region) / len(region) > threshold:
        region.pop()
    keep = ~(((advantages > 0) & (d > 0)) | ((advantages < 0) & (d < 0)))
    keep[region] = True
    return keep


def gradient(
    model: Any,
    weights: dict[str, Tensor],
    micro_batches: list[dict[str, Any]],
    *,
    per_micro_batch: bool = False,
    threshold: float = 0.04,
    kl_coef: float = 0.0,
    ratio_cap: float = math.inf,
    overlong_filter: bool = False,
) -> Gradient:
    """per_micro_batch: the wrong way, a selection for each micro-batch, as a control."""
    model = copy.deepcopy(model).double().train()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    rows = []
    for batch in micro_batches:
        behavior, mask = batch["rollout_per_token_logps"], batch["completion_mask"].bool()
        if overlong_filter:
            mask = mask & ~batch["truncated_mask"][:, None]
        mask = mask & ~behavior.isnan()
        ids, length = batch["input_ids"], mask.shape[1]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, -length - 1 : -1]
        log_probs = logits.double().log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]
        reference = batch["ref_per_token_logps"]
        rows.append([t if t is None else t[mask] for t in (log_probs, behavior, batch["advantages"], reference)])
    keep = [kept(x.detach() - b, a, threshold) for x, b, a, _ in rows]
    x, b, a = (torch.cat([row[i] for row in rows]).double() for i in range(3))
    if not per_micro_batch:
        keep = [kept(x.detach() - b, a, threshold)]
    ratio = (x - b).exp()
    ratio = torch.where((a < 0) & (ratio > ratio_cap), ratio_cap, ratio)
    loss = -(ratio * a)[torch.cat(keep)].sum()
    if kl_coef:
        q = torch.cat([row[3] for row in rows]).double() - x
        loss = loss + kl_coef * (q.exp() - q - 1).sum()
    (loss / len(x)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def difference(one: Gradient, other: Gradient) -> float:
    """Relative, in the 2-norm of all parameters together."""
    assert one.keys() == other.keys()
    a = torch.cat([one[name].double().flatten() for name in one])
    b = torch.cat([other[name].double().flatten() for name in one])
    return ((a - b).norm() / b.norm()).item()
