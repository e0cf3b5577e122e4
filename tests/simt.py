"""The CUDA kernels on the host: builds csrc/bindings_cuda.cpp against csrc/tests/simt and registers its ops for tensors on a CPU.

So every test that takes a backend runs on the kernels' own source without a GPU, as the Triton tests do in the interpreter.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from m2po_kernels.backends import cuda

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "simt"
SOURCES = ("csrc/bindings_cuda.cpp", "csrc/tests/simt/launch.cpp", "csrc/tests/simt/fibers.cpp")
FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-unknown-pragmas", "-Wno-clobbered"),
    *("-DM2PO_SIMT", "-DM2PO_ISA=device", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Icsrc", "-Icsrc/tests"),
)


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "c++")


@functools.cache
def build() -> Path:
    """The library, compiled anew where a source or torch is newer. Raises where the compiler fails."""
    torch_root = Path(torch.__file__).parent
    library = BUILD / "m2po_simt.so"
    inputs = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()] + [torch_root / "version.py", Path(__file__)]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return library
    BUILD.mkdir(parents=True, exist_ok=True)

    def compile_source(source: str) -> str:
        target = str(BUILD / (Path(source).stem + ".o"))
        command = [str(compiler()), *FLAGS, f"-I{torch_root / 'include'}", "-c", source, "-o", target]
        subprocess.run(command, cwd=ROOT, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_source, SOURCES))
    link = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-ltorch", "-o", str(library)]
    subprocess.run([str(compiler()), "-shared", *objects, *link], cwd=ROOT, check=True)
    return library


def install() -> None:
    """Makes backend "cuda" serve tensors on a CPU in this process."""
    torch.ops.load_library(str(build()))
    served = cuda.why_not
    cuda.why_not = lambda device: None if device.type == "cpu" else served(device)
