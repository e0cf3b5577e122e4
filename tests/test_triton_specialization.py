"""A new length or batch shape compiles nothing: the key under which Triton keeps a compiled kernel stays as it is.

Without a GPU: the arguments of each launch go through the binder that Triton itself makes for sm_90. On a GPU test_gpu.py counts.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers import Tokens, random_tokens

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from m2po_kernels.backends import triton as backend  # noqa: E402
from m2po_kernels.backends.triton import forward, logits, policy  # noqa: E402
from m2po_kernels.inputs import check_batch  # noqa: E402
from m2po_kernels.logits_args import LogitsArgs  # noqa: E402
from m2po_kernels.rule import Rule  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing is compiled here")

LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 1024, 4097, 1 << 16)
SHAPES = ((1, 16), (16, 1), (1, 1), (3, 7), (16, 64), (64, 257))


class Recorder:
    """In place of a kernel: keeps the key of each launch and runs nothing."""

    def __init__(self, kernel) -> None:
        self.kernel, self.keys = kernel, set()
        self.bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    def __getitem__(self, grid):
        def launch(*args, **kwargs) -> None:
            _, specialization, options = self.bind(*args, **kwargs)
            self.keys.add((tuple(map(str, specialization)), str(options)))

        return launch


@pytest.fixture
def recorded(monkeypatch):
    """Replaces the kernel `name` of a module; returns its Recorder."""

    def replace(module, name: str) -> Recorder:
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
        return recorder

    return replace


def differing(keys) -> list:
    first, *others = keys
    return [(i, a, b) for other in others for i, (a, b) in enumerate(zip(first[0], other[0], strict=True)) if a != b]


def run_policy(tokens: Tokens, rule: Rule) -> None:
    batch, _ = check_batch(*tokens)
    loss, scales, at, _, _ = backend.policy_loss(batch, rule)
    backend.policy_loss_backward(torch.ones_like(loss), scales, at, batch, rule, torch.empty_like(batch.log_probs))
    backend.select(batch, rule)


@pytest.mark.parametrize("rule", [Rule(), Rule(per_token=True, normalizer="one"), Rule(rule="clip", ratio_cap=3.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_policy_kernels(rule, dtype, recorded):
    kernels = recorded(forward, "forward_kernel"), recorded(policy, "backward_kernel")
    for n in LENGTHS:
        run_policy(random_tokens((n,), dtype=dtype), rule)
    for shape in SHAPES:
        run_policy(random_tokens(shape, dtype=dtype), rule)
    forward_keys, backward_keys = (k.keys for k in kernels)
    assert len(forward_keys) == 2, differing(forward_keys)  # loss and select
    assert len(backward_keys) == 1, differing(backward_keys)


def test_strided_policy_kernels(recorded):
    """Per-sequence advantages and every other column: strides of 1, multiples of 16 and odd ones, with one key."""
    kernels = recorded(forward, "forward_kernel"), recorded(policy, "backward_kernel")
    for shape in ((3, 7), (16, 64), (5, 33), (64, 1024)):
        wide = random_tokens((shape[0], 2 * shape[1]))
        lp, blp, _, mask = wide.map(lambda t: t[:, ::2])
        run_policy(Tokens(lp, blp, wide.advantages[:, 0].contiguous(), mask), Rule())
    assert [len(k.keys) for k in kernels] == [2, 1]


def test_thresholds_compile_nothing(recorded):
    kernel, _ = recorded(forward, "forward_kernel"), recorded(policy, "backward_kernel")
    for tau in (0.0, 0.01, 0.04, 0.5, 1.0, 16.0, 1e30):
        run_policy(random_tokens((100,)), Rule(m2_threshold=tau))
    assert len(kernel.keys) == 2


def test_another_dtype_is_another_kernel(recorded):
    """The recorder sees what does make a difference."""
    kernel, _ = recorded(forward, "forward_kernel"), recorded(policy, "backward_kernel")
    for dtype in (torch.float32, torch.bfloat16):
        run_policy(random_tokens((100,), dtype=dtype), Rule())
    assert len(kernel.keys) == 4


def test_logits_kernels(recorded):
    """Rows and sequences of any number; the vocabulary is one for each model."""
    kernels = recorded(logits, "log_softmax_kernel"), recorded(logits, "log_softmax_backward_kernel")
    args = LogitsArgs(vocab_size=64, shift=1)
    for b, t in ((1, 2), (1, 17), (2, 17), (16, 17), (3, 33), (5, 257), (1, 1025)):
        x = torch.zeros(b, t, 64, dtype=torch.bfloat16)
        ids = torch.zeros(b, t, dtype=torch.int64)
        lp, entropy = backend.log_softmax(x, ids, None, args)
        for out in (x, torch.empty_like(x)):
            backend.log_softmax_backward(torch.ones_like(lp), None, lp, entropy, x, ids, None, args, out)
    assert [len(k.keys) for k in kernels] == [1, 1], [differing(k.keys) for k in kernels]
