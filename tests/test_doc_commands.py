"""Every command that the documents tell a reader to type is run by a test, or checked to exist as it is written.

Taken from: shell blocks, steps of workflows, indented blocks, and what stands in backticks and begins as a command
(doc_blocks.commands). A line of a shell block that is none of the following fails the test.

| command | here | run by |
| --- | --- | --- |
| `m2po doctor`, `m2po inspect` | run as written, on files made for it | and test_cli_doctor.py, test_cli_inspect.py |
| `m2po check`, `demo`, `bench` | parsed by the command itself: options, values, arguments | test_cli_check.py, test_cli_demo.py |
| any other `m2po` command | parsed likewise | its own tests |
| `make TARGET` | the target exists | lint, docs, demo and test: `.ci/run`; wheel: ci.yml; test-slow: weekly.yml; else by hand |
| `python -m bench.X` | answers `--help`, and knows each option | gpu.sh runs those for GPUs |
| `python -m pytest FILE`, `python FILE` | the file exists | |
| `bench/gpu.sh`, `.ci/run` | exists, can be executed, and is right Bash | CI |
| `pip install` | each extra of this package exists; packages are not installed | test_package.py installs the package |
| `git`, `cd`, `pre-commit`, `apt-get`, `export` | taken as they are | |
| commands of trainers, in docs/integrations and examples | taken as they are | tests/integrations, with the real packages |
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_helpers import PNG, invoke
from doc_blocks import ROOT, Command, commands, pages

from m2po_kernels.cli.app import app
from m2po_kernels.cli.rollouts import BUNDLED

if sys.version_info >= (3, 11):
    import tomllib

COMMANDS = [command for page in pages() for command in commands(page)]
TYPER = typer.main.get_command(app)
AS_THEY_ARE = {"git", "cd", "pre-commit", "apt-get", "export", "sudo"}
OF_TRAINERS = {"swift", "megatron", "ray", "accelerate", "torchrun", "trl", "areal", ".", "source"}
FILES = ("rollouts.safetensors", "rollouts.parquet", "rollouts.jsonl")


def words(command: Command) -> list[str]:
    """Without variables before it, and without the folder of .venv's programs."""
    parts = shlex.split(command.text)
    while re.fullmatch(r"[A-Z_0-9]+=.*", parts[0]):
        parts.pop(0)
    return [parts[0].removeprefix(".venv/bin/"), *parts[1:]]


def of(*programs: str) -> list[Command]:
    found = [command for command in COMMANDS if words(command)[0] in programs]
    return list({command.text: command for command in found}.values())


def ids(command: Command) -> str:
    return f"{command.where}: {command.text}"


def test_every_command_is_of_a_known_kind():
    kinds = {"make", "m2po", "python", "python3", "pip", "bench/gpu.sh", ".ci/run", *AS_THEY_ARE}
    for command in COMMANDS:
        trainers = "integrations/" in command.where or "examples/" in command.where
        known = kinds | OF_TRAINERS if trainers else kinds
        assert words(command)[0] in known, f"{ids(command)}: say at the top of {Path(__file__).name} how it is checked"
    assert len(of("m2po")) > 10 < len(of("make", "python"))


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    named = {name for line in re.findall(r"^([a-z][\w %-]*):(?!=)", text, re.MULTILINE) for name in line.split()}
    adapters = {f"test-{folder.parent.name}" for folder in ROOT.glob("tests/integrations/*/requirements.txt")}
    return (named - {"test-%"}) | adapters


@pytest.mark.parametrize("command", of("make"), ids=ids)
def test_make_targets_exist(command):
    asked = [word for word in words(command)[1:] if "=" not in word and not word.startswith("-")]
    missing = set(asked) - targets()
    if "integrations/" in command.where or "examples/" in command.where:  # an adapter's tests may be in another checkout
        missing = {name for name in missing if not name.startswith("test-")}
    assert not missing


