"""What the tests of the functions from hidden states share: cases, the dense way in torch, and the comparison with fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m2po_kernels import m2po_loss
from m2po_kernels.reference.linear import LinearOracle

PARTS = ("hidden", "weight", "bias", "lora_a", "lora_b")
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one call. lead: the leading shape of hidden."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    lora_scale: float = 1.0

    @property
    def head(self) -> dict[str, Any]:
        """As the functions take the optional ones."""
        given = {name: getattr(self, name) for name in ("bias", "lora_a", "lora_b") if getattr(self, name) is not None}
        return given | ({"lora_scale": self.lora_scale} if self.lora_a is not None else {})

    def leaves(self) -> Case:
        """The same with tensors that require gradients."""
        given = {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}
        return dataclasses.replace(self, **{name: t.detach().clone().requires_grad_() for name, t in given.items()})

    def parameters(self) -> dict[str, Tensor]:
        """Those that require a gradient."""
        given = {name: getattr(self, name) for name in PARTS}
        return {name: t for name, t in given.items() if t is not None and t.requires_grad}


def make_case(
    lead: tuple[int, ...] = (3, 11),
    width: int = 24,
    vocab: int = 157,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    hidden_dtype: torch.dtype | None = None,
    bias: bool = False,
    lora: int = 0,
) -> Case:
    """Hidden states and a head whose logits have a spread of about 2."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*lead, width, generator=g)
    weight = torch.randn(vocab, width, generator=g) * 2 / width**0.5
    ids = torch.randint(vocab, lead, generator=g)
    return Case(
        hidden.to(hidden_dtype or dtype),
        weight.to(dtype),
        ids,
        torch.randn(vocab, generator=g).to(dtype) if bias else None,
        torch.randn(lora, width, generator=g).to(dtype) / 4 if lora else None,
        torch.randn(vocab, lora, generator=g).to(dtype) / 4 if lora else None,
        0.5,
    )


def loss_tensors(case: Case, *, seed: int = 1, spread: float = 0.3, **scaling: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(behavior_log_probs, advantages, mask) of a batch with tokens of all kinds: without advantage, invalid, dropped, kept."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        lp = dense_log_probs(case, **scaling)[0].float()
    behavior = lp + torch.randn(lp.shape, generator=g) * spread
    advantages = torch.randn(lp.shape, generator=g) * torch.randint(0, 3, lp.shape, generator=g).clamp(max=1)
    return behavior, advantages, torch.rand(lp.shape, generator=g) < 0.8


def dense_log_probs(case: Case, **scaling: Any) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) as a trainer writes them, all [tokens, vocab] logits at once, in the dtype of the case."""
    dtype = torch.promote_types(case.hidden.dtype, case.weight.dtype)
    hidden, weight = case.hidden.to(dtype), case.weight.to(dtype)
    logits = F.linear(hidden, weight, None if case.bias is None else case.bias.to(dtype))
    if case.lora_a is not None and case.lora_b is not None:
        logits = logits + F.linear(F.linear(hidden, case.lora_a.to(dtype)), case.lora_b.to(dtype)) * case.lora_scale
    x = logits.to(torch.float64 if dtype == torch.float64 else torch.float32)[..., : scaling.get("vocab_size")]
    x = x * scaling.get("logit_scale", 1.0)
    cap = scaling.get("logit_softcap")
    x = x if cap is None else cap * torch.tanh(x / cap)
    temperature = scaling.get("temperature", 1.0)
    x = x / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    log_p = x.log_softmax(-1)
    return log_p.gather(-1, case.token_ids.long()[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def dense_loss(case: Case, tokens: tuple[Tensor, Tensor, Tensor], scaling: dict[str, Any], **options: Any):
    """m2po_loss of the dense log-probs."""
    return m2po_loss(dense_log_probs(case, **scaling)[0], *tokens, **options)


def gradients(case: Case, *outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """d of the outputs, each given with what flows into it, with respect to the case's parameters."""
    names, tensors = zip(*case.parameters().items(), strict=True)
    results, flows = zip(*outputs, strict=True)
    return dict(zip(names, torch.autograd.grad(results, tensors, flows, allow_unused=True), strict=True))


def assert_close_as_torch(got: Tensor, torch_way: Tensor, want: Tensor, what: str, log_probs: Tensor | None = None) -> None:
    """The largest error is at most twice that of the dense way in the same dtype, plus a floor.

    Twice, because the order of the sums is another: neither is the better one. The floor, relative to the largest value, is for
    cases in which the dense way happens to come closer than its arithmetic promises. Counted: four roundings in the dtype of the
    result (the product's, the scaled result's, and one each for the log-prob and the coefficient behind it); and p = exp(x) of
    an x as large as a log-prob, which fp32 rounds in four places (scale, temperature, difference to the token, sum with its
    log-prob), each worth 2^-24 |x| of p.
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == torch_way.dtype, (got.dtype, torch_way.dtype)
    assert bool(got.isfinite().all()), what
    if not got.numel():
        return
    error, theirs = (float((t.double() - want).abs().max()) for t in (got, torch_way))
    size = 0.0 if log_probs is None or not log_probs.numel() else float(log_probs.abs().max())
    within = HALF_ULP[torch.float64 if torch_way.dtype == torch.float64 else torch.float32]
    floor = (4 * HALF_ULP[got.dtype] + 4 * size * within) * float(want.abs().max())
    assert error <= 2 * theirs + floor, f"{what}: off by {error}, dense torch by {theirs}, floor {floor}"


def assert_gradients(got: dict[str, Tensor], torch_way: dict[str, Tensor], want: LinearOracle) -> None:
    """Every gradient as close to fp64 as the dense way's."""
    assert set(got) == set(torch_way)
    for name, grad in got.items():
        assert_close_as_torch(grad, torch_way[name], getattr(want, name), f"d {name}", want.log_probs)


def workspace_for(rows: int, case: Case) -> int:
    """max_workspace_bytes that holds exactly `rows` rows."""
    size = torch.promote_types(case.hidden.dtype, case.weight.dtype).itemsize
    return rows * (case.weight.shape[0] + 2 * case.weight.shape[1]) * size
