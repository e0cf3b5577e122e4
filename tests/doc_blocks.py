"""Reads the documents: their blocks of Python, and the commands that they tell a reader to type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^ {0,3}```(\w*)[^\n]*\n(.*?)^ {0,3}```", re.MULTILINE | re.DOTALL)
_SHELL = ("bash", "console", "sh", "shell")
# How a line of an indented block, or a span in backticks, begins if it is a command; variables may stand before it.
_COMMAND = re.compile(
    r"(?:[A-Z_0-9]+=\S* )*(?:\.venv/bin/)?(make|m2po|pip|python|git|pre-commit|apt-get|bench/gpu\.sh|\.ci/run)\b"
)


class Command(NamedTuple):
    """As it stands in the document, without what explains it. whole: a line to type, not a mention within a sentence."""

    text: str
    where: str
    whole: bool


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, and every page in docs/ and examples/ and of the benchmarks."""
    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]
    return own + sorted(page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md"))


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line before it, code) of each block of Python."""
    text = page.read_text()
    return [(text[: block.start(2)].count("\n"), block[2]) for block in _FENCE.finditer(text) if block[1] == "python"]


def run_python(page: Path, namespace: dict[str, Any], first: int = 0) -> dict[str, Any]:
    """Executes the blocks from number `first` on, one after the other in one namespace; errors show the line of the page."""
    for line, code in python_blocks(page)[first:]:
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    return namespace


def commands(page: Path) -> list[Command]:
    """Every line of shell blocks and step of workflows; of indented blocks and backticks what begins as a command does."""
    text, found = page.read_text(), []
    name = str(page.relative_to(ROOT))
    for block in _FENCE.finditer(text):
        if block[1] in _SHELL:
            for line in block[2].replace("\\\n", " ").splitlines():
                found += _split(line.strip().removeprefix("$ "), name, whole=True)
        if block[1] == "yaml":  # the steps of a workflow
            found += [c for line in re.findall(r"run: (.+)$", block[2], re.MULTILINE) for c in _split(line, name, whole=True)]
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", text)):
        lines = paragraph.splitlines()
        typed = [line for line in lines if re.match(r" {4,}\S", line)]
        found += [c for line in typed if _COMMAND.match(line.strip()) for c in _split(line.strip(), name, whole=True)]
        spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", " ".join(line for line in lines if line not in typed))
        found += [c for span in spans if _COMMAND.match(span) and " " in span for c in _split(span, name, whole=False)]
    return found


def _split(line: str, where: str, whole: bool) -> list[Command]:
    """Without the explanation that follows after two spaces, and one command for each that && joins."""
    line = re.split(r"\s{2,}(?=[\w(#])|\s+#\s", line)[0] if whole else line
    return [Command(part.strip(), where, whole) for part in line.split("&&") if part.strip() and not part.strip().startswith("#")]
