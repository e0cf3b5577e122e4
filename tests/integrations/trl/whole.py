"""M2PO over a whole optimizer batch in fp64, written down plainly; it shares no code with the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny import TAU, gradient
from torch import Tensor


class Whole(NamedTuple):
    """gradient: in every parameter, flat. dropped: how many tokens were."""

    loss: float
    gradient: Tensor
    dropped: int


def whole_batch(
    policy: torch.nn.Module,
    micro_batches: list[dict[str, Any]],
    *,
    temperature: float = 1.0,
    beta: float = 0.0,
    scope: str = "quadrants",
    per_micro_batch: bool = False,
) -> Whole:
    """per_micro_batch: select over each micro-batch alone, which is another algorithm."""
    exact = type(policy)(policy.config)
    exact.load_state_dict(policy.state_dict())
    exact.double()
    tokens = [_tokens(exact, inputs, temperature) for inputs in micro_batches]
    selected_together = [[part] for part in tokens] if per_micro_batch else [tokens]
    kept = [
        _algorithm1(torch.cat([d for d, *_ in group]), torch.cat([a for _, a, _ in group]), scope) for group in selected_together
    ]
    d, advantages, kl = (torch.cat(column) for column in zip(*tokens, strict=True))
    keep = torch.cat(kept)
    loss = (beta * kl - keep * d.exp() * advantages).sum() / len(d)
    loss.backward()
    return Whole(float(loss.detach()), gradient(exact), int((~keep).sum()))


def _tokens(exact: torch.nn.Module, inputs: dict[str, Any], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratio, advantage and KL term of each token that counts."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    n = inputs["completion_ids"].shape[1]
    logits = exact(input_ids=ids, attention_mask=attention).logits[:, -n - 1 : -1] / temperature
    log_probs = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    behavior = inputs["sampling_per_token_logps"].double()
    counts = (inputs["completion_mask"] == 1) & ~behavior.isnan()
    if "tool_mask" in inputs:
        counts &= inputs["tool_mask"] == 1
    q = inputs["ref_per_token_logps"].double() - log_probs if "ref_per_token_logps" in inputs else 0 * log_probs
    advantages = inputs["advantages"].double()[:, None].expand_as(log_probs)
    return (log_probs - behavior)[counts], advantages[counts], (q.exp() - q - 1)[counts]


def _algorithm1(d: Tensor, advantages: Tensor, scope: str) -> Tensor:
    """M: while the mean of d^2 over the trust region exceeds tau, its largest goes."""
    keep = torch.ones_like(d, dtype=torch.bool)
    pairs = enumerate(zip(d.tolist(), advantages.tolist(), strict=True))
    v = {i: x * x for i, (x, a) in pairs if scope == "all" or x * a > 0}
    while v and sum(v.values()) / len(v) > TAU:
        largest = max(v, key=lambda i: v[i])
        keep[largest] = False
        del v[largest]
    return keep
