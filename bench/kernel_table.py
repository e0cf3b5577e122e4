"""The table of docs/kernels.md: what the compilers made of all kernels, from the rows in bench/results/kernels.jsonl.

`python -m bench.triton_report` and `python -m bench.cuda_report` compile, and replace their own rows; `python -m bench.tables`
makes the table.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
ROWS = ROOT / "bench" / "results" / "kernels.jsonl"
Row = dict[str, str | int]
COLUMNS = {  # keys of a row, and their headings
    "kernel": "kernel",
    "chip": "chip",
    "registers": "registers",
    "spills": "spills",
    "parked": "parked",
    "shared": "shared memory, B",
    "wide_loads": "16-byte loads",
    "wide_stores": "16-byte stores",
}
CUDA = "CUDA "  # how the name of a kernel of csrc/cuda begins; the others are Triton's


def block(rows: list[Row]) -> str:
    """The table."""
    return "\n".join([_line(list(COLUMNS.values())), _line(["---"] * len(COLUMNS)), *map(line, rows)])


def line(row: Row) -> str:
    """One row of it."""
    return _line([str(row[key]) for key in COLUMNS])


def replace_rows(rows: list[Row], *, cuda: bool) -> None:
    """Puts `rows` in the place of those of the CUDA kernels (their names begin with CUDA), or of Triton's."""
    old = [json.loads(text) for text in ROWS.read_text().splitlines()]
    others = [row for row in old if row["kernel"].startswith(CUDA) != cuda]
    ordered = [*others, *rows] if cuda else [*rows, *others]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in ordered))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
