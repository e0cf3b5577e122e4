"""The oracle check of `m2po check` where the extra `cli` is not installed: `python -m bench.check --device cuda`.

Torch alone is needed; without safetensors the bundled rollouts are left out, which is said. Exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import torch

from m2po_kernels import dispatch
from m2po_kernels.cli.batches import all_cases
from m2po_kernels.cli.comparisons import compare_all


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="writes the rows there as JSON lines")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    names = []
    for name in dispatch.BACKENDS:
        reason = dispatch.why_not(name, device)
        if reason is None:
            names.append(name)
        else:
            print(f"{name} did not run: {reason}")
    rollouts = importlib.util.find_spec("safetensors") is not None
    if not rollouts:
        print("the bundled rollouts did not run: safetensors is not installed")
    rows, messages = compare_all(all_cases(rollouts), names, device)
    for row in rows:
        masks = f"masks {row.masks_equal}/{row.masks_compared}" if row.masks_compared else "no masks"
        errors = f"loss error {row.loss_error:.1e}, gradient error {row.grad_error:.1e}"
        verdict = "ok" if row.ok else f"{row.failures} FAILED"
        print(f"{row.backend:8} {row.group:24} {row.cases:4} cases, {row.declined} declined, {masks}, {errors}: {verdict}")
    for message in messages:
        print(f"FAILED {message}")
    if args.out is not None:
        args.out.write_text("".join(json.dumps(asdict(row) | {"ok": row.ok}) + "\n" for row in rows))
    return int(any(not row.ok for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
