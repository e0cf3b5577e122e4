"""Compiles every Triton kernel ahead of time for each chip that is supported, without a GPU, and tells what came out.

    python -m bench.triton_report            # prints the rows and writes them into bench/results/kernels.jsonl
    python -m bench.triton_report --check    # exits with 1 on a spill, too many registers or too much shared memory

A kernel is added by a function that yields `Variant`s and is listed in VARIANTS.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from .kernel_table import COLUMNS, Row, line, replace_rows

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Chip:
    """What one multiprocessor (NVIDIA) or compute unit (AMD) has. Bytes of shared memory: per program, and in all."""

    name: str
    target: GPUTarget
    shared_per_program: int
    shared: int
    registers: int


# NVIDIA: CUDA C++ Programming Guide, table of technical specifications per compute capability (registers are 32 bits wide).
# AMD: CDNA2 and CDNA3 instruction set guides; 512 vector registers of 64 lanes for each of 4 SIMDs.
CHIPS = (
    *(
        Chip(f"sm_{arch}", GPUTarget("cuda", arch, 32), per_program * 1024, in_all * 1024, 65536)
        for arch, per_program, in_all in [
            (80, 163, 164),
            (86, 99, 100),
            (89, 99, 100),
            (90, 227, 228),
            (100, 227, 228),
            (120, 99, 100),
        ]
    ),
    *(Chip(arch, GPUTarget("hip", arch, 64), 65536, 65536, 4 * 512 * 64) for arch in ("gfx90a", "gfx942")),
)


@dataclass(frozen=True)
class Variant:
    """One kernel with the types of its arguments. Those in neither `types` nor `constants` are int32, or what is annotated."""

    name: str
    kernel: Any
    types: dict[str, str]  # pointers ("*fp32") and fp32 scalars
    constants: dict[str, Any]
    nvidia: dict[str, Any]  # constants and compile options that differ between the two makers
    amd: dict[str, Any]
    programs_per_unit: int = 1  # that have to run at the same time

    def on(self, chip: Chip) -> dict[str, Any]:
        return self.nvidia if chip.target.backend == "cuda" else self.amd


@dataclass(frozen=True)
class Figures:
    """What the compiler made of a variant. wide_loads: loads of 16 bytes in the PTX or ISA text."""

    registers: int
    spilled: int  # instructions that move a register to or from memory
    parked: int  # AMD: scalar registers that wait in lanes of vector registers; they never go to memory
    shared: int
    wide_loads: int
    wide_stores: int

    def problems(self, variant: Variant, chip: Chip) -> list[str]:
        found = []
        if self.spilled:
            found.append(f"{self.spilled} instructions spill registers to memory")
        if self.shared > chip.shared_per_program or self.shared * variant.programs_per_unit > chip.shared:
            found.append(f"{self.shared} B of shared memory do not fit")
        threads = variant.on(chip)["num_warps"] * chip.target.warp_size
        if self.registers * threads * variant.programs_per_unit > chip.registers:
            found.append(f"{self.registers} registers for {threads} threads do not fit {variant.programs_per_unit} times")
        return found


@cache
def _compile(key: tuple[int, str]) -> Figures:
    variant, chip = _REGISTRY[key[0]], next(c for c in CHIPS if c.name == key[1])
    names = variant.kernel.arg_names
    constants = variant.constants | {n: x for n, x in variant.on(chip).items() if n in names}
    options = {n: x for n, x in variant.on(chip).items() if n not in names}
    integers = {p.name: p.annotation_type or "i32" for p in variant.kernel.params}
    signature = {n: "constexpr" if n in constants else variant.types.get(n, integers[n]) for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(variant.kernel, signature, constexprs=constants, attrs=aligned)
    compiled = compile_source(source, target=chip.target, options=options)
    return (_nvidia if chip.target.backend == "cuda" else _amd)(compiled)


def figures(variant: Variant, chip: Chip) -> Figures:
    """Compiles `variant` for `chip`, once in a process."""
    return _compile((_REGISTRY.index(variant), chip.name))


def _nvidia(compiled: Any) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([str(CUOBJDUMP), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", usage)
    assert registers
    spilled = len(re.findall(r"\b(?:STL|LDL)\b", code))
    ptx = compiled.asm["ptx"]
    return Figures(
        registers=int(registers.group(1)),
        spilled=spilled,
        parked=0,
        shared=compiled.metadata.shared,
        wide_loads=len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        wide_stores=len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
    )


def _amd(compiled: Any) -> Figures:
    isa = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return sum(int(x) for x in re.findall(rf"\.{name}:\s+(\d+)", isa))

    return Figures(
        registers=number("vgpr_count"),
        spilled=number("vgpr_spill_count") + len(re.findall(r"\bscratch_(?:load|store)_", isa)),
        parked=number("sgpr_spill_count"),
        shared=compiled.metadata.shared,
        wide_loads=len(re.findall(r"(?:global|buffer)_load_dwordx4", isa)),
        wide_stores=len(re.findall(r"(?:global|buffer)_store_dwordx4", isa)),
    )


_FLOATS = (
    "candidate_above",
    "scale",
    "scale_rest",
    "log_high",
    "log_low",
    "ratio_high",
    "ratio_low",
    "log_cap",
    "cap",
    "kl_coef",
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "per sequence": {"ADVANTAGES": 2},
    "every option": {
        **dict.fromkeys(("LOG_PROBS", "BEHAVIOR", "ADVANTAGES", "MASK", "REFERENCE", "WEIGHTS", "KEEP"), 2),
        "CAPPED": True,
        "DROP_BAD": True,
        "DIVIDE_BY": 3,
    },
}


def policy_variants() -> Iterator[Variant]:
    """select, m2po_loss and grpo_loss: what a trainer runs, and the forms with the most in them."""
    from m2po_kernels.backends.triton import tuning
    from m2po_kernels.backends.triton.backward import backward_kernel
    from m2po_kernels.backends.triton.forward import forward_kernel

    many = (tuning.NVIDIA_MANY_INPUTS, tuning.AMD)
    for dtype, few in (("fp32", (tuning.NVIDIA, tuning.AMD)), ("bf16", (tuning.NVIDIA_HALF, tuning.AMD))):
        backward = [{"BLOCK": c.backward_block, **tuning.backward_options(c)} for c in few]
        inputs = dict.fromkeys(("log_probs", "behavior", "advantages"), f"*{dtype}") | {"mask": "*u8"}
        extras = {"reference": f"*{dtype}", "weights": "*fp32", "keep": "*u8", "denominators": "*fp64"}
        work = {
            "work": "*i64", "sums": "*fp64", "list_counts": "*i32", "list_v": "*fp32", "list_term": "*fp32",
            "list_offset": "*i16", "scales": "*fp64", "cut": "*i64", "counts": "*i64", "floats": "*fp64",
            **dict.fromkeys(_FLOATS, "fp32"),
        }  # fmt: skip
        flags = {
            **dict.fromkeys(("LOG_PROBS", "BEHAVIOR", "ADVANTAGES", "MASK"), 1),
            **dict.fromkeys(("REFERENCE", "WEIGHTS", "KEEP", "DIVIDE_BY"), 0),
            **dict.fromkeys(("SCOPE_ALL", "CLIP", "CAPPED", "DROP_BAD"), False),
        }
        for name, chosen in _OPTIONS.items():
            given = extras if name == "every option" else {}
            configs = many if given else few
            forward = [{"BLOCK": c.block, **tuning.forward_options(c)} for c in configs]
            absent = {} if given else dict.fromkeys(extras)
            modes = {"select": 0, "loss": 1, "loss per token": 2} if name != "per sequence" else {"loss": 1}
            for mode, number in modes.items():
                if number == 0 and given:
                    continue
                outputs = {"loss": "*fp32"} if number else {"keep_out": "*u8"}
                absent_output = {"keep_out": None} if number else {"loss": None}
                yield Variant(
                    f"{mode}, {name}, {dtype}", forward_kernel, {**inputs, **given, **work, **outputs},
                    {**flags, **chosen, **absent, **absent_output, "LOSS": number, "CROWD": tuning.CROWD},
                    *forward, programs_per_unit=configs[0].programs_per_unit,
                )  # fmt: skip
            constants = {**flags, **chosen, **absent, "GRAD": 0, "OUT": 1}
            del constants["DIVIDE_BY"]
            constants.pop("denominators", None)
            types = {**inputs, **given, "grad": "*fp32", "scales": "*fp64", "cut": "*i64", "out": f"*{dtype}"}
            types |= dict.fromkeys(("log_high", "log_low", "log_cap", "kl_coef"), "fp32")
            yield Variant(f"backward, {name}, {dtype}", backward_kernel, types, constants, *backward)


def logits_variants() -> Iterator[Variant]:
    """selective_log_softmax: bare, and with everything. Rows of whole 16-byte pieces, columns next to each other."""
    from m2po_kernels.backends.triton import tuning
    from m2po_kernels.backends.triton.logits import log_softmax_backward_kernel, log_softmax_kernel

    configs = (tuning.NVIDIA_LOGITS, tuning.AMD_LOGITS)
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        forward = [{"BLOCK": c.block_bytes // itemsize, "num_warps": c.num_warps} for c in configs]
        backward = [{**options, "THREADS": c.threads} for options, c in zip(forward, configs, strict=True)]
        types = {
            "logits": f"*{dtype}", "token_ids": "*i64", "log_probs": "*fp32", "positions": "i32", "vocab_size": "i32",
            **dict.fromkeys(("temperature", "logit_scale", "softcap"), "fp32"),
        }  # fmt: skip
        for name, everything in (("plain", False), ("every option", True)):
            given = {"temperatures": "*fp32", "entropy": "*fp32"} if everything else {}
            constants = {"logits_v": 1, "ALIGNMENT": 16 // itemsize, "SHIFT": int(everything)}
            constants |= dict.fromkeys(("PER_TOKEN", "SCALED", "CAPPED"), everything)
            constants |= {} if everything else dict.fromkeys(("temperatures", "entropy"))
            yield Variant(
                f"log-softmax, {name}, {dtype}", log_softmax_kernel, types | given,
                {**constants, "WITH_ENTROPY": everything}, *forward,
            )  # fmt: skip
            given |= {"grad_log_probs": "*fp32", "out": f"*{dtype}", "columns": "i32"}
            given |= {"grad_entropy": "*fp32"} if everything else {}
            constants |= {} if everything else {"grad_entropy": None}
            yield Variant(
                f"log-softmax backward, {name}, {dtype}", log_softmax_backward_kernel, types | given,
                {**constants, "ENTROPY_GRAD": everything, "out_v": 1}, *backward,
            )  # fmt: skip


VARIANTS: tuple[Callable[[], Iterator[Variant]], ...] = (policy_variants, logits_variants)
_REGISTRY: list[Variant] = [variant for family in VARIANTS for variant in family()]


def variants() -> list[Variant]:
    return list(_REGISTRY)


def rows() -> list[Row]:
    """All figures as rows of docs/kernels.md; raises SystemExit with the problems if there are any."""
    made, problems = [], []
    cases = [(i, chip.name) for i in range(len(_REGISTRY)) for chip in CHIPS]
    with ProcessPoolExecutor() as pool:
        for (i, chip_name), f in zip(cases, pool.map(_compile, cases), strict=True):
            variant, chip = _REGISTRY[i], next(c for c in CHIPS if c.name == chip_name)
            problems += [f"{variant.name} on {chip.name}: {problem}" for problem in f.problems(variant, chip)]
            cells = (variant.name, chip.name, f.registers, f.spilled, f.parked, f.shared, f.wide_loads, f.wide_stores)
            made.append(dict(zip(COLUMNS, cells, strict=True)))
            print(line(made[-1]), file=sys.stderr, flush=True)
    if problems:
        raise SystemExit("\n".join(problems))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compile and check, write nothing")
    args = parser.parse_args()
    made = rows()
    if not args.check:
        replace_rows(made, cuda=False)
    print("\n".join(map(line, made)))


if __name__ == "__main__":
    main()
