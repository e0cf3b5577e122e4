"""The gradient of an optimizer step of AReaL in fp64."""

from __future__ import annotations

from typing import Any

import paper


def gradient(model: Any, weights: paper.Tensors, batches: list[paper.Tensors], **options: Any) -> paper.Tensors:
    """batches: the mini-batch of each rank, [B, T]; options as in paper.loss."""
    model = paper.in_fp64(model, weights)
    tokens = []
    for batch in batches:
        ids, behavior = batch["input_ids"], batch["logprobs"]
        log_probs = model(input_ids=ids).logits.log_softmax(-1).gather(-1, ids.roll(-1, -1)[..., None])[..., 0]
        mask = batch["loss_mask"].bool() & ~behavior.isnan()
        tokens.append(paper.Tokens(log_probs[mask], behavior[mask], batch["advantages"][mask]))
    paper.loss(tokens, **options).backward()
    return {name: p.grad for name, p in model.named_parameters()}
