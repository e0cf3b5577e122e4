"""The tests on a GPU, a process for each file: most of their time goes into compiling kernels, on the host. Exits 1 if any fails.

`python bench/gpu_tests.py [DEVICE-BACKEND]`; default: cuda. The argument is part of the names of the tests that are run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The slowest first. test_gpu.py holds what only a GPU can do.
FILES = (
    "test_loss.py",
    "test_packed.py",
    "test_ops.py",
    "test_logits.py",
    "test_logits_autograd.py",
    "test_gpu.py",
    "test_properties.py",
    "test_worked_cases.py",
    "test_selection.py",
    "test_accumulate.py",
    "test_accumulate_misuse.py",
    "test_agreement.py",
    "test_large.py",
)


def main() -> int:
    """Runs all files at once: with as many processes as files the host is busy until the longest is done."""
    chosen = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    running = []
    for file in FILES:
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read below, when the process is done)
        keyword = ["-k", chosen] if file != "test_gpu.py" else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *keyword, f"tests/{file}"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": path}
        running.append((file, log, subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)))
    failed = False
    for file, log, process in running:
        code = process.wait()
        log.seek(0)
        lines = log.read().splitlines()
        failed |= code != 0
        shown = lines if code else lines[-1:]
        print(f"{file}: exit code {code}", *shown[-60:], sep="\n  ", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
