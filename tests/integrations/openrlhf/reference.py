"""The gradient of an optimizer step of OpenRLHF in fp64."""

from __future__ import annotations

from typing import Any

import paper


def gradient(model: Any, weights: paper.Tensors, micro_batches: list[paper.Tensors], **options: Any) -> paper.Tensors:
    """micro_batches: fields of Experience; options as in paper.loss."""
    model = paper.in_fp64(model, weights)
    tokens = []
    for batch in micro_batches:
        ids, behavior = batch["sequences"], batch["rollout_log_probs"]
        logits = model.model(ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        mask = batch["action_mask"].bool() & ~behavior.isnan()
        tokens.append(paper.Tokens(log_probs[mask], behavior[mask], batch["advantages"][mask]))
    paper.loss(tokens, **options).backward()
    return {name: p.grad for name, p in model.named_parameters()}
