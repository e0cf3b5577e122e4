"""One update of a real model in bench.real_model: who makes its gradients, and the gate that they are equal."""

from __future__ import annotations

import copy
import importlib.util
from types import MethodType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m2po_kernels import linear_m2po_loss, m2po_loss
from m2po_kernels.cli.real_model.model import LanguageModel, completion_hidden
from m2po_kernels.cli.real_model.recording import Rollouts
from m2po_kernels.reference import m2po_oracle

from .data import M2_THRESHOLD
from .gate import GateRed

# plain comes first: the others' errors are held against its own.
NAMES = ("plain", "trl", "m2po")
UNIT = 2.0**-24  # one rounding in fp32


def why_absent(name: str) -> str | None:
    """None if the contender runs here, else why not."""
    return "trl is not installed" if name == "trl" and importlib.util.find_spec("trl") is None else None


def head_loss(name: str, hidden: Tensor, head: Tensor, rollouts: Rollouts) -> Tensor:
    """The loss from the hidden states [B, T, H] before the completions' tokens. The contenders differ in the log-probs alone."""
    ids, mask = rollouts.sequences.token_ids, rollouts.sequences.mask
    inputs = (rollouts.behavior_log_probs, rollouts.advantages, mask)
    if name == "m2po":
        return linear_m2po_loss(hidden, head, ids, *inputs, m2_threshold=M2_THRESHOLD).loss
    logits = F.linear(hidden, head)
    if name == "trl":
        from trl.trainer.utils import selective_log_softmax

        temperature = 1.0  # GRPOTrainer divides whatever it is
        log_probs = selective_log_softmax(logits / temperature, ids)
    else:
        log_probs = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return m2po_loss(log_probs, *inputs, m2_threshold=M2_THRESHOLD).loss


def step(name: str, loaded: LanguageModel, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(loss, hidden): forward and backward of the whole model, gradients in the parameters' .grad and in hidden's."""
    hidden = completion_hidden(loaded.model, rollouts.sequences)
    hidden.retain_grad()
    loss = head_loss(name, hidden, loaded.head, rollouts)
    loss.backward()
    return loss.detach(), hidden


class Exact(NamedTuple):
    """The step in fp64. rows: which rows of hidden have a gradient, bool [B, T]; largest: of all |log-prob|."""

    loss: float
    rows: Tensor
    gradients: dict[str, Tensor]
    largest: float


def exact_step(loaded: LanguageModel, rollouts: Rollouts) -> Exact:
    """The same weights in fp64 throughout, and the oracle's selection and loss."""
    model = copy.deepcopy(loaded.model).double()
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":  # its own forward goes through fp32
            module.forward = MethodType(_norm, module)
    hidden = completion_hidden(model, rollouts.sequences)
    ids, mask = rollouts.sequences.token_ids, rollouts.sequences.mask
    logits = F.linear(hidden, model.get_output_embeddings().weight)
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    oracle = m2po_oracle(
        log_probs.detach(), rollouts.behavior_log_probs, rollouts.advantages, mask, m2_threshold=M2_THRESHOLD
    )  # fmt: skip
    log_probs.backward(oracle.grad.to(log_probs.device))
    rows = oracle.keep.to(mask.device) & (rollouts.advantages != 0)[:, None]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Exact(float(oracle.loss), rows, gradients, float(log_probs.detach()[mask].abs().max()))


def _norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def check(names: list[str], loaded: LanguageModel, rollouts: Rollouts) -> dict[str, dict[str, float]]:
    """Raises GateRed unless all make the fp64 step; returns their losses and errors.

    Of hidden exactly those rows have a gradient that the oracle keeps: the selection is equal. The error of a parameter's
    gradient, in its largest element, is at most twice that of `plain`, plus a floor. Twice, because the layers below the head
    compute the same with the same roundings, and the head's come in another order of sums, neither the better one. The
    floor, relative to the tensor's largest value, is for where plain comes closer than its arithmetic promises: 4 roundings
    (the product, the sum over tokens, the log-prob and the coefficient behind it), and p = exp(x) of an x as large as a
    log-prob, which fp32 rounds in four places (logit, maximum, difference to the token, sum with its log-prob), each worth
    2^-24 |x| of p. The loss has the same floor, relative to 1: ratios are exp of such differences, advantages of size 1.
    """
    want = exact_step(loaded, rollouts)
    floor = 4 * UNIT + 4 * want.largest * UNIT
    found: dict[str, dict[str, float]] = {}
    theirs: dict[str, float] = {}
    for name in names:
        loaded.model.zero_grad(set_to_none=True)
        loss, hidden = step(name, loaded, rollouts)
        assert hidden.grad is not None
        wrong = int(((hidden.grad != 0).any(-1) != want.rows).sum())
        if wrong:
            raise GateRed(f"{name}: {wrong} tokens are kept that the oracle drops, or dropped that it keeps; expected none")
        error = abs(float(loss) - want.loss)
        bound = 2 * found["plain"]["loss_error"] + floor if found else float("inf")
        if not error <= bound:
            raise GateRed(f"{name}: loss {float(loss)}, in fp64 {want.loss}; expected within {bound}")
        worst = 0.0
        for parameter, p in loaded.model.named_parameters():
            exact = want.gradients.get(parameter)
            if exact is None or p.grad is None:
                raise GateRed(f"{name}: {parameter} has a gradient in only one of fp32 and fp64")
            size, off = float(exact.abs().max()), float((p.grad.double() - exact).abs().max())
            if name == "plain":
                theirs[parameter] = off
            if not off <= 2 * theirs[parameter] + floor * size:
                raise GateRed(f"{name}: d {parameter} is off by {off}, plain by {theirs[parameter]}; largest value {size}")
            worst = max(worst, off / size if size else 0.0)
        if name == "plain" and not worst < 1e-2:
            raise GateRed(f"plain: a gradient is off by {worst} of its largest value; no yardstick for the others")
        found[name] = {"loss": float(loss), "loss_error": error, "gradient_error": worst}
    loaded.model.zero_grad(set_to_none=True)
    return found
