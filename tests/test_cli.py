"""The command line as a whole: help, versions, one-line errors, what is imported when, and the exit codes of a process."""

from __future__ import annotations

import json
import sys

import pytest
from cli_helpers import fails, invoke, run

from m2po_kernels import __version__
from m2po_kernels.cli.rollouts import BUNDLED


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"m2po-kernels {__version__}\n"
    for args in ((), ("--help",)):
        result = invoke(*args)
        assert result.exit_code == 0
        assert all(name in result.stdout for name in ("doctor", "check", "inspect", "demo", "collect", "bench"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("doctor", "--nonsense"), "--nonsense"),
        (("inspect",), "Missing argument"),
        (("inspect", BUNDLED, "--m2-threshold", "abc"), "'--m2-threshold': expected a number, got 'abc'"),
        (("inspect", BUNDLED, "--m2-threshold", "-1"), "m2_threshold must be >= 0"),
        (("inspect", BUNDLED, "--m2-threshold", "nan"), "m2_threshold must be >= 0"),
        (("inspect", BUNDLED, "--plot", "x.png", "--no-plot"), "exclude each other"),
        (("check", "--backend", "nonsense"), "--backend must be one of eager"),
        (("check", "--device", "nonsense"), "--device 'nonsense' cannot be used"),
        (("bench", "--bench-dir", "/nonexistent"), "--bench-dir: /nonexistent is not a folder"),
    ],
)
def test_bad_options_are_one_line(args, says) -> None:
    assert says in fails(*args)


@pytest.mark.parametrize(
    "code",
    [
        "import m2po_kernels",
        "import m2po_kernels, m2po_kernels.cli",
    ],
)
def test_import_loads_no_library_of_the_cli(code) -> None:
    result = run(
        code=f"import sys, torch; before = set(sys.modules); {code}\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(new & {'typer', 'rich', 'matplotlib', 'pyarrow', 'safetensors', 'triton'})"
    )
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing) -> None:
    result = run(code=f"import sys; sys.modules[{missing!r}] = None; from m2po_kernels.cli import main; main()")
    assert result.returncode == 2
    assert result.stderr == f"m2po: {missing} not installed; run: pip install 'm2po-kernels[cli]'\n"


@pytest.mark.parametrize(("module", "file"), [("matplotlib", BUNDLED), ("safetensors", BUNDLED), ("pyarrow", "x.parquet")])
def test_without_one_library_of_the_extra(module, file, monkeypatch, tmp_path) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    message = fails("inspect", file, "--log-probs", "log_probs_step4")
    assert message == f"m2po: error: {module} is not installed; run: pip install 'm2po-kernels[cli]'"


def test_as_a_process(tmp_path) -> None:
    answer = run("doctor", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["versions"]["m2po-kernels"] == __version__
    wrong = run("inspect", tmp_path / "missing.parquet")
    assert wrong.returncode == 2
    assert wrong.stderr == f"m2po: error: {tmp_path / 'missing.parquet'}: no such file\n"
    # JSON on stdout stays clean although work is shown on stderr.
    right = run("inspect", BUNDLED, "--log-probs", "log_probs_step1", "--json", "--plot", tmp_path / "p.png")
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["metrics"]["dropped_tokens"] == 1
