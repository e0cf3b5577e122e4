"""From the rows of a GPU run to a page beside them: tokens, logits, what failed. bench.report calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENS, LOGITS = "-gpu-tokens", "-gpu-logits"  # the ends of the names of files that bench.gpu_tokens and bench.gpu_logits wrote
# Task -> what the speed-ups are over.
BASES = {
    "select": ("sort_based", "sort_static"),
    "loss": ("sort_based", "sort_static"),
    "log_probs": ("log_softmax", "trl"),
    "grpo": ("torch", "liger"),
}


def is_gpu(path: Path) -> bool:
    """Whether a file of rows is one of a GPU run."""
    return path.stem.endswith((TOKENS, LOGITS))


def page(files: list[Path]) -> str:
    """The page of one GPU: `files` are its rows of tokens, of logits, or of both."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if not rows:
        raise SystemExit(f"{', '.join(map(str, files))}: no rows; expected JSON lines as bench/gpu.sh writes them")
    facts = rows[0]
    lines = [
        f"# {facts['device']}",
        "",
        f"torch {facts['torch']}, triton {facts['triton']}, Python {facts['python']}, m2po_kernels {facts['m2po_kernels']} at "
        f"{facts['commit']}; {facts['date']}. Made by `python -m bench.report` from the rows beside it.",
        "",
        "Medians in ms. Forward and backward are device time (graph: events over the replay of a CUDA graph; events: around the",
        "calls, gaps included), L2 emptied before; the wall is of both as called. %: of a copy of as many bytes in the same run.",
        "Ratios are of device times of forward and backward together.",
        "",
    ]
    for task in BASES:
        own = [row for row in rows if row["what"] == task]
        if own:
            lines += [f"## {task}", "", *_table(task, own), ""]
    return "\n".join([*lines, *_targets(rows), ""])


def _table(task: str, rows: list[dict[str, Any]]) -> list[str]:
    head = [
        "case",
        "backend",
        "forward",
        "%",
        "backward",
        "%",
        "timed by",
        "wall",
        "peak, MB",
        *(f"over {b}" for b in BASES[task]),
    ]
    lines = [_line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    for case in dict.fromkeys(row["case"] for row in rows):
        group = {row["backend"]: row for row in rows if row["case"] == case}
        for name, row in group.items():
            if row.get("error"):
                lines.append(_line([case, name, row["error"], *[""] * (len(head) - 3)]))
                continue
            ratios = [_over(group.get(base), row) for base in BASES[task]]
            cells = [row[k] for k in ("forward_ms", "forward_percent_of_copy", "backward_ms", "backward_percent_of_copy")]
            cells += [row["timed_by"], row["wall_ms"], row["peak_mb"]]
            lines.append(_line([case, name, *("" if c is None else str(c) for c in cells), *ratios]))
    return lines


def _targets(rows: list[dict[str, Any]]) -> list[str]:
    """The cost of many candidates: each kind of batch against 0.5 % candidates, of the same length. And cuda beside triton."""
    own = [row for row in rows if row["what"] == "loss" and row["backend"] in ("cuda", "triton") and not row.get("error")]
    found = {(row["backend"], row["tokens"], row["kind"]): row for row in own}
    lines, beside = [], []
    for (name, tokens, kind), row in found.items():
        healthy, triton = found.get((name, tokens, "0.005")), found.get(("triton", tokens, kind))
        if healthy and kind != "0.005":
            ratio = device_ms(row) / device_ms(healthy)
            lines.append(f"- {name}, {tokens} tokens, {kind}: {ratio:.2f} times the time at 0.5 % candidates")
        if name == "cuda" and triton:
            beside.append(f"- {tokens} tokens, {kind}: {device_ms(row) / device_ms(triton):.2f} times the time of triton")
    many = ["## Many candidates (loss and gradient; at most 4 is wanted)", "", *lines, ""] if lines else []
    return many + (["## cuda beside triton (loss and gradient; at most 1 is wanted)", "", *beside] if beside else [])


def device_ms(row: dict[str, Any]) -> float:
    """Forward and backward together."""
    return row["forward_ms"] + (row["backward_ms"] or 0.0)


def _over(base: dict[str, Any] | None, row: dict[str, Any]) -> str:
    if base is None or base.get("error") or base is row:
        return ""
    return f"{device_ms(base) / device_ms(row):.1f}x"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
