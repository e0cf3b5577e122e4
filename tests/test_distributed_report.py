"""The tables of docs/distributed.md, from made-up rows; and that the bytes the page counts are those that solve() hands over."""

from __future__ import annotations

import json

import pytest

from bench import report_distributed
from bench.report import BEGIN, END

FACTS = {"device": "Some CPU", "torch": "2.13", "m2po_kernels": "0", "commit": "abc", "date": "now"}
TIMES = {"gather_and_sort": 400.0, "add": 4.0, "solve": 16.0, "solve_local": 12.0}


def test_page(tmp_path):
    rows = [
        {"ranks": 2, "tokens_per_rank": n, "share": 0.005, "backend": name, "median_ms": ms, "collectives": 4, **FACTS}
        | {"buffer_bytes": 82080 if name == "solve" else 8 * n}
        for n in (1 << 16, 1 << 20, 1 << 22)
        for name, ms in TIMES.items()
    ]
    rows += [row | {"ranks": 4, "median_ms": 3 * row["median_ms"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    assert report_distributed.main([str(tmp_path / "rows.jsonl"), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| 2 | 2^20 | 0.5% | 400 | 8,388,608 | 4 | 16 | 82,080 | 25.0x | 20.0x |" in text
    assert "s = 0.5 ms" in text  # (16 - 12) / 4 collectives / 2 steps
    assert "| 2^20 | 12 | 52 | 4,104 | 204,800 | 4,290,772,992 B | 245,679 B |" in text
    assert "| 2^22 | 12 |" not in text  # 2^32 tokens are more than one selection takes
    assert "it says 24 ms around a ring, and 48 were measured" in text
    assert text.startswith("before")
    assert text.endswith("after\n")


def test_no_rows_is_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no rows"):
        report_distributed.main([str(tmp_path / "rows.jsonl")])
