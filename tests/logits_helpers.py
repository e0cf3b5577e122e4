"""What the tests of log-probs from logits share: one call with its gradient, and the bounds of its errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import LOW_PRECISION, SMALLEST_NORMAL
from torch import Tensor

from m2po_kernels import dispatch, selective_log_softmax
from m2po_kernels.errors import BackendUnavailable
from m2po_kernels.logits_args import LogitsArgs
from m2po_kernels.reference import logits_oracle
from m2po_kernels.reference.logits import log_softmax, scaled_logits


@dataclasses.dataclass(frozen=True)
class Result:
    """One call with its gradient, on the CPU. entropy: None where not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    grad: Tensor


def need(backend: str, logits: Tensor) -> None:
    """Skips where the backend declines logits of this dtype or layout; test_who_declines_what says which those are."""
    try:
        dispatch.choose(logits.device, backend, (logits, LogitsArgs(vocab_size=logits.shape[-1])))
    except BackendUnavailable as error:
        pytest.skip(str(error))


def run(
    logits: Tensor, ids: Tensor, grad_log_probs: Tensor | None = None, grad_entropy: Tensor | None = None, **options: Any
) -> Result:
    """Calls selective_log_softmax and backward. Default gradient: 1 for each log-prob."""
    leaf = logits.detach().requires_grad_()
    want_entropy = options.pop("return_entropy", False) or grad_entropy is not None
    out = selective_log_softmax(leaf, ids, return_entropy=want_entropy, entropy_grad=grad_entropy is not None, **options)
    lp, entropy = out if isinstance(out, tuple) else (out, None)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    assert lp.dtype == wide
    grad_log_probs = torch.ones_like(lp) if grad_log_probs is None else grad_log_probs.to(lp)
    outputs, grads = [lp], [grad_log_probs]
    if grad_entropy is not None:
        assert entropy is not None
        outputs, grads = [lp, entropy], [grad_log_probs, grad_entropy.to(lp)]
    (grad,) = torch.autograd.grad(outputs, leaf, grads)
    assert grad.dtype == logits.dtype
    assert grad.shape == logits.shape
    return Result(lp.detach().cpu(), None if entropy is None else entropy.detach().cpu(), grad.cpu())


def assert_close(got: Tensor, want: Tensor, bound: Tensor, what: str) -> None:
    """|got - want| <= bound everywhere; equal where want is not finite."""
    finite = want.isfinite()
    assert torch.equal(got[~finite].double(), want[~finite]), f"{what} differs where it is infinite"
    off = (got.double() - want).abs()[finite]
    ok = off <= bound[finite]
    assert bool(ok.all()), f"{what} off by {float((off / bound[finite]).nan_to_num(1e9).max())} times its bound"


