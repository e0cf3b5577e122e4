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
    """The step in fp64. rows: which rows of hidden have a gradient, bool [B, T]; hidden: d hidden; largest: of all |log-prob|."""

    loss: float
    rows: Tensor
    hidden: Tensor
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
    hidden.retain_grad()
    ids, mask = rollouts.sequences.token_ids, rollouts.sequences.mask
    logits = F.linear(hidden, model.get_output_embeddings().weight)
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    oracle = m2po_oracle(
        log_probs.detach(), rollouts.behavior_log_probs, rollouts.advantages, mask, m2_threshold=M2_THRESHOLD
    )  # fmt: skip
    log_probs.backward(oracle.grad.to(log_probs.device))
    rows = oracle.keep.to(mask.device) & (rollouts.advantages != 0)[:, None]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert hidden.grad is not None
    return Exact(float(oracle.loss), rows, hidden.grad, gradients, float(log_probs.detach()[mask].abs().max()))


def _norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def check(names: list[str], loaded: LanguageModel, rollouts: Rollouts) -> dict[str, dict[str, float]]:
    """Raises GateRed unless all make the fp64 step; returns their losses and errors.

    Of hidden exactly those rows have a gradient that the oracle keeps: the selection is equal. d hidden and d head are what a
    contender makes itself: their error, in the largest element, is at most twice that of `plain`, plus a floor. Twice, because
    the sums have another order, neither the better one. The floor, relative to the largest value, is for where plain
    comes closer than its arithmetic promises: 4 roundings (the product, the sum over tokens, the log-prob and the coefficient
    behind it), and p = exp(x) of an x as large as a log-prob, which fp32 rounds in four places (logit, maximum, difference to
    the token, sum with its log-prob), each worth 2^-24 |x| of p. The loss has the same floor, relative to 1: ratios are exp of
    such differences, advantages of size 1.

    All other gradients are what the layers make of d hidden, the same code for everyone. Its roundings go through up to 30
    layers, so one parameter's error is a draw of noise, and among hundreds of parameters one draw is more than twice another.
    So the relative errors, |g - g64| / |g64| in the 2-norm, are held together: their root mean square, again at most twice
    plain's plus the floor.
    """
    want = exact_step(loaded, rollouts)
    floor = 4 * UNIT + 4 * want.largest * UNIT
    found: dict[str, dict[str, float]] = {}
    for name in names:
        loaded.model.zero_grad(set_to_none=True)
        loss, hidden = step(name, loaded, rollouts)
        assert hidden.grad is not None
        wrong = int(((hidden.grad != 0).any(-1) != want.rows).sum())
        if wrong:
            raise GateRed(f"{name}: {wrong} tokens are kept that the oracle drops, or dropped that it keeps; expected none")
        found[name] = {
            "loss": float(loss),
            "loss_error": abs(float(loss) - want.loss),
            "hidden_error": _largest(hidden.grad, want.hidden),
            "head_error": max(_largest(p.grad, want.gradients[key]) for key, p in _of_head(loaded)),
            "gradient_error": _root_mean_square(loaded, want, name),
        }
        for key, error in found[name].items():
            bound = 2 * found["plain"][key] + floor
            if key != "loss" and not error <= bound:
                raise GateRed(f"{name}: {key} is {error}; expected at most {bound}, twice that of plain and a floor of {floor}")
    if not found["plain"]["gradient_error"] < 1e-2:
        raise GateRed(f"plain is off by {found['plain']['gradient_error']} itself: no yardstick for the others")
    loaded.model.zero_grad(set_to_none=True)
    return found


def _largest(got: Tensor, want: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((got.double() - want).abs().max() / want.abs().max())


def _of_head(loaded: LanguageModel) -> list[tuple[str, nn.Parameter]]:
    """The head by its name among the parameters, which may be that of the embedding."""
    return [(name, p) for name, p in loaded.model.named_parameters() if p is loaded.head]


def _root_mean_square(loaded: LanguageModel, want: Exact, name: str) -> float:
    """Of all parameters' relative errors."""
    squares = []
    for parameter, p in loaded.model.named_parameters():
        exact = want.gradients.get(parameter)
        if exact is None or p.grad is None:
            raise GateRed(f"{name}: {parameter} has a gradient in only one of fp32 and fp64")
        if bool(exact.any()):
            squares.append(float((p.grad.double() - exact).square().sum() / exact.square().sum()))
    return (sum(squares) / len(squares)) ** 0.5
