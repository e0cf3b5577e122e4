"""2^24 + 3 tokens: more than one block, thread and digit, and a length that no vector divides."""

from __future__ import annotations

import torch
from helpers import Tokens

from m2po_kernels import m2po_loss
from m2po_kernels.reference import log_ratio, select_sorted, trust_region

N = 2**24 + 3
PIECE = 2**21


def test_mask_gradient_and_loss(device, backend):
    """Against the vectorised oracle. A quarter of the tokens are valid with an advantage; one d in 64 of them is a candidate."""
    g = torch.Generator().manual_seed(0)
    d = torch.randn(N, generator=g).mul_(0.08)
    d[::64] *= 5
    d[-1] = 0.75  # the last token, in the remainder of every block, must go
    behavior = torch.full((1,), -2.0).expand(N)
    lp = d.add_(-2.0)
    advantages = torch.randint(-1, 2, (N,), generator=g, dtype=torch.int8).float()
    advantages[-1] = 1.0
    mask = torch.randint(0, 4, (N,), generator=g, dtype=torch.uint8).clamp_(max=1)
    mask[-1] = 1
    tau = 0.0045

    d, v = log_ratio(lp, behavior)
    valid = mask != 0
    region = trust_region(d, advantages, valid)
    keep = select_sorted(v, region, valid, tau)
    n_valid, n_dropped = int(valid.sum()), int((valid & ~keep).sum())
    assert 1000 < n_dropped < n_valid // 10
    assert not keep[-1]

    leaf = lp.to(device).requires_grad_()
    rest = Tokens(lp, behavior, advantages, mask).to(device)
    out = m2po_loss(leaf, *list(rest)[1:], m2_threshold=tau, backend=backend)
    out.loss.backward()
    assert leaf.grad is not None
    grad = leaf.grad.cpu()
    assert int(out.metrics.valid_tokens) == n_valid
    assert int(out.metrics.trust_region_tokens) == int(region.sum())
    assert int(out.metrics.dropped_tokens) == n_dropped

    loss = size = 0.0
    for start in range(0, N, PIECE):
        piece = slice(start, start + PIECE)
        want = torch.where(keep[piece], -d[piece].double().exp() * advantages[piece].double() / n_valid, 0.0)
        assert bool(((grad[piece] - want).abs() <= 1e-6 * want.abs()).all())
        assert torch.equal(grad[piece] != 0, keep[piece] & (advantages[piece] != 0))
        loss, size = loss + float(want.sum()), size + float(want.abs().sum())
    assert abs(float(out.loss.detach()) - loss) <= 1e-6 * size
