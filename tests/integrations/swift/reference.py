"""The gradient of an optimizer step of ms-swift in fp64."""

from __future__ import annotations

from typing import Any

import paper


def gradient(
    model: Any, weights: paper.Tensors, micro_batches: list[dict[str, Any]], *, overlong_filter: bool = False, **options: Any
) -> paper.Tensors:
    """micro_batches as job.py notes them; options as in paper.loss."""
    model = paper.in_fp64(model, weights)
    tokens = []
    for batch in micro_batches:
        behavior, mask = batch["rollout_per_token_logps"], batch["completion_mask"].bool()
        if overlong_filter:
            mask = mask & ~batch["truncated_mask"][:, None]
        mask = mask & ~behavior.isnan()
        ids, length = batch["input_ids"], mask.shape[1]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, -length - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]
        reference = batch["ref_per_token_logps"]
        tokens.append(
            paper.Tokens(*(None if t is None else t[mask] for t in (log_probs, behavior, batch["advantages"], reference)))
        )
    paper.loss(tokens, **options).backward()
    return {name: p.grad for name, p in model.named_parameters()}
