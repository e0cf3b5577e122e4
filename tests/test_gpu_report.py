"""The page of a GPU run, from made-up rows: ratios, percentages, and a failure that is shown and not hidden."""

from __future__ import annotations

import json

import pytest

from bench import report, report_gpu
from bench.device_time import OUT_OF_MEMORY, Rows, attempt

FACTS = {
    "device": "Some GPU",
    "torch": "2.11",
    "triton": "3.6",
    "python": "3.12",
    "m2po_kernels": "0",
    "commit": "abc",
    "date": "now",
}
TIMES = {"timed_by": "graph", "wall_ms": 1.0, "peak_mb": 2.0, "forward_percent_of_copy": 90.0, "backward_percent_of_copy": 88.0}


def row(backend: str, kind: str, forward: float, **more: object) -> dict:
    made = {"case": f"loss/1024/{kind}", "what": "loss", "tokens": 1024, "kind": kind, "backend": backend}
    return {**made, "forward_ms": forward, "backward_ms": 0.5, **TIMES, **FACTS, **more}


def test_page(tmp_path):
    rows = [row("triton", "0.005", 0.5), row("sort_based", "0.005", 9.5, timed_by="events"), row("triton", "equal", 2.5)]
    rows += [row("cuda", "0.005", 0.25), {**row("eager", "equal", 1.0), "error": OUT_OF_MEMORY}]
    (tmp_path / "some-gpu-gpu-tokens.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    readme = tmp_path / "README.md"
    readme.write_text("untouched")
    assert report.main([str(tmp_path / "some-gpu-gpu-tokens.jsonl"), "--readme", str(readme)]) == 0
    page = (tmp_path / "some-gpu-gpu.md").read_text()
    assert "| loss/1024/0.005 | triton | 0.5 | 90.0 | 0.5 | 88.0 | graph | 1.0 | 2.0 | 10.0x |  |" in page
    assert "| loss/1024/equal | eager | out of memory |" in page
    assert "- triton, 1024 tokens, equal: 3.00 times the time at 0.5 % candidates" in page
    assert "- 1024 tokens, 0.005: 0.75 times the time of triton" in page
    assert readme.read_text() == "untouched"


def test_no_rows_is_an_error(tmp_path):
    (tmp_path / "x-gpu-logits.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no rows"):
        report_gpu.page([tmp_path / "x-gpu-logits.jsonl"])


def test_rows_stay_when_a_contender_fails(tmp_path):
    """Each row is in the file at once; an own backend's error fails the run, a peer's lack of memory does not."""
    import torch

    def raises(error: Exception):
        def build() -> dict:
            raise error

        return build

    rows = Rows(tmp_path / "r.jsonl", FACTS)
    attempt(rows, {"case": "c", "backend": "log_softmax"}, raises(torch.OutOfMemoryError("too much")))
    assert rows.finish() == 0
    attempt(rows, {"case": "c", "backend": "triton"}, lambda: {"forward_ms": 1.0, "peak_mb": None})
    attempt(rows, {"case": "c", "backend": "triton"}, raises(RuntimeError("no such thing\nmore")))
    assert rows.finish() == 1
    written = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r.get("error") for r in written] == [OUT_OF_MEMORY, None, "RuntimeError: no such thing"]
