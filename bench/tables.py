"""Every table of the documents that is made from rows or computed: `python -m bench.tables` writes them.

    README.md                  bench.report, from the rows of bench.compare and bench.logits
    bench/results/*.md         bench.report and bench.linear_report, from the rows beside them
    docs/distributed.md        bench.report_distributed, from the rows of bench.distributed
    docs/real-model.md         bench.real_model_report, from the rows of bench.real_model
    docs/tuning.md             bench.roofline, from all rows, and the numbers of the tuning files
    docs/variants.md           bench.variants, computed

Plots are not compared: matplotlib draws the same rows in other bytes on another machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import linear_report, real_model_report, report, report_distributed, roofline, variants
from .machine import RESULTS, ROOT


def made() -> dict[Path, str]:
    """What each page should be."""
    files = sorted(RESULTS.glob("*.jsonl"))
    pages = report.made([file for file in files if report.mine(file)], ROOT / "README.md")
    for file in files:
        if file.stem.endswith("-linear"):
            pages[file.with_suffix(".md")] = linear_report.page(_rows(file), file.with_suffix(".png").name)
        for end, maker in (("-distributed", report_distributed), ("-real-model", real_model_report)):
            if file.stem.endswith(end):
                pages[maker.PAGE] = _with(maker.PAGE, maker.block(_rows(file)))
    pages[roofline.PAGE] = _with(roofline.PAGE, roofline.block({file: _rows(file) for file in files}))
    variants_page = ROOT / "docs" / "variants.md"
    pages[variants_page] = _with(variants_page, variants.block())
    return pages


def stale() -> list[str]:
    """The pages that are not what they should be, by their path in the repository."""
    return [str(page.relative_to(ROOT)) for page, text in made().items() if not page.is_file() or page.read_text() != text]


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _with(page: Path, block: str) -> str:
    return report.put_between_markers(page.read_text(), block, str(page))


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is not what its rows say")
    args = parser.parse_args(argv)
    if args.check:
        pages = stale()
        for page in pages:
            print(f"{page} is stale: run `python -m bench.tables`", file=sys.stderr)
        return 1 if pages else 0
    for page, text in made().items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
