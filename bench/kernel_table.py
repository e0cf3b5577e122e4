"""docs/kernels.md holds one table of what the compilers made of all kernels; each report replaces its own rows there."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
HEAD = (
    "| kernel | chip | registers | spills | parked | shared memory, B | 16-byte loads | 16-byte stores |\n" + "| --- " * 8 + "|\n"
)
END = "\n<!-- end of table -->\n"
_CUDA = "| CUDA "  # how a row of csrc/cuda begins; the others are Triton's


def replace_rows(rows: list[str], *, cuda: bool) -> None:
    """Puts `rows` in the place of those of the CUDA kernels (their names begin with CUDA), or of Triton's."""
    before, rest = DOCUMENT.read_text().split(HEAD)
    old, after = rest.split(END)
    others = [row for row in old.splitlines() if row.startswith(_CUDA) != cuda]
    ordered = [*others, *rows] if cuda else [*rows, *others]
    DOCUMENT.write_text(before + HEAD + "".join(f"{row}\n" for row in ordered) + END + after)
