"""Builds the compiled libraries. M2PO_BUILD=none|cpu|cuda; without it, what this machine can build. Says what it chose.

_native.so is the CPU backend, _cuda.so the CUDA backend; the latter needs nvcc, but neither a GPU nor a torch with CUDA. Both use
libtorch's stable ABI and no Python API, so one wheel per platform serves every torch >= 2.10 and every CPython >= 3.10. Torch is
not imported, only its headers and libraries are looked for: in the environment that runs pip, also from within pip's build
isolation, so that a build never downloads a torch of its own.
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
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CHOICES = ("none", "cpu", "cuda")
LIBRARIES = {
    "native": ["csrc/bindings.cpp", "csrc/cpu/driver.cpp", "csrc/cpu/isa.cpp"],
    "cuda": ["csrc/bindings_cuda.cpp", "csrc/cuda/launch.cu"],
}
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
# -fmad=false: see -ffp-contract=off. The exp polynomials ask for fused operations by name.
CUDA_FLAGS = [
    *("-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "-DM2PO_ISA=device", "--threads", "2"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off"),
]
# Machine code for each, and PTX of the last for what comes after.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def architectures() -> list[str]:
    """Those to build for: M2PO_ARCHITECTURES (a list with commas), or all that this nvcc knows; before 12.8 none knows sm_100."""
    known = subprocess.run([str(find_nvcc()), "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    wanted = os.environ.get("M2PO_ARCHITECTURES", "")
    chosen = [arch for arch in (wanted.split(",") if wanted else ARCHITECTURES) if wanted or arch in known]
    unknown = [arch for arch in chosen if arch not in known]
    if not wanted and not chosen:  # as any failure of the compiler: without M2PO_BUILD=cuda the library is left out
        raise CompileError(f"{find_nvcc()} knows none of {', '.join(ARCHITECTURES)}")
    if unknown:
        raise SystemExit(f"M2PO_ARCHITECTURES must name some of {', '.join(known)}, which {find_nvcc()} knows; got {wanted!r}")
    return chosen


def architecture_flags(chosen: list[str]) -> list[str]:
    """-gencode for nvcc."""
    codes = [(arch, arch) for arch in chosen] + [(chosen[-1], chosen[-1].replace("sm", "compute"))]
    return [f"-gencode=arch={arch.replace('sm', 'compute')},code={code}" for arch, code in codes]


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


def find_nvcc() -> str | None:
    """The CUDA compiler: that of $CUDA_HOME, which torch too takes first, else nvcc on PATH or where NVIDIA's packages put it."""
    if home := os.environ.get("CUDA_HOME"):
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def choose() -> dict[str, tuple[bool, str]]:
    """For each library whether to build it, and why (not)."""
    wanted = os.environ.get("M2PO_BUILD", "")
    if wanted not in ("", *CHOICES):
        raise SystemExit(f"M2PO_BUILD must be one of {', '.join(CHOICES)}, or unset; got {wanted!r}")
    if wanted == "none":
        return dict.fromkeys(LIBRARIES, (False, "M2PO_BUILD=none"))
    missing = []
    if sys.platform != "linux":
        missing.append(f"{sys.platform} is not supported, only Linux is")
    if find_compiler() is None:
        missing.append("no C++ compiler was found (CXX, c++, g++)")
    if find_torch() is None:
        missing.append("no torch >= 2.10 was found beside this Python: install torch first")
    missing_cuda = [*missing, *([] if find_nvcc() else ["no nvcc was found (CUDA_HOME, PATH, /usr/local/cuda/bin)"])]
    if missing_cuda if wanted == "cuda" else missing and wanted:
        raise SystemExit(f"M2PO_BUILD={wanted} cannot be had: {'; '.join(missing_cuda if wanted == 'cuda' else missing)}")
    why = f"M2PO_BUILD={wanted}" if wanted else "a C++ compiler and torch's headers were found"
    why_cuda = f"M2PO_BUILD={wanted}" if wanted else "nvcc was found"
    return {
        "native": (not missing, "; ".join(missing) or why),
        "cuda": (not missing_cuda and wanted != "cpu", "; ".join(missing_cuda) if wanted != "cpu" and missing_cuda else why_cuda),
    }


CHOSEN = choose()
NEEDED = find_compiler(), find_torch()


def first_line_of(command: list[str], pattern: str = ".+") -> str:
    """The first match of `pattern` in what the command prints."""
    found = re.search(pattern, subprocess.run(command, capture_output=True, text=True).stdout)
    return found[0] if found else ""


def package_of(command: build_py) -> Path:
    """Where the command puts the package."""
    return (ROOT if command.editable_mode else Path(command.build_lib)) / "m2po_kernels"


