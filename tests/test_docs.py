"""Every path of the repository that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import m2po_kernels
from m2po_kernels import m2po_loss, select
from m2po_kernels.integrations import common

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md")),
]
FOLDERS = ("bench", "csrc", "docs", "examples", "m2po_kernels", "tests", ".ci", ".github")
SUFFIXES = r"(?:py|md|h|cpp|cuh|cu|txt|toml|yaml|yml|json|csv|png|svg|safetensors)"
# Made by a build or a run, so not in a fresh clone.
MADE = ("m2po_kernels/_build.json", "rollouts.png", "rollouts.safetensors", "setting.json")


def named_paths(text: str) -> set[str]:
    """Words in backticks that look like a file or folder of the repository, and the targets of relative links."""
    found = set()
    for word in re.findall(r"`([^`\s]+)`", text):
        path = word.rstrip("/")
        in_folder = path.split("/")[0] in FOLDERS and "/" in word
        if re.fullmatch(r"[\w./-]+", path) and (in_folder or re.fullmatch(rf"[\w-]+\.{SUFFIXES}", path)):
            found.add(path)
    found |= {t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", t)}
    return found - set(MADE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_named_paths_exist(document):
    names = named_paths(document.read_text())
    files = {p.name for folder in FOLDERS for p in (ROOT / folder).rglob("*")}
    missing = [
        name
        for name in sorted(names)
        if not (ROOT / name).exists() and not (document.parent / name).exists() and ("/" in name or name not in files)
    ]
    assert not missing, f"{document.name} names what does not exist: {missing}"


def test_documents_are_there():
    assert {"README.md", "CONTRIBUTING.md", "architecture.md", "semantics.md"} <= {d.name for d in DOCUMENTS if d.exists()}


def test_versions_of_trainers_are_those_tested():
    """The table of docs/integrations/README.md holds what the adapters compare with, and each page beside it is linked there."""
    page = ROOT / "docs" / "integrations" / "README.md"
    rows = re.findall(r"^\| .*?`([\w-]+)` ([\w.]+) \|", page.read_text(), re.MULTILINE)
    assert dict(rows) == common.TESTED
    assert {p.name for p in page.parent.glob("*.md")} - {page.name} <= named_paths(page.read_text())


def test_paths_are_recognised():
    text = "`tests/conftest.py` `csrc/` `make test` `lp.exp()` `setup.py` [plan](docs/x.md#y) [web](https://a.b/c.md) `m2po`"
    assert named_paths(text) == {"tests/conftest.py", "csrc", "setup.py", "docs/x.md"}


def test_the_twelve_tokens_of_one_sweep():
    """The table of docs/one-sweep.md holds what select decides; its figure draws the same."""
    lines = (ROOT / "docs" / "one-sweep.md").read_text().splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := [c.strip() for c in line.strip("|").split("|")]) == 13}
    d = torch.tensor([float(x) for x in rows["d"]])
    advantages = torch.tensor([{"+": 1.0, "-": -1.0, "0": 0.0}[x] for x in rows["sign of A"]])
    selection = select(d, torch.zeros(12), advantages, torch.ones(12))
    assert [f"{x:.2f}".lstrip("0") for x in (d * d).tolist()] == [x if x != "0" else ".00" for x in rows["v"]]
    assert ((advantages * d) > 0).tolist() == [x == "yes" for x in rows["in T"]]
    assert selection.keep.logical_not().nonzero().flatten().tolist() == [1, 3]
    assert all(selection.keep[i] for i, x in enumerate(rows["kept"]) if x == "yes")
    assert float(selection.metrics.m2_after) == pytest.approx(0.22 / 6, rel=1e-6)


def test_the_step_of_distributed_runs():
    """The first block of docs/distributed.md, as it stands there: its loss and gradient are those of the unsplit batch."""
    code, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "distributed.md").read_text(), re.MULTILINE | re.DOTALL)
    generator = torch.Generator().manual_seed(0)
    x, noise, advantages = (torch.randn(4, 20, dtype=torch.float64, generator=generator) for _ in range(3))
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    whole = (x * 0.5 + 0.4 * noise, advantages, torch.ones(4, 20))
    want = m2po_loss(x * weight, *whole)
    want.loss.backward()
    gradient, weight.grad = weight.grad.clone(), None
    logged: list[dict] = []
    namespace = {
        **{name: getattr(m2po_kernels, name) for name in m2po_kernels.__all__},
        "torch": torch,
        "model": lambda x: x * weight,
        "micro_batches": [tuple(t[i : i + 2] for t in (x, *whole)) for i in (0, 2)],
        "dp_group": None,
        "logger": SimpleNamespace(log=logged.append),
    }
    exec(compile(code, "docs/distributed.md", "exec"), namespace)
    assert logged[0]["dropped_tokens"] == int(want.metrics.dropped_tokens) > 0
    # 80 terms, summed twice in other orders: within 2 * 80 roundings of the sum of their sizes.
    size = float((m2po_loss(x * weight, *whole, reduction="none").loss * x).detach().abs().sum() / 80)
    assert float(weight.grad) == pytest.approx(float(gradient), abs=160 * 2.0**-53 * size)
