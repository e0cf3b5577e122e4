"""Every table of the documents between bench markers, and the pages beside their rows: `python -m bench.tables` writes them.

    README.md                  bench.report, from the rows of bench.compare and bench.logits
    bench/results/*.md         bench.report and bench.linear_report, from the rows beside them
    docs/distributed.md        bench.report_distributed, from the rows of bench.distributed
    docs/kernels.md            bench.kernel_table, from the rows of bench.triton_report and bench.cuda_report
    docs/real-model.md         bench.real_model_report, from the rows of bench.real_model
    docs/tuning.md             bench.roofline, from all rows, and the numbers of the tuning files
    docs/variants.md           bench.variants, computed

A page that has the markers, or lies beside its rows, and for which there are no rows is found as well. The tables of
docs/stale.md are those of `m2po stale --report`; tests/test_stale_report.py holds them to their rows. Plots are not compared:
matplotlib draws the same rows in other bytes on another machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import kernel_table, linear_report, real_model_report, report, report_distributed, roofline, variants
from .machine import RESULTS, ROOT


def made(files: list[Path] | None = None) -> dict[Path, str]:
    """What each page should be by the rows in `files`; None: all that there are."""
    files = sorted(RESULTS.glob("*.jsonl")) if files is None else files
    pages = report.made([file for file in files if report.mine(file)], ROOT / "README.md")
    for file in files:
        if file.stem.endswith("-linear"):
            pages[file.with_suffix(".md")] = linear_report.page(_rows(file), file.with_suffix(".png").name)
        for end, maker in (("-distributed", report_distributed), ("-real-model", real_model_report)):
            if file.stem.endswith(end):
                pages[maker.PAGE] = _with(maker.PAGE, maker.block(_rows(file)))
        if file == kernel_table.ROWS:
            pages[kernel_table.PAGE] = _with(kernel_table.PAGE, kernel_table.block(_rows(file)))
    pages[roofline.PAGE] = _with(roofline.PAGE, roofline.block({file: _rows(file) for file in files}))
    variants_page = ROOT / "docs" / "variants.md"
    pages[variants_page] = _with(variants_page, variants.block())
    return pages


def stale(files: list[Path] | None = None) -> list[str]:
    """The pages that are not what they should be, by their path in the repository."""
    pages = made(files)
    old = [page for page, text in pages.items() if not page.is_file() or page.read_text() != text]
    return [str(page.relative_to(ROOT)) for page in [*old, *_without_rows(pages)]]


def _without_rows(pages: dict[Path, str]) -> list[Path]:
    """The pages with a place for a table that nothing was made for: their rows were never committed, or are gone."""
    marked = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    own = [page for page in marked if report.BEGIN in page.read_text()] + sorted(RESULTS.glob("*.md"))
    return [page for page in own if page not in pages]


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
        old = stale()
        for page in old:
            print(f"{page} is stale, or its rows are missing: run `python -m bench.tables`", file=sys.stderr)
        return 1 if old else 0
    pages = made()
    for page, text in pages.items():
        page.write_text(text)
    for page in _without_rows(pages):
        print(f"{page.relative_to(ROOT)} has no rows in bench/results and stays as it is", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
