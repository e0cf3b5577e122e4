"""README's Python code runs as it stands there, block after block."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_three_commands_from_a_clone_to_a_plot():
    """Before the first heading, with where the figures come from: no reader should take them for a GPU's."""
    start = README.read_text().split("\n## ")[0]
    three = re.compile(r"^    git clone .*\n    make install\n    \.venv/bin/m2po inspect .*\n\n", re.MULTILINE)
    commands = three.findall(start)
    # tests/test_rollout_docs.py runs them as they stand on that page.
    assert len(commands) == 1
    assert commands == three.findall((README.parent / "docs" / "rollout-files.md").read_text())
    picture = start.index("![")
    assert picture < start.index("](docs/stale.md)") < start.index("not yet run on a GPU") < start.index("    make demo")
    results = README.read_text().split("\n## Results\n")[1]
    assert "not yet run on a GPU" in results.split("<!-- bench:begin -->")[0]


def test_python_blocks_run(tmp_path, monkeypatch):
    blocks = list(re.finditer(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL))
    assert blocks, "README.md shows no Python code"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        line = README.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), str(README), "exec"), namespace)
