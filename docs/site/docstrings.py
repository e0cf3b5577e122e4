"""The docstrings as Markdown, for mkdocstrings: lines that say what an argument is become a list.

They are written to be read in the source and in help(), as `name, other: what they are`, with what does not fit on a line
indented below. As Markdown all of these would run into one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.*)$")


class Lists(griffe.Extension):
    """Rewrites every docstring of a package when it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _rewrite(pkg)


def _rewrite(obj: Any) -> None:
    if obj.docstring:
        obj.docstring.value = as_markdown(obj.docstring.value)
    for member in obj.members.values():
        if not member.is_alias:
            _rewrite(member)


def as_markdown(docstring: str) -> str:
    """Paragraph after paragraph; those with argument lines as lists."""
    return "\n\n".join(_paragraph(paragraph.splitlines()) for paragraph in re.split(r"\n\s*\n", docstring.strip()))


def _paragraph(lines: list[str]) -> str:
    if not any(_ITEM.match(line) for line in lines):
        return "\n".join(lines)
    made: list[str] = []
    for line in lines:
        item = _ITEM.match(line)
        if item:
            if made and not made[-1].startswith(("- ", "  ")):
                made.append("")
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            made.append(f"- {names}: {item[2]}")
        elif line.startswith(" ") and made:
            made.append("  " + line.strip())
        else:
            made += ["", line] if made and made[-1].startswith(("- ", "  ")) else [line]
    return "\n".join(made)
