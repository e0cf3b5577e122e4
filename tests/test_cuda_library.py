"""The CUDA library without a GPU: what the compiler made of it, and that it loads wherever libtorch has CUDA."""

from __future__ import annotations

import json
import os
import re
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


def cuobjdump(*options: str) -> str:
    """What CUDA's disassembler, which Triton brings along, says of the library that is shipped."""
    import triton  # not on every system that collects this file

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *options, PACKAGE / "_cuda.so"], capture_output=True, text=True, check=True).stdout


def test_a_failed_build_is_no_reason_to_skip():
    """The tests below need the library; where a compiler failed it is missing, and they must not be silent."""
    assert "failed" not in compiled.build_record().get("why_cuda", "")


@pytest.mark.skipif(not compiled.build_record().get("cuda"), reason="the CUDA library was not built")
def test_machine_code_of_every_chip():
    """Of the library itself: no stack, no spill, registers for the blocks launched, and accesses of 16 bytes in SASS."""
    chips = compiled.build_record()["architectures"]
    usage = {
        chip: dict(re.findall(r"Function (\S+):\n\s*(.*)", part))
        for chip, part in re.findall(r"arch = (\S+)\n(.*?)(?=Fatbin|\Z)", cuobjdump("-res-usage"), re.S)
    }
    for chip in chips:
        kernels = {name: said for name, said in usage[chip].items() if "ward_kernel" in name}
        assert len(kernels) == 4
        code = dict(re.findall(r"Function : (\S+)\n(.*?)(?=Function :|\Z)", cuobjdump("-sass", "-arch", chip), re.S))
        for name, said in kernels.items():
            at_once = 1 if "forward" in name and "ELb0" in name else 2
            registers, stack, local = (int(re.search(rf"{what}:(\d+)", said)[1]) for what in ("REG", "STACK", "LOCAL"))
            assert stack == local == 0, (chip, name, said)
            assert registers * 256 * at_once <= cuda_report.REGISTERS, (chip, name, said)
            assert not re.search(r"\b(LDL|STL)\b", code[name]), (chip, name)
            # fp32: two of each of both log-probs and the advantages; the gradient.
            assert len(re.findall(r"\bLDG\.\S*128\S*", code[name])) >= 6, (chip, name)
            assert "backward" not in name or len(re.findall(r"\bSTG\.\S*128\S*", code[name])) >= 2, (chip, name)


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