def write_record(package: Path, failed: dict[str, str]) -> None:
    """Leaves in the package what was built, for `m2po doctor` and for loading. failed: why a chosen library is not there."""
    compiler, torch = NEEDED
    built = {name: chosen and name not in failed for name, (chosen, _) in CHOSEN.items()}
    record = {
        "native": built["native"],
        "why": failed.get("native", CHOSEN["native"][1]),
        "cuda": built["cuda"],
        "why_cuda": failed.get("cuda", CHOSEN["cuda"][1]),
        "compiler": "",
        "torch": "",
        "isas": [],
        "nvcc": "",
        "architectures": [],
    }
    if built["native"]:
        found = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
        record |= {"compiler": first_line_of([compiler, "--version"]), "torch": found[1] if found else "", "isas": list(ISAS)}
    if built["cuda"]:
        record |= {"nvcc": first_line_of([find_nvcc(), "--version"], r"release \S+(?=,)"), "architectures": architectures()}
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.json").write_text(json.dumps(record, indent=1) + "\n")


class BuildLibraries(build_ext):
    """Compiles each source with its own flags, kernels.cpp once per instruction set, and links without Python."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.failed = {}

    def run(self) -> None:
        super().run()
        if self.inplace:  # build_ext --inplace alone, without build_py
            write_record(ROOT / "m2po_kernels", self.failed)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition("._")[2]
        try:
            (self.build_cuda if name == "cuda" else self.build_native)(ext, *NEEDED)
        except Exception as error:
            # Without M2PO_BUILD a library is optional, and setuptools goes on; with it, this ends the build.
            self.failed[name] = f"the compiler failed: {error}"
            write_record(package_of(self.get_finalized_command("build_py")), self.failed)
            raise

    def build_native(self, ext: Extension, compiler: str, torch: Path) -> None:
        include = [f"-I{torch / 'include'}", f"-I{ROOT / 'csrc'}"]
        jobs = [(source, Path(source).stem, include) for source in ext.sources]
        for source in PER_ISA:
            for isa, flags in ISAS.items():
                jobs.append((source, f"{Path(source).stem}_{isa}", [f"-DM2PO_ISA={isa}", *flags]))
        objects = [self.object_of(source, name, [compiler, *FLAGS, *flags]) for source, name, flags in jobs]
        self.link([compiler, "-shared"], ext, objects, torch, ["-ltorch_cpu", "-ltorch"])

    def build_cuda(self, ext: Extension, compiler: str, torch: Path) -> None:
        nvcc = [str(find_nvcc()), "-ccbin", compiler]
        include = [f"-I{torch / 'include'}", f"-I{ROOT / 'csrc'}"]
        host, device = ext.sources
        objects = [
            # USE_CUDA declares the shim of torch's current stream.
            self.object_of(host, "bindings_cuda", [compiler, *FLAGS, "-DUSE_CUDA", *include]),
            self.object_of(device, "launch_cuda", [*nvcc, *CUDA_FLAGS, *architecture_flags(architectures())]),
        ]
        # Nothing of libtorch_cuda is named here: it may not be on this machine. At run time it comes with libtorch.
        flags = ["-cudart", "static", "-Xlinker", "--no-as-needed", "-ltorch"]
        self.link([*nvcc, "-shared"], ext, objects, torch, flags)

    def object_of(self, source: str, name: str, command: list[str]) -> str:
        build = Path(self.build_temp)
        build.mkdir(parents=True, exist_ok=True)
        target = str(build / f"{name}.o")
        self.spawn([*command, "-c", str(ROOT / source), "-o", target])
        return target

    def link(self, command: list[str], ext: Extension, objects: list[str], torch: Path, flags: list[str]) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        self.spawn([*command, *objects, f"-L{torch / 'lib'}", *flags, "-o", str(output)])


class BuildPython(build_py):
    """Says and records what was chosen."""

    def run(self) -> None:
        super().run()
        for name, (chosen, why) in CHOSEN.items():
            print(f"m2po_kernels: {'with' if chosen else 'without'} {name} ({why})", file=sys.stderr)
        write_record(package_of(self), {})


class PlatformWheel(bdist_wheel):
    """cp310-abi3-<platform>: the libraries use no Python API. py3-none where nothing was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        compiled = self.distribution.has_ext_modules()
        return (*(("cp310", "abi3") if compiled else ("py3", "none")), super().get_tag()[2])


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return any(chosen for chosen, _ in CHOSEN.values())


LIBRARIES_OF = {
    name: Extension(
        f"m2po_kernels._{name}",
        sources=sources,
        optional="M2PO_BUILD" not in os.environ,
        depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.[hc]*")],
    )
    for name, sources in LIBRARIES.items()
}

setup(
    ext_modules=[LIBRARIES_OF[name] for name, (chosen, _) in CHOSEN.items() if chosen],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPython, "bdist_wheel": PlatformWheel},
    distclass=NativeDistribution,
)
