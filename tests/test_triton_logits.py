"""The Triton kernels of selective_log_softmax: what they compile to, and how many bytes they move.

That they are right is tested by test_logits.py and test_logits_autograd.py, which run on triton as on any other backend, on a GPU
or, with TRITON_INTERPRET=1, in Triton's interpreter. Compiling needs no GPU, but a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")

from m2po_kernels import selective_log_softmax  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: kernels are not compiled in this process")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="counts bytes in Triton's interpreter: set TRITON_INTERPRET=1")


def logits_variants():
    if INTERPRETED:
        return []
    from bench import triton_report

    return [v for v in triton_report.variants() if v.name.startswith("log-softmax")]


@compiled
@pytest.mark.parametrize("variant", logits_variants(), ids=lambda v: v.name)
def test_compiled_for_every_chip(variant):
    """No spill, and memory is walked in pieces of 16 bytes: loads of the loop and the one ahead of it; each kind of store."""
    from bench import triton_report

    backward = "backward" in variant.name
    for chip in triton_report.CHIPS:
        got = triton_report.figures(variant, chip)
        assert not got.problems(variant, chip), chip.name
        assert got.wide_loads >= (1 if backward else 2), chip.name
        assert got.wide_stores >= (3 if backward else 0), chip.name


@compiled
def test_a_new_batch_shape_compiles_nothing():
    """Triton compiles anew for an argument that becomes 1 or a multiple of 16, unless it is told not to look."""
    from m2po_kernels.backends.triton import logits

    looked_at = {"logits", "out", "vocab_size", "columns", "logits_v", "out_v", "temperature", "logit_scale", "softcap"}
    for kernel in (logits.log_softmax_kernel, logits.log_softmax_backward_kernel):
        for param in kernel.params:
            assert param.is_constexpr or param.do_not_specialize or param.name in looked_at, param.name


@pytest.fixture
def moved(monkeypatch):
    """Distinct bytes that each load and store of the interpreter touches, by kind."""
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder

    total = {"read": 0, "written": 0}

    def count(kind, ptrs, mask):
        chosen = numpy.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        at = numpy.unique(ptrs.data[chosen])
        total[kind] += at.size * ptrs.get_element_ty().primitive_bitwidth // 8

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self, ptrs, mask, *args):
        count("read", ptrs, mask)
        return load(self, ptrs, mask, *args)

    def masked_store(self, ptrs, value, mask, *args):
        count("written", ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", masked_store)
    return total


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [4099, 49152])
def test_bytes_per_row(columns, dtype, moved):
    """Forward reads each row once; backward reads and writes it once; a row without gradient is written only.

    Beside the rows themselves: the id, its logit, log-prob, entropy and gradient of each row, 64 bytes with room to spare.
    """
    rows, without = 5, 2
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, columns, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, columns, (rows,), generator=generator)
    grad = torch.tensor([1.0, 0.0, -1.0, 0.0, 0.5])
    row = columns * logits.element_size()

    lp, _ = selective_log_softmax(logits, ids, return_entropy=True, backend="triton")
    assert rows * row <= moved["read"] <= 1.02 * rows * row + 64 * rows
    assert moved["written"] == rows * 8
    moved.update(read=0, written=0)
    lp.backward(grad)
    assert (rows - without) * row <= moved["read"] <= 1.02 * (rows - without) * row + 64 * rows
    assert moved["written"] == rows * row
