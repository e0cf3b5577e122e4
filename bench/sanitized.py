"""Every kernel once, for compute-sanitizer: `compute-sanitizer --error-exitcode 1 python bench/sanitized.py BACKEND...`

Default: every backend that serves the device, eager apart.
"""

from __future__ import annotations

import sys

import torch

from bench.data import FULL_KINDS, make_full_batch
from m2po_kernels import dispatch, grpo_loss, m2po_loss, select, selective_log_softmax

# More candidates than the warps of any GPU have room for in shared memory, so that their lists go to global memory.
MANY_TOKENS = 1 << 21


def main(device: str, chosen: list[str]) -> None:
    names = [name for name in dispatch.candidates(torch.device(device)) if dispatch.why_not(name, device) is None]
    for name in names:
        if name == "eager" or (chosen and name not in chosen):
            continue
        from_log_probs(name, device)
        if hasattr(dispatch.load(name), "log_softmax"):
            from_logits(name, device)
        print(f"every kernel of {name} ran")


def from_log_probs(name: str, device: str) -> None:
    """Lengths that no block divides, candidates of every kind; forward and backward."""
    for kind in FULL_KINDS:
        batch = make_full_batch(4096, kind, device=device)
        tensors = [t.detach()[:, :3001] for t in batch.tensors()]
        select(*tensors, backend=name)
        for loss in (m2po_loss, grpo_loss):
            for reduction in ("token-mean", "none"):
                leaf = tensors[0].clone().requires_grad_()
                loss(leaf, *tensors[1:], reduction=reduction, backend=name).loss.sum().backward()

    if device != "cpu":
        select(*make_full_batch(MANY_TOKENS, "all", device=device).tensors(), backend=name)


def from_logits(name: str, device: str) -> None:
    """A vocabulary with a tail; forward and backward."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, 5003, device=device).to(dtype).requires_grad_()
        ids = torch.tensor([0, 5002, 77], device=device)
        lp, entropy = selective_log_softmax(logits, ids, return_entropy=True, entropy_grad=True, backend=name)
        (lp.sum() + entropy.sum()).backward()


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu", sys.argv[1:])
