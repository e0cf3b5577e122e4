"""The shipped configurations, one for each family of chips, each with its reason. Nothing is tuned at run time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """block: tokens of one block, a power of two and at most 2048 (five counts of 12 bits share one sum).

    programs_per_unit: programs of the forward kernel on each multiprocessor. All of them must fit at once, as they wait
    for each other; tests/test_triton_compiled.py checks that against registers and shared memory.
    max_registers: of each thread of the forward kernel; None leaves it to the compiler.
    """

    block: int
    num_warps: int
    programs_per_unit: int
    max_registers: int | None
    backward_block: int
    backward_warps: int


# More lanes of one block than this in one bin are summed within the block before they reach the histogram.
# An atomic on one address takes about a clock of the L2; a round of summing costs about as many clocks as this
# many atomics of all the multiprocessors that would queue. By reasoning; not yet measured.
CROWD = 64

# 1024 tokens on 8 warps are 4 tokens a thread: one load of 16 bytes for fp32. With 8 a thread the forward kernel does not fit
# 128 registers without spilling (compiled for sm_80 to sm_120), and 128 are what two programs on a multiprocessor leave
# each other; they keep 2 * 1024 * 13 bytes = 27 KB of loads in flight, about bandwidth times latency of an A100.
# The backward needs 56 registers at 8 tokens a thread, and is bound by nothing but memory. By reasoning; not yet measured.
NVIDIA = Config(block=1024, num_warps=8, programs_per_unit=2, max_registers=128, backward_block=2048, backward_warps=8)
# With every input given and none of them contiguous, 128 registers are not enough: one program has them all (164 to 188 for
# sm_80 and sm_90; left alone, ptxas stops at 128 and spills).
NVIDIA_MANY_INPUTS = Config(1024, num_warps=8, programs_per_unit=1, max_registers=255, backward_block=2048, backward_warps=8)
# 8 tokens a thread, so that a load of bf16 or fp16 is 16 bytes wide; two programs of 128 threads leave each thread all the
# registers it can have (left alone, ptxas stops at 168 for sm_90 and spills).
NVIDIA_HALF = Config(1024, num_warps=4, programs_per_unit=2, max_registers=255, backward_block=2048, backward_warps=8)
# A wave has 64 lanes, so 4 warps are the same 256 threads; a compute unit has twice the registers. Masks of lanes take scalar
# registers in pairs, more than there are: the rest wait in lanes of vector registers, which are to spare, and never go to memory.
# Smaller blocks or more warps halve the width of loads and leave most of them there (compiled for gfx942).
AMD = Config(block=1024, num_warps=4, programs_per_unit=2, max_registers=None, backward_block=2048, backward_warps=4)
# The interpreter runs one program after the other, so the grid of the forward kernel, which waits, must be one program.
# Its cost is per operation, not per token; this size still gives small batches more than one block.
INTERPRETER = Config(256, num_warps=1, programs_per_unit=1, max_registers=None, backward_block=256, backward_warps=1)


@functools.cache
def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def config_for(device: torch.device, many_inputs: bool = False, half: bool = False) -> Config:
    """many_inputs: beyond log-probs, behaviour log-probs, advantages and mask. half: log-probs of 16 bits."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip:
        return AMD
    if many_inputs:
        return NVIDIA_MANY_INPUTS
    return NVIDIA_HALF if half else NVIDIA


def programs_for(device: torch.device, config: Config, blocks: int) -> int:
    """Programs of the forward kernel: what fits on the device at once, and no more than there are blocks."""
    if device.type == "cpu":
        return 1
    return max(1, min(blocks, _units(device) * config.programs_per_unit))


def forward_options(config: Config) -> dict[str, int | bool]:
    """Triton's own keywords. Without fusion of a * b + c: d, v and the sums are rounded operation by operation."""
    options = {"num_warps": config.num_warps, "enable_fp_fusion": False, "launch_cooperative_grid": True}
    return options if config.max_registers is None else {**options, "maxnreg": config.max_registers}


def backward_options(config: Config) -> dict[str, int | bool]:
    return {"num_warps": config.backward_warps, "enable_fp_fusion": False}


@dataclass(frozen=True)
class LogitsConfig:
    """block_bytes: what one program reads of its row at a time. threads: those of num_warps warps. All powers of two."""

    block_bytes: int
    num_warps: int
    threads: int


# 4 KB on 256 threads are one load of 16 bytes a thread, with the next one on its way: 8 KB in flight. The forward's lane state, 8
# maxima and 8 sums a thread for bf16, brings it to 45 to 64 registers (sm_90), so that 4 or 5 programs share a
# multiprocessor: 32 to 40 KB in flight (see NVIDIA above). By reasoning; not yet measured.
NVIDIA_LOGITS = LogitsConfig(block_bytes=4096, num_warps=8, threads=256)
AMD_LOGITS = LogitsConfig(block_bytes=4096, num_warps=4, threads=256)
# Few operations for a large vocabulary, while one of a few thousand still has more than one block.
INTERPRETER_LOGITS = LogitsConfig(block_bytes=4096, num_warps=1, threads=32)


def logits_config(device: torch.device) -> LogitsConfig:
    if device.type == "cpu":
        return INTERPRETER_LOGITS
    return AMD_LOGITS if torch.version.hip else NVIDIA_LOGITS