@pytest.mark.parametrize("command", of("m2po"), ids=ids)
def test_m2po_parses_it(command):
    """As the command line itself does, without running it. A mention in a sentence may leave out the arguments."""
    parts = words(command)[1:]
    names = [name.rstrip(",") for name in parts] if any(p.endswith(",") for p in parts) else parts[:1]
    for name in names:
        assert name in TYPER.commands, f"m2po has no command {name!r}; it has {sorted(TYPER.commands)}"
    if len(names) > 1:
        return
    given, known = parts[1:], TYPER.commands[names[0]]
    if command.whole:
        known.make_context(names[0], list(given))
    else:
        options = {flag for parameter in known.params for flag in parameter.opts}
        assert {word.split("=")[0] for word in given if word.startswith("-")} <= options | {"--help"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the files that the pages speak of: eight sequences of the recorded ones, columns named as in each example."""
    from pyarrow import parquet, table
    from safetensors import safe_open
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("files")
    with safe_open(BUNDLED, framework="pt") as file:
        whole = {name: file.get_tensor(name)[:8].contiguous() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    whole["log_probs"] = whole["log_probs_step4"].clone()
    save_file(whole, made / FILES[0])
    lists = {name: whole[name].tolist() for name in ("log_probs", "behavior_log_probs", "advantages", "mask")}
    renamed = {"log_probs": "logprobs", "behavior_log_probs": "vllm_logprobs"}
    parquet.write_table(table({renamed.get(name, name): rows for name, rows in lists.items()}), made / FILES[1])
    rows = (dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True))
    (made / FILES[2]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "m2po_kernels").symlink_to(ROOT / "m2po_kernels")
    return made


def can_run(command: Command) -> bool:
    """Whether all that it needs is here: `m2po doctor`, and `m2po inspect` of a file of `folder`."""
    name, *given = words(command)[1:]
    return command.whole and (name == "doctor" or (name == "inspect" and given[0].startswith((*FILES, "m2po_kernels/"))))


@pytest.mark.parametrize("command", [c for c in of("m2po") if can_run(c)], ids=ids)
def test_m2po_runs_it(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    asked = words(command)[1:]
    result = invoke(*asked)
    assert result.exit_code == 0, result.output
    if "--json" in asked:
        json.loads(result.stdout)
    if "--plot" in asked:
        assert Path(asked[asked.index("--plot") + 1]).read_bytes().startswith(PNG)


def help_of(module: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ends:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert ends.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
@pytest.mark.parametrize("command", of("python", "python3"), ids=ids)
def test_python_has_it(command, monkeypatch, capsys):
    parts = words(command)[1:]
    if parts[0] != "-m":
        assert command.where.startswith(("docs/integrations", "examples")) or (ROOT / parts[0]).is_file()
        return
    module, given = parts[1], parts[2:]
    if module == "pytest":
        assert all((ROOT / word).exists() for word in given if not word.startswith("-") and "/" in word)
    elif module.startswith("bench."):
        options = {word.split("=")[0] for word in given if word.startswith("-")}
        text = help_of(module, monkeypatch, capsys)
        assert options <= set(re.findall(r"--?[a-z][\w-]*", text)), f"{module} has no such option"
    else:
        trainers = "integrations/" in command.where or "examples/" in command.where
        assert trainers or module in ("venv", "m2po_kernels")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
@pytest.mark.parametrize("command", of("pip"), ids=ids)
def test_pip_extras_exist(command):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:^|\s)(?:\.|m2po-kernels)\[([\w,-]+)\]", " ".join(words(command))):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("command", of("pip"), ids=ids)
def test_pip_is_not_sent_to_look_for_this_package(command):
    """No index has it (yet): in a fresh environment only a clone can be installed."""
    assert not any(word.startswith(("m2po-kernels", "m2po_kernels")) for word in words(command))


@pytest.mark.parametrize("command", of("bench/gpu.sh", ".ci/run"), ids=ids)
def test_scripts_are_there(command):
    script = ROOT / words(command)[0]
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_ci_runs_what_the_table_says():
    text = (ROOT / ".ci" / "run").read_text()
    assert all(f"\nmake {target}\n" in text + "\n" for target in ("lint", "docs", "demo", "test"))
    workflows = ROOT / ".github" / "workflows"
    assert "make wheel" in (workflows / "ci.yml").read_text()
    # What pyproject.toml leaves out by default is asked for by something that runs by itself.
    assert re.search(r"^test-slow:.*\n.*pytest -m slow$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    weekly = (workflows / "weekly.yml").read_text()
    assert "run: make test-slow\n" in weekly
    assert "cron:" in weekly
    for name in ("doctor", "check", "demo", "inspect"):
        file = "test_cli_check.py" if name == "check" else f"test_cli_{name}.py"
        assert re.search(rf"\b(invoke|run)\(\"{name}\"", (ROOT / "tests" / file).read_text()), f"{file} does not run m2po {name}"


def test_commands_are_recognised(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "`make lint` and `m2po check`, not `lp.exp()`, `make` or `x = 1`\n\n"
        "    m2po inspect FILE       how stale\n    d_i = a - b\n    PYTHON=python3 make test && cd docs\n\n"
        "```bash\n# a comment\npython -m bench.x \\\n    --quick\n```\n"
    )
    monkeypatch.setattr("doc_blocks.ROOT", tmp_path)
    assert [c.text for c in commands(page)] == [
        "python -m bench.x      --quick", "make lint", "m2po check", "m2po inspect FILE", "PYTHON=python3 make test", "cd docs",
    ]  # fmt: skip
