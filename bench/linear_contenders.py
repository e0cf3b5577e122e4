"""Who computes a loss from hidden states in bench.linear, on which batch, and what each must give."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m2po_kernels import linear_m2po_loss
from m2po_kernels.linear.head import add_product
from m2po_kernels.linear.plan import WORKSPACE, WORKSPACE_CPU, chunk_rows, chunks
from m2po_kernels.reference import linear_loss_oracle, linear_oracle

from .logits import DTYPES
from .peers import sort_based

NAMES = ("products", "m2po", "dense", "trl", "liger", "cce")
PACKAGES = {"trl": "trl", "liger": "liger_kernel", "cce": "cut_cross_entropy"}
LENGTH = 128  # tokens of a sequence
SPREAD = 0.075  # of log-probs around the behaviour's: 0.8 % of T have v above 0.04
STALE, STALE_BY = 4, 6.0  # tokens far above the threshold, so that every batch has some to drop
CLIP = 0.2


class Shape(NamedTuple):
    """hidden [rows, width], weight [vocab, width]; dtype: "fp32" or "bf16"."""

    rows: int
    width: int
    vocab: int
    dtype: str


@dataclass(frozen=True)
class Batch:
    """hidden [B, T, H] and weight [V, H] require gradients; ids, behavior, mask [B, T]; advantages [B], 0 for the first ones."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor


def make_batch(shape: Shape, share: float, device: str) -> Batch:
    """Logits of spread 2; `share` of the sequences have no advantage. The current log-probs are made a few rows at a time."""
    g = torch.Generator(device).manual_seed(shape.rows + shape.vocab)
    length = min(LENGTH, shape.rows)
    lead = (shape.rows // length, length)
    dtype = DTYPES[shape.dtype]
    hidden = torch.randn(*lead, shape.width, generator=g, device=device).to(dtype)
    weight = (torch.randn(shape.vocab, shape.width, generator=g, device=device) * 2 / shape.width**0.5).to(dtype)
    ids = torch.randint(shape.vocab, lead, generator=g, device=device)
    current = torch.cat([_log_probs(h, weight, i) for h, i in zip(hidden, ids, strict=True)]).view(lead)
    behavior = current + SPREAD * torch.randn(lead, generator=g, device=device)
    advantages = torch.randn(lead[0], generator=g, device=device)
    advantages[: round(share * lead[0])] = 0
    stale = behavior[-1, :STALE]
    stale.copy_(current[-1, :STALE] - STALE_BY * advantages[-1].sign())
    mask = torch.ones(lead, dtype=torch.bool, device=device)
    return Batch(hidden.requires_grad_(), weight.requires_grad_(), ids, behavior, advantages, mask)


def _log_probs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def why_absent(name: str, device: str) -> str | None:
    """None if the contender runs here, else why not."""
    if name == "cce" and device == "cpu":
        return "cut-cross-entropy's kernels run on a GPU"
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


def run(name: str, batch: Batch) -> Tensor:
    """One forward and backward of a contender; returns its loss."""
    if name == "products":
        _products(batch)
        return torch.zeros(())
    if name == "m2po":
        loss = linear_m2po_loss(batch.hidden, batch.weight, batch.ids, batch.behavior, batch.advantages, batch.mask).loss
    elif name == "liger":
        loss = _liger(batch)
    else:
        log_probs = {"dense": _dense, "trl": _trl, "cce": _cce}[name](batch)
        advantages = batch.advantages[:, None].expand_as(log_probs)
        loss = sort_based.loss(log_probs.float(), batch.behavior, advantages, batch.mask)
    loss.backward()
    return loss


def exact(name: str, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, d hidden and d weight in fp64 of what the contender computes."""
    if name == "liger":
        return _exact_grpo(batch)
    tokens = (batch.behavior, batch.advantages[:, None].expand_as(batch.behavior), batch.mask)
    loss, gradients = linear_loss_oracle(batch.hidden, batch.weight, batch.ids, *tokens)
    return torch.as_tensor(loss.loss), gradients.hidden, gradients.weight


def _products(batch: Batch) -> None:
    """The three products over the rows with an advantage, chunk by chunk as in the package, and nothing else."""
    weight = batch.weight.detach()
    hidden = batch.hidden.detach()[batch.advantages != 0].flatten(0, 1)
    limit = WORKSPACE_CPU if hidden.device.type == "cpu" else WORKSPACE
    pieces = chunks(hidden.shape[0], chunk_rows((weight.shape[0] + 2 * weight.shape[1]) * hidden.element_size(), limit))
    buffer = hidden.new_empty(max(p.stop - p.start for p in pieces), weight.shape[0])
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for piece in pieces:
        logits = torch.mm(hidden[piece], weight.T, out=buffer[: piece.stop - piece.start])
        torch.mm(logits, weight, out=d_hidden[piece])
        add_product(d_weight, logits, hidden[piece])  # the package's own, which is the fastest for the types and the device


def _dense(batch: Batch) -> Tensor:
    return _log_probs(batch.hidden, batch.weight, batch.ids)


def _trl(batch: Batch) -> Tensor:
    """As GRPOTrainer does after the model: logits, divided by the temperature, then its own function of them."""
    from trl.trainer.utils import selective_log_softmax

    temperature = 1.0
    return selective_log_softmax(F.linear(batch.hidden, batch.weight) / temperature, batch.ids)


def _liger(batch: Batch) -> Tensor:
    """Liger's fused-linear GRPO with PPO's clip, mean over the tokens; not compiled on a CPU."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=batch.hidden.is_cuda, use_ref_model=False, loss_type="bnpo", epsilon_low=CLIP, epsilon_high=CLIP
    )
    loss, _ = fused(
        batch.hidden, batch.weight, batch.ids, batch.mask.float(), batch.advantages, old_per_token_logps=batch.behavior
    )
    return loss


def _cce(batch: Batch) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(batch.hidden, batch.weight, batch.ids, reduction="none")


def _exact_grpo(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    log_probs = linear_oracle(batch.hidden, batch.weight, batch.ids).log_probs.requires_grad_()
    ratio = (log_probs - batch.behavior.double()).exp()
    advantages = batch.advantages.double()[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    (flow,) = torch.autograd.grad(loss, log_probs)
    gradients = linear_oracle(batch.hidden, batch.weight, batch.ids, grad_log_probs=flow)
    return loss.detach(), gradients.hidden, gradients.weight
