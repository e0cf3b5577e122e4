"""What a row of results says of where it was measured: device, threads, versions, commit, date."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import m2po_kernels

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def facts(device: str = "cpu") -> dict[str, str | int | None]:
    """The columns that every row of a run shares."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "m2po_kernels": m2po_kernels.__version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def device_name(device: str = "cpu") -> str:
    """The GPU's name, or the CPU's model with its cores and the vector instructions that torch found."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    simd = torch.backends.cpu.get_cpu_capability()
    return f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores, {simd}"


def slug(name: str) -> str:
    """`name` as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # AArch64 kernels list no model name


def version(package: str) -> str | None:
    """Of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Results are left out: a run that rewrites them is no change of what was measured.
        changed = git("status", "--porcelain", "--", ".", ":(exclude)bench/results", ":(exclude)README.md")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git checkout"
