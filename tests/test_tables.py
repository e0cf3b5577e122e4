"""The tables of the documents are what their rows say; a stale one is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import kernel_table, report, roofline, tables, variants

ROOT = Path(__file__).parents[1]
# trl-step rows go into no page.
FILES = [file for file in sorted(tables.RESULTS.glob("*.jsonl")) if not file.stem.endswith("-trl-step")]
FACTS = {"device": "Some GPU", "backend": "cuda"}


def test_no_table_is_stale():
    assert tables.stale() == [], "run `python -m bench.tables`"
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize("end", ["-linear", "-logits", "-distributed", "-real-model", "kernels"])
def test_there_are_rows_of_every_kind_that_a_page_shows(end):
    """A page that says how to measure is not yet one that shows what was measured."""
    assert [file for file in FILES if file.stem.endswith(end)], f"no bench/results/*{end}.jsonl"


def test_no_page_waits_for_its_rows():
    """The words that stand where a table will be are gone. (Of GPUs there are no rows; docs/tuning.md says so in its own.)"""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *tables.RESULTS.glob("*.md")]
    assert not [str(page.relative_to(ROOT)) for page in pages if "Not measured yet" in page.read_text()]


def test_a_stale_table_is_found(monkeypatch, capsys):
    true = variants.block
    monkeypatch.setattr(variants, "block", lambda: true().replace("1,227", "1,228"))
    assert "docs/variants.md" in tables.stale()
    assert tables.main(["--check"]) == 1
    assert "docs/variants.md is stale, or its rows are missing: run `python -m bench.tables`" in capsys.readouterr().err


def test_a_changed_number_of_a_kernel_is_found(monkeypatch):
    true = kernel_table.block
    monkeypatch.setattr(kernel_table, "block", lambda rows: true([{**rows[0], "registers": 1}, *rows[1:]]))
    assert "docs/kernels.md" in tables.stale()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_missing_rows_are_found(file):
    """Of every file of rows that a page is made from: without it, that page is stale, whatever else stands there."""
    found = set(tables.stale([other for other in FILES if other != file]))
    assert found > set(tables.stale(FILES))
    pages = {"kernels": "docs/kernels.md", "-distributed": "docs/distributed.md", "-real-model": "docs/real-model.md"}
    pages |= {"-logits": "README.md", "-linear": f"bench/results/{file.stem}.md"}
    assert {page for end, page in pages.items() if file.stem.endswith(end)} <= found


def test_rows_of_kernels_are_replaced_by_their_own_report(tmp_path, monkeypatch):
    def row(kernel, registers):
        return dict.fromkeys(kernel_table.COLUMNS, 0) | {"kernel": kernel, "chip": "sm_90", "registers": registers}

    monkeypatch.setattr(kernel_table, "ROWS", tmp_path / "kernels.jsonl")
    kernel_table.ROWS.write_text("")
    kernel_table.replace_rows([row("CUDA forward, plain", 1)], cuda=True)
    kernel_table.replace_rows([row("select, plain, fp32", 2)], cuda=False)
    kernel_table.replace_rows([row("CUDA forward, plain", 3)], cuda=True)
    rows = [json.loads(line) for line in kernel_table.ROWS.read_text().splitlines()]
    assert [(row["kernel"], row["registers"]) for row in rows] == [("select, plain, fp32", 2), ("CUDA forward, plain", 3)]
    assert kernel_table.block(rows).splitlines()[2] == "| select, plain, fp32 | sm_90 | 2 | 0 | 0 | 0 | 0 | 0 |"


def test_variants_agree_with_the_worked_figures():
    """Algorithm 1's column is the published number of dropped tokens."""
    lines = [line for line in variants.block().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    dropped = {row[0]: row[2].split(" ")[0] for row in rows}
    assert dropped == {"0, in bf16": "0", "1": "1", "4": "425", "16": "1,227"}


def test_figures_of_the_variants_come_from_the_recorded_rollouts():
    """No sentence of the page holds a count that is not computed: outside the table only versions, links and tau have digits."""
    page = (ROOT / "docs" / "variants.md").read_text()
    before, rest = page.split(report.BEGIN)
    words = re.sub(r"```.*?```", "", before + rest.split(report.END)[1], flags=re.DOTALL)
    assert not re.findall(r"\d,\d{3}|\b\d{3}\b(?![\w\]])", re.sub(r"\[[^\]]*\]\([^)]*\)", "", words))
    assert "the gradient of 563 tokens where Algorithm 1 drops 425" in variants.block()


def test_roofline_of_made_up_rows():
    gpu = {**FACTS, "what": "loss", "case": "loss/1024/0.5", "forward_ms": 0.5, "backward_ms": 1.0}
    gpu |= {"forward_percent_of_copy": 91.4, "backward_percent_of_copy": 80.0}
    cpu = {"device": "Some CPU", "backend": "native", "what": "forward", "tokens": 1024, "share": 0.005, "median_ms": 2.0}
    text = roofline.block({Path("x-gpu-tokens.jsonl"): [gpu], Path("cpu.jsonl"): [{**cpu, "times_copy": 0.5}]})
    assert "| Some GPU | loss, forward | loss/1024/0.5 | cuda | 0.5 | 91 % |" in text
    assert "| Some GPU | loss, backward | loss/1024/0.5 | cuda | 1 | 80 % |" in text
    assert "| Some CPU | forward | 2^10 tokens, 0.5% candidates | native | 2 | 76 % |" in text  # 13 / 34 / 0.5
    assert "not measured yet" not in text
    assert "GPUs: not measured yet" in roofline.block({})


def test_tuning_numbers_are_read_from_their_files():
    text = roofline.block({})
    assert "| 90 | 768 | 72 | H100, H200: 228 KB" in text
    assert "| NVIDIA | 1024 | 8 | 2 | 128 | 2048 | 8 |" in text
    # Peaks have their source on the page, not in the code alone.
    assert "| B200 | 7,700 | 1.77 | 4.09 | 485 |" in text
    assert "pull/193471" in text
    assert "| H200 SXM | 4,800 | 2.84 | 6.55 | 778 |" in text  # 13 B and 30 B x 2^20, 3 x 2 B x 4096 x 151,936, over 4.8 TB/s


def test_files_of_other_commands_are_left_alone(tmp_path):
    for name, row, own in [
        ("a.jsonl", '{"what": "select"}', True),
        ("a-logits.jsonl", '{"case": "logits/1x1/bf16"}', True),
        ("a-linear.jsonl", '{"case": "linear/1"}', False),
        ("a-other.jsonl", '{"what": "step"}', False),
        ("empty.jsonl", "", False),
    ]:
        file = tmp_path / name
        file.write_text(row)
        assert report.mine(file) is own, name