def assert_matches_oracle(
    got: Result,
    logits: Tensor,
    ids: Tensor,
    grad_log_probs: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    **options: Any,
) -> None:
    """`got` against fp64 arithmetic on the same logits, each value within a counted number of roundings.

    u = 2^-24 is one rounding (fp64: 2^-52, as the oracle rounds as well). Counted:
      z       exact without scale, cap and temperature. Else scale and temperature rounded to fp32, one quotient, one product: 4 u
              of |z|. With a cap: it is rounded (twice used), tanh is within 12 u, and two more products: 22 u.
      exp(x)  2 ulp = 4 u of itself; a product with log2(e) and the rounding of x: 3 u |x|.
      S       the sum of exp(z - max) without one maximal term: at most V / 1024 additions in a row in a lane and 24 to join
              lanes; where lanes keep a running maximum, 8 rises (random logits: about ln of the row's length in a
              lane) of one exp each = 32; exp itself 4.
      log1p   4 ulp = 8 u of itself (a log and a quotient).
      lp      u |z_token - max| and u |lp| for the two differences, and what z and S bring: |z_token| + sum p |z| for z.
      p       exp of (z - z_token) + lp: two differences, and lp's own error, which is the same for the whole row.
      at y    expm1 2 ulp = 4 u of 1 - p, and p times lp's error.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    u = 2.0**-52 if wide == torch.float64 else 2.0**-24
    logits, ids = logits.detach().cpu(), ids.cpu()
    options = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    shift, vocab = options.get("shift", 0), options.get("vocab_size")
    n = logits.shape[-2] - shift
    g = torch.ones((*logits.shape[:-2], n)) if grad_log_probs is None else grad_log_probs.cpu()
    want = logits_oracle(
        logits, ids, grad_log_probs=g, grad_entropy=None if grad_entropy is None else grad_entropy.cpu(), **options
    )
    scaling = {k: options[k] for k in ("temperature", "logit_scale", "logit_softcap") if k in options}
    z, slope = scaled_logits(logits[..., :n, :vocab], **scaling)
    capped = options.get("logit_softcap") is not None
    r_z = 22 * u if capped else 4 * u if scaling else 0.0

    token = ids[..., shift:].long()[..., None]
    z_token, top = z.gather(-1, token), z.amax(-1, keepdim=True)
    lp, entropy = want.log_probs[..., None], want.entropy[..., None]
    log_p = log_softmax(z)
    p = log_p.exp()
    size_z = torch.where(p > 0, z.abs(), 0.0)
    d = torch.where(p > 0, top - z, 0.0)
    rest = (-(top - z)).exp().scatter(-1, z.argmax(-1, keepdim=True), 0.0).sum(-1, keepdim=True)
    additions = -(-z.shape[-1] // 1024) + 24 + 32 + 4
    err_lp = (
        r_z * (z_token.abs() + (p * size_z).sum(-1, keepdim=True))
        + u * (z_token - top).abs()
        + u * additions * rest / (1 + rest)
        + 3 * u * (p * d).sum(-1, keepdim=True)
        + 8 * u * rest.log1p()
        + 2 * u * lp.abs()
    )
    floor = 4 * SMALLEST_NORMAL[wide]
    assert_close(got.log_probs, want.log_probs, (err_lp + floor)[..., 0], "log-prob")
    # Entropy: log1p(S) + sum of p (max - z), no term negative; its derivative with respect to z is -p (log p + H).
    moved = p * torch.where(p > 0, log_p + entropy, 0.0).abs()
    err_entropy = (
        2 * u * (additions + 12) * entropy
        + 3 * u * (p * d * (1 + d)).sum(-1, keepdim=True)
        + r_z * (moved * size_z).sum(-1, keepdim=True)
    )
    if got.entropy is not None:
        assert_close(got.entropy, want.entropy, (err_entropy + floor)[..., 0], "entropy")

    log_size = torch.where(p > 0, log_p.abs(), 0.0)
    err_log_p = r_z * (size_z + z_token.abs()) + u * (torch.where(p > 0, (z - z_token).abs(), 0.0) + log_size) + err_lp
    rel_p = err_log_p + (4 + 3 * log_size) * u
    one_hot = torch.zeros_like(p).scatter_(-1, token, 1.0)
    g = g.double()[..., None]
    bound = g.abs() * (p * rel_p + 8 * u * (one_hot * (1 - p) + p))
    dz = (g * (one_hot - p)).abs()
    if grad_entropy is not None:
        ge = grad_entropy.cpu().double()[..., None]
        bound = bound + ge.abs() * (moved * (rel_p + 8 * u) + p * (err_log_p + err_entropy + 2 * u * (log_size + entropy)))
        dz = dz + ge.abs() * moved
    steepest = slope.abs() if not capped else (slope.abs() + 30 * u * _linear_slope(options)[..., None])
    bound = (bound * steepest + dz * (4 * u * slope.abs() + (steepest - slope.abs()))) * 1.01 + floor * (1 + g.abs())
    grad = want.grad[..., :n, :vocab]
    if logits.dtype in LOW_PRECISION:
        relative, smallest = LOW_PRECISION[logits.dtype]
        bound = bound * (1 + relative) + grad.abs() * relative + smallest
    assert_close(got.grad[..., :n, :vocab], grad, bound.expand(grad.shape), "gradient")
    rest_of_grad = got.grad.clone()
    rest_of_grad[..., :n, :vocab] = 0
    assert bool((rest_of_grad == 0).all()), "a row without token or a padding column has a gradient"


def _linear_slope(options: dict[str, Any]) -> Tensor:
    """|scale / temperature|: dz/dx where the soft-cap is not in the way."""
    temperature = options.get("temperature", 1.0)
    temperature = temperature.double() if isinstance(temperature, Tensor) else torch.tensor(float(temperature))
    return (options.get("logit_scale", 1.0) / temperature).abs()
