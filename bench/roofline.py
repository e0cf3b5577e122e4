"""The tables of docs/tuning.md: how near each path comes to what its bytes or products allow, and the numbers set for each chip.

`python -m bench.tables` puts them there. A path's share of the roofline is taken within one run: the time that a copy (or the
products alone) would need for what must move, over the time that was measured.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from m2po_kernels.backends.triton import tuning

from .machine import ROOT
from .report import LOGITS

PAGE = ROOT / "docs" / "tuning.md"
CUDA = ROOT / "csrc" / "cuda" / "tuning.cuh"
OURS = ("native", "eager", "cuda", "triton", "m2po")
COPY_TRAFFIC = 34  # bytes that bench.compare's copy of 17 B a token moves, read and written
# What must move, B a token: fp32 log-probs, behaviour log-probs, advantages a token, a bool mask; the gradient in fp32.
MUST_MOVE = {"select": 14, "forward": 13, "forward_backward_reused": 30}
# Peak GB/s of the memory, by the sources that stand under the table.
PEAK = {"A100 80GB SXM": 2039, "RTX 4090": 1008, "H100 SXM": 3350, "H200 SXM": 4800, "B200": 7700, "MI300X": 5300}
SOURCES = (
    "Peaks: the vendors' data sheets of each chip, that of AMD for MI300X, else NVIDIA's. Of B200 some pages say 8,000: NVIDIA's "
    "data sheet of Blackwell gives 7,700 for a GPU of an HGX B200, as [PyTorch's table of devices]"
    "(https://github.com/pytorch/pytorch/pull/193471) quotes it (August 2026); bus and clock as its driver reports them come to "
    "[7,672](https://github.com/pytorch/ao/pull/4002)."
)
LOGITS_SHAPE = (4096, 151_936)  # bf16
Row = dict[str, Any]


def block(rows_of: dict[Path, list[Row]]) -> str:
    """rows_of: every file of bench/results with its rows."""
    measured = [line for file, rows in rows_of.items() for line in _lines(file, rows)]
    head = ["device", "path", "batch", "backend", "ms", "of the roofline"]
    lines = ["### Share of the roofline", ""]
    lines += [_line(head), _line(["---"] * 4 + ["---:"] * 2), *map(_line, measured)] if measured else ["Not measured yet."]
    gpus = any(row.get("forward_percent_of_copy") for rows in rows_of.values() for row in rows)
    if not gpus:
        lines += ["", "GPUs: not measured yet; `bench/gpu.sh` makes the rows."]
    return "\n".join([*lines, "", *_chips(), "", *_cuda(), "", *_triton()])


def _lines(file: Path, rows: list[Row]) -> list[list[str]]:
    """The lines of one file: of this package alone, and of each kind of batch the largest."""
    own = [row for row in rows if row.get("backend") in OURS and not row.get("error")]
    lines = []
    if any("forward_percent_of_copy" in row for row in own):
        for row in own:
            for part in ("forward", "backward"):
                if row.get(f"{part}_percent_of_copy") is not None:
                    share = f"{row[f'{part}_percent_of_copy']:.0f} %"
                    lines.append(
                        [row["device"], f"{row['what']}, {part}", row["case"], row["backend"], _ms(row[f"{part}_ms"]), share]
                    )
    elif file.stem.endswith(LOGITS):
        for row in own:  # forward reads the logits; backward reads and writes them; the copy reads and writes them
            case = row["case"].removeprefix("logits/").replace("/", " ")
            path = "log-probs from logits, forward + backward"
            lines.append([row["device"], path, case, row["backend"], _ms(row["median_ms"]), f"{150 / row['times_copy']:.0f} %"])
    elif any("times_products" in row for row in own):
        for row in own:
            if row.get("times_products"):
                path, shape = (
                    "from hidden states, forward + backward",
                    f"{row['rows']}x{row['width']}x{row['vocab']} {row['dtype']}",
                )
                case = f"{shape}, {row['share_without_advantage']:.0%} without advantage"
                share = f"{100 / row['times_products']:.0f} % of the products alone"
                lines.append([row["device"], path, case, row["backend"], _ms(row["median_ms"]), share])
    else:
        largest = max((row["tokens"] for row in own if row.get("what") in MUST_MOVE), default=0)
        for row in own:
            if row.get("what") in MUST_MOVE and row["tokens"] == largest and row["backend"] != "eager":
                share = 100 * MUST_MOVE[row["what"]] / COPY_TRAFFIC / row["times_copy"]
                case = f"2^{largest.bit_length() - 1} tokens, {row['share']:.1%} candidates"
                path = row["what"].replace("forward_backward_reused", "forward + backward, one gradient buffer")
                lines.append([row["device"], path, case, row["backend"], _ms(row["median_ms"]), f"{share:.0f} %"])
    return lines


def _chips() -> list[str]:
    """What each chip's memory would need, by arithmetic."""
    rows, columns = LOGITS_SHAPE
    moved = {
        "loss, forward, 2^20 tokens": MUST_MOVE["forward"] << 20,
        "forward + backward": MUST_MOVE["forward_backward_reused"] << 20,
        f"log-probs of {rows} x {columns} bf16 logits, forward + backward": 3 * 2 * rows * columns,
    }
    lines = [
        "### Rooflines of chips",
        "",
        "By arithmetic: the bytes that must move at the memory's published peak, in microseconds. No copy reaches the peak, and",
        "small batches stay in a cache or are bound by the launch. Not times of these kernels.",
        "",
        _line(["chip", "peak, GB/s", *moved]),
        _line(["---", *["---:"] * (1 + len(moved))]),
    ]
    lines += [_line([chip, f"{peak:,}", *(_ms(n / peak / 1e3) for n in moved.values())]) for chip, peak in PEAK.items()]
    return [*lines, "", SOURCES]


def _cuda() -> list[str]:
    """From csrc/cuda/tuning.cuh, each with the reason that stands beside it."""
    text = CUDA.read_text()
    threads, blocks = (int(re.search(rf"{name} = (\d+);", text)[1]) for name in ("kThreadsPerBlock", "kBlocksPerMultiprocessor"))
    lines = [
        "### CUDA kernels, by chip",
        "",
        f"{threads} threads a block, {blocks} blocks on a multiprocessor; candidates of a warp that stay in shared memory:",
        "",
        "| from sm_ | candidates a warp | lists of a block, KB | chips, and why |",
        "| ---: | ---: | ---: | --- |",
    ]
    for arch, room, why in re.findall(r"\{(\d+), (\d+)\},\s*// (.*)", text):
        lines.append(_line([arch, room, f"{int(room) * 12 * threads // 32 / 1024:.0f}", why]))
    return lines


def _triton() -> list[str]:
    """From m2po_kernels/backends/triton/tuning.py, where the reasons stand."""
    names = [field.name for field in fields(tuning.Config)]
    configs = {
        "NVIDIA": tuning.NVIDIA,
        "NVIDIA, every input": tuning.NVIDIA_MANY_INPUTS,
        "NVIDIA, 16-bit log-probs": tuning.NVIDIA_HALF,
        "AMD": tuning.AMD,
    }
    lines = [
        "### Triton kernels, by family",
        "",
        _line(["family", *(f"`{n}`" for n in names)]),
        _line(["---", *["---:"] * len(names)]),
    ]
    for name, config in configs.items():
        lines.append(_line([name, *(str(getattr(config, n) or "free") for n in names)]))
    return lines


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
