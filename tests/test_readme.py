"""README's Python code runs as it stands there, block after block."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run(tmp_path, monkeypatch):
    blocks = list(re.finditer(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL))
    assert blocks, "README.md shows no Python code"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        line = README.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), str(README), "exec"), namespace)
