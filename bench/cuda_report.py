"""Compiles the CUDA kernels for each chip that is supported, without a GPU, and tells what came out.

python -m bench.cuda_report            # prints the rows and writes them into bench/results/kernels.jsonl
python -m bench.cuda_report --check    # exits with 1 on a spill, a stack frame or missing 16-byte accesses
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .kernel_table import COLUMNS, CUDA, Row, line, replace_rows

ROOT = Path(__file__).resolve().parents[1]
# As in setup.py.
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "-DM2PO_ISA=device", "-Xptxas", "-v")
# CUDA C++ Programming Guide, technical specifications per compute capability: 64 K registers on a multiprocessor; KB of shared
# memory there, 1 KB of which the system takes for each block.
SHARED_KB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}
REGISTERS = 65536


@dataclass(frozen=True)
class Figures:
    """What ptxas says of one kernel, and its accesses of 16 bytes in the PTX. shared: B a block, with its lists of candidates."""

    kernel: str
    registers: int
    stack: int
    spilled: int
    shared: int
    wide_loads: int
    wide_stores: int
    blocks: int  # on a multiprocessor at the same time, as launched

    def problems(self, chip: str) -> list[str]:
        found = []
        if self.spilled or self.stack:
            found.append(f"{self.stack} B of stack, {self.spilled} B spilled")
        if self.registers * 256 * self.blocks > REGISTERS:
            found.append(f"{self.registers} registers for 256 threads do not fit {self.blocks} times")
        if (self.shared + 1024) * self.blocks > SHARED_KB[chip] * 1024:
            found.append(f"{self.shared} B of shared memory do not fit {self.blocks} times")
        if self.wide_loads < 6:  # fp32: two for each of both log-probs and the advantages
            found.append(f"{self.wide_loads} loads of 16 bytes")
        if "backward" in self.kernel and self.wide_stores < 2:
            found.append(f"{self.wide_stores} stores of 16 bytes")
        return found


def nvcc() -> str | None:
    """The CUDA compiler, as setup.py finds it."""
    if home := os.environ.get("CUDA_HOME"):
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr


def _shared_bytes(chip: str, folder: Path) -> int:
    """Asked of the code that the launch asks: a program for the host that prints it."""
    source = folder / "shared.cu"
    source.write_text(
        '#include <cstdio>\n#include "cuda/forward.cuh"\nint main() { std::printf("%lld", static_cast<long long>('
        f"m2po::shared_bytes_of<m2po::kThreadsPerBlock>(m2po::list_room_of({chip[3:]})))); }}"
    )
    program = folder / "shared"
    _run([str(nvcc()), "-std=c++20", "-DM2PO_ISA=device", "-Icsrc", "-arch=sm_80", str(source), "-o", str(program)])
    return int(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)


def figures(chip: str) -> list[Figures]:
    """Compiles csrc/cuda/launch.cu for `chip`. Raises RuntimeError with the compiler's words if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arch = f"-gencode=arch={chip.replace('sm', 'compute')},code="
        source = [str(nvcc()), *FLAGS, "-Icsrc", "csrc/cuda/launch.cu"]
        said = _run([*source, f"{arch}{chip}", "-cubin", "-o", str(folder / "out.cubin")])
        _run([*source, f"-arch={chip.replace('sm', 'compute')}", "-ptx", "-o", str(folder / "out.ptx")])
        bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n\}", (folder / "out.ptx").read_text(), re.S))
        shared = _shared_bytes(chip, folder)
    found = []
    for mangled, stack, stores, loads, registers in re.findall(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
        r"ptxas info\s+: Used (\d+) registers",
        said,
    ):
        if "ward_kernel" not in mangled:  # the empty one of the benchmarks
            continue
        forward, plain = "forward" in mangled, "ELb1" in mangled
        body = bodies[mangled]
        found.append(
            Figures(
                f"{'forward' if forward else 'backward'}, {'plain' if plain else 'every option'}",
                registers=int(registers),
                stack=int(stack),
                spilled=int(stores) + int(loads),
                shared=shared if forward else 0,
                wide_loads=len(re.findall(r"ld\.global\S*\.v4\.[bfu]32", body)),
                wide_stores=len(re.findall(r"st\.global\S*\.v4\.[bfu]32", body)),
                blocks=1 if forward and not plain else 2,
            )
        )
    if len(found) != 4:
        raise RuntimeError(f"ptxas told of {len(found)} kernels, not 4:\n{said}")
    return found


def rows() -> list[Row]:
    """All figures as rows of docs/kernels.md; raises SystemExit with the problems if there are any."""
    made, problems = [], []
    for chip in CHIPS:
        for f in sorted(figures(chip), key=lambda f: f.kernel):
            problems += [f"{f.kernel} on {chip}: {problem}" for problem in f.problems(chip)]
            cells = (f"{CUDA}{f.kernel}", chip, f.registers, f.stack + f.spilled, 0, f.shared, f.wide_loads, f.wide_stores)
            made.append(dict(zip(COLUMNS, cells, strict=True)))
    if problems:
        raise SystemExit("\n".join(problems))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compile and check, write nothing")
    args = parser.parse_args()
    made = rows()
    if not args.check:
        replace_rows(made, cuda=True)
    print("\n".join(map(line, made)))


if __name__ == "__main__":
    main()
