"""The CUDA library without a GPU: what the compiler made of it, and that it loads wherever libtorch has CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simt
import torch

import m2po_kernels
from bench import cuda_report
from m2po_kernels import compiled

PACKAGE = Path(m2po_kernels.__file__).parent
QUICK = ("sm_90",)


@pytest.mark.skipif(cuda_report.nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("chip", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in cuda_report.CHIPS])
def test_kernels_fit_the_chip_without_spilling(chip):
    for f in cuda_report.figures(chip):
        assert not f.problems(chip), f


@pytest.mark.skipif(not compiled.build_record().get("cuda"), reason="the CUDA library was not built")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has what the test puts in its place")
def test_only_the_current_stream_is_missing_without_cuda(tmp_path):
    """With that one function in place the library loads beside a torch without CUDA, registers its ops and answers why not."""
    stub = tmp_path / "stub.c"
    stub.write_text("int aoti_torch_get_current_cuda_stream(int device, void** stream) { return 1; }\n")
    library = tmp_path / "stub.so"
    subprocess.run([str(simt.compiler()), "-shared", "-fPIC", "-x", "c", str(stub), "-o", str(library)], check=True)
    code = f"""
import ctypes, json, torch
ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)
torch.ops.load_library({str(PACKAGE / "_cuda.so")!r})
print(json.dumps([torch.ops.m2po_cuda.why_not(0), str(torch.ops.m2po_cuda.forward.default._schema)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    reason, schema = json.loads(done.stdout)
    assert torch.cuda.is_available() or "driver" in reason
    assert "Tensor? per_token" in schema.replace("(b!)", "")
