"""The choice of a backend: by order, by argument, by environment; never by falling back from one that was named."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import random_tokens

from m2po_kernels import compiled, dispatch, m2po_loss, select
from m2po_kernels.backends import cuda, eager, native, triton
from m2po_kernels.errors import BackendUnavailable

CPU = torch.device("cpu")


def test_a_backend_that_was_to_be_built_is_there():
    """Tests of an unavailable backend are skipped. Where the build was asked for one, that must not pass unseen."""
    if os.environ.get("M2PO_BUILD") in ("cpu", "cuda"):
        assert dispatch.why_not("native", "cpu") is None
    if os.environ.get("M2PO_BUILD") == "cuda":
        assert compiled.build_record()["cuda"]


def test_eager_serves_every_device():
    for device in ("cpu", "cuda", "mps", "xpu", "meta"):
        assert dispatch.why_not("eager", device) is None
        assert "eager" in dispatch.candidates(torch.device(device))


def test_every_backend_answers_in_one_line():
    for name in dispatch.BACKENDS:
        for device in ("cpu", "cuda", "mps"):
            reason = dispatch.why_not(name, device)
            assert reason is None or (reason.strip() and "\n" not in reason)
    assert set(sum(dispatch.ORDER.values(), ())) <= set(dispatch.BACKENDS)


def test_native_says_why_it_does_not_serve_a_gpu():
    assert "cuda" in str(dispatch.why_not("native", "cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reasons of a machine without a GPU")
def test_cuda_says_what_it_waits_for(monkeypatch):
    assert "GPU" in str(dispatch.why_not("cuda", "mps"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in str(dispatch.why_not("cuda", "cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no NVIDIA GPU" in str(dispatch.why_not("cuda", "cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "load_library", lambda name: f"the extension {name} was not built: no nvcc")
    assert "no nvcc" in str(dispatch.why_not("cuda", "cuda:0"))


def test_first_available_is_chosen(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda device: None)
    monkeypatch.setattr(triton, "why_not", lambda device: None)
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    assert dispatch.choose(CPU) == "native"
    assert dispatch.choose(torch.device("cuda")) == "cuda"
    monkeypatch.setattr(cuda, "why_not", lambda device: "not today")
    assert dispatch.choose(torch.device("cuda")) == "triton"
    monkeypatch.setattr(triton, "why_not", lambda device: "not today")
    assert dispatch.choose(torch.device("cuda")) == "eager"
    monkeypatch.setattr(native, "why_not", lambda device: "not today")
    assert dispatch.choose(CPU) == "eager"


@pytest.mark.parametrize("source", ["backend", "M2PO_BACKEND"])
def test_forced_backend_that_is_unavailable_raises_its_reason(source, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda device: "no compiler was found")
    served = []
    monkeypatch.setattr(eager, "select", lambda *a: served.append(a))
    monkeypatch.setattr(eager, "policy_loss", lambda *a: served.append(a))
    tokens = random_tokens((2, 5))
    forced = {"backend": "native"} if source == "backend" else {}
    if source == "M2PO_BACKEND":
        monkeypatch.setenv("M2PO_BACKEND", "native")
    for call in (select, m2po_loss):
        with pytest.raises(BackendUnavailable, match=f"{source}='native'.*cpu.*no compiler was found"):
            call(*tokens, **forced)
    assert not served


def test_environment_forces_and_argument_wins(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda device: None)
    monkeypatch.setenv("M2PO_BACKEND", "eager")
    assert dispatch.choose(CPU) == "eager"
    assert dispatch.choose(CPU, "native") == "native"
    monkeypatch.setenv("M2PO_BACKEND", "fast")
    with pytest.raises(BackendUnavailable, match="'fast'"):
        dispatch.choose(CPU)
    monkeypatch.setenv("M2PO_BACKEND", "")
    assert dispatch.choose(CPU) == "native"


def test_named_backend_computes_the_call(device, backend, monkeypatch):
    module = dispatch.load(backend)
    calls = []
    for name in ("select", "policy_loss", "policy_loss_backward"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original, name=name: calls.append(name) or original(*a))
    tokens = random_tokens((2, 5), device=device)
    select(*tokens, backend=backend)
    m2po_loss(tokens.log_probs.requires_grad_(), *list(tokens)[1:], backend=backend).loss.backward()
    assert calls == ["select", "policy_loss", "policy_loss_backward"]


def test_backends_agree_on_a_batch_of_many_blocks(device):
    """One mask, counts and cut; the loss within the rounding of its terms."""
    tokens = random_tokens((40, 5003), device=device, seed=9)
    serving = [b for b in dispatch.candidates(torch.device(device)) if dispatch.why_not(b, device) is None]
    for tau in (0.0, 1e-4, 0.04, 0.2):
        results = [select(*tokens, m2_threshold=tau, backend=b) for b in serving]
        losses = [float(m2po_loss(*tokens, m2_threshold=tau, backend=b).loss) for b in serving]
        size = float(m2po_loss(*list(tokens)[:2], -tokens.advantages.abs(), tokens.mask, m2_threshold=100, backend="eager").loss)
        for result, loss in zip(results[1:], losses[1:], strict=True):
            assert torch.equal(result.keep, results[0].keep)
            assert torch.equal(result.metrics.counts, results[0].metrics.counts)
            assert abs(loss - losses[0]) <= 2e-6 * size
