"""Builds the compiled extension. M2PO_BUILD=none|cpu|cuda; without it, what this machine can build. Says what it chose.

The extension uses libtorch's stable ABI and no Python API, so one wheel per platform serves every torch >= 2.10 and every
CPython >= 3.10. Torch is not imported, only its headers and libraries are looked for: in the environment that runs pip, also
from within pip's build isolation, so that a build never downloads a torch of its own.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CHOICES = ("none", "cpu", "cuda")
FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # d, v and the sums are rounded operation by operation: masks depend on it
    "-fno-math-errno",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # nothing newer than torch 2.10
]
# One object of each of these per instruction set; the best that a machine runs is chosen when the extension loads.
PER_ISA = ["csrc/cpu/kernels.cpp", "csrc/cpu/logits_kernels.cpp"]
ISAS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISAS["avx2"] = ["-mavx2", "-mfma"]
    # GCC 12 warns of an uninitialised variable inside its own AVX-512 header.
    ISAS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-Wno-maybe-uninitialized"]


def find_torch() -> Path | None:
    """The directory of an installed torch, without importing it."""
    places = [Path(entry) for entry in sys.path if entry]
    places += [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]  # hidden from sys.path by build isolation
    for place in list(places):
        if place.is_dir():
            for pth in place.glob("*.pth"):
                places += [Path(line) for line in pth.read_text(errors="ignore").splitlines() if line.startswith("/")]
    for place in places:
        if (place / "torch/include/torch/csrc/stable/library.h").exists():
            return place / "torch"
    return None


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else c++ or g++ on PATH."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++"]
    return next((found for found in map(shutil.which, names) if found), None)


def choose() -> tuple[str, str]:
    """(what to build, why)."""
    wanted = os.environ.get("M2PO_BUILD", "")
    if wanted not in ("", *CHOICES):
        raise SystemExit(f"M2PO_BUILD must be one of {', '.join(CHOICES)}, or unset; got {wanted!r}")
    if wanted == "none":
        return "none", "M2PO_BUILD=none"
    if wanted == "cuda":
        raise SystemExit("M2PO_BUILD=cuda: this version has no CUDA kernels; use M2PO_BUILD=cpu")
    missing = []
    if sys.platform != "linux":
        missing.append(f"{sys.platform} is not supported, only Linux is")
    if find_compiler() is None:
        missing.append("no C++ compiler was found (CXX, c++, g++)")
    if find_torch() is None:
        missing.append("no torch >= 2.10 was found beside this Python: install torch first")
    if not missing:
        return "cpu", f"M2PO_BUILD={wanted}" if wanted else "a C++ compiler and torch's headers were found"
    if wanted:
        raise SystemExit(f"M2PO_BUILD={wanted} cannot be had: {'; '.join(missing)}")
    return "none", "; ".join(missing)


BUILD, WHY = choose()
NEEDED = find_compiler(), find_torch()


def write_record(command: build_py, native: bool, why: str) -> None:
    """Leaves in the package what was built, for `m2po doctor`."""
    compiler, torch = NEEDED
    record = {"native": native, "why": why, "compiler": "", "torch": "", "isas": []}
    if native:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
        record |= {"compiler": version.splitlines()[0], "torch": found[1] if found else "", "isas": list(ISAS)}
    package = (ROOT if command.editable_mode else Path(command.build_lib)) / "m2po_kernels"
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.json").write_text(json.dumps(record, indent=1) + "\n")


class BuildNative(build_ext):
    """Compiles each source with its own flags, kernels.cpp once per instruction set, and links them without Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        try:
            self.compile(ext, *NEEDED)
        except Exception as error:
            # Without M2PO_BUILD the extension is optional, and setuptools goes on; with it, this ends the build.
            write_record(self.get_finalized_command("build_py"), False, f"the compiler failed: {error}")
            raise

    def compile(self, ext: Extension, compiler: str, torch: Path) -> None:
        build = Path(self.build_temp)
        build.mkdir(parents=True, exist_ok=True)
        include = [f"-I{torch / 'include'}", f"-I{ROOT / 'csrc'}"]
        jobs = [(ROOT / source, build / (Path(source).stem + ".o"), include) for source in ext.sources]
        for source in PER_ISA:
            for isa, flags in ISAS.items():
                jobs.append((ROOT / source, build / f"{Path(source).stem}_{isa}.o", [f"-DM2PO_ISA={isa}", *flags]))
        for source, target, flags in jobs:
            self.spawn([compiler, *FLAGS, *flags, "-c", str(source), "-o", str(target)])
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        objects = [str(target) for _, target, _ in jobs]
        self.spawn([compiler, "-shared", *objects, f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch", "-o", str(output)])


class BuildPython(build_py):
    """Says and records what was chosen."""

    def run(self) -> None:
        super().run()
        print(f"m2po_kernels: M2PO_BUILD={BUILD} ({WHY})", file=sys.stderr)
        write_record(self, BUILD != "none", WHY)


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: the extension uses no Python API."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return BUILD != "none"


EXTENSION = Extension(
    "m2po_kernels._native",
    sources=["csrc/bindings.cpp", "csrc/cpu/driver.cpp", "csrc/cpu/isa.cpp"],
    optional="M2PO_BUILD" not in os.environ,
    depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.[hc]*")],
)

setup(
    ext_modules=[EXTENSION] if BUILD != "none" else [],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": PlatformWheel},
    distclass=NativeDistribution,
)
