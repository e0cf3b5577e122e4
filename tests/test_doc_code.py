"""Every block of Python in docs/ and in the READMEs is executed.

- A page's blocks run one after the other, in a folder of its own. README.md too; its `diff` is for TRL: its names are looked up.
- docs/distributed.md: the first block needs a trainer around it and is run in test_docs.py; the recipes run here, on two ranks.
- docs/integrations/ and examples/: written for a framework that is not installed here; the tests in tests/integrations run the
  adapters with the real ones. Here: what those blocks import from this package exists.
- docs/rollout-files.md and docs/real-model.md are run here as well where their libraries are there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import doc_jobs
import pytest
import torch
from distributed_jobs import Policy
from doc_blocks import ROOT, pages, python_blocks, run_python
from world import Raised, World

from m2po_kernels import linear_m2po_loss, m2po_loss

FOREIGN = [page for page in pages() if "integrations" in page.parts or "examples" in page.parts]
OWN = [page for page in pages() if python_blocks(page) and page not in FOREIGN and page != doc_jobs.DISTRIBUTED]


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_python(page, {"__name__": "document"})


def test_there_are_blocks_to_run():
    assert {"README.md", "index.md", "vocabulary.md", "variants.md", "troubleshooting.md", "extending.md"} <= {
        p.name for p in OWN
    }


def imported(page: Path) -> set[tuple[str, str]]:
    """(module of this package, name) that the page's Python, or the + lines of its diffs, import."""
    lines = re.findall(r"^\+?from (m2po_kernels[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE)
    return {(module, name.strip()) for module, names in lines for name in names.split(",")}


@pytest.mark.parametrize("page", [ROOT / "README.md", *FOREIGN], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_imported_exists(page):
    """By the source, as importing an adapter would need its framework."""
    for module, name in imported(page):
        path = ROOT.joinpath(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert source.is_file(), f"{page.name} imports from {module}, which does not exist"
        tree = ast.parse(source.read_text())
        defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        bound = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert name in defined | bound, f"{page.name} imports {name} from {module}, which has no such name"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "megatron"])
def test_recipes_are_the_unsplit_step(world, how):
    """Two micro-batches on each of two ranks, of unequal numbers of tokens, against one process with all tokens."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 12, 6, dtype=torch.float64, generator=generator)
    model = Policy()
    with torch.no_grad():
        behavior = model(x) + 0.4 * torch.randn(8, 12, dtype=torch.float64, generator=generator)
    advantages = torch.randn(8, dtype=torch.float64, generator=generator)
    mask = torch.rand(8, 12, generator=generator) < torch.linspace(0.2, 1, 8)[:, None]
    out = m2po_loss(model(x), behavior, advantages, mask)
    want = torch.autograd.grad(out.loss, list(model.parameters()))
    assert int(out.metrics.dropped_tokens) > 0

    whole = (x, behavior, advantages, mask)
    batches = [[tuple(t[i : i + 2] for t in whole) for i in (4 * rank, 4 * rank + 2)] for rank in range(2)]
    for result in world.run(doc_jobs.step, *((how, batches[rank]) for rank in range(2))):
        assert not isinstance(result, Raised), result
        grads, dropped = result
        assert dropped == int(out.metrics.dropped_tokens)
        for got, grad in zip(grads, want, strict=True):
            # 96 terms summed in another order, each through some 30 roundings; no sum here cancels to less than 1/1000 of them.
            torch.testing.assert_close(got, grad, rtol=0, atol=2 * (96 + 30) * 2.0**-53 * 1e3 * float(grad.abs().max()))


def test_recipe_of_a_split_head(world):
    """40 rows of the head on one rank, 57 on the other: loss and gradients of the whole head in one process."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 7, 5), (97, 5)))
    ids = torch.randint(97, (3, 7), generator=generator)
    behavior = torch.randn(3, 7, dtype=torch.float64, generator=generator) - 4
    batch = (behavior, torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64), torch.ones(3, 7))
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_m2po_loss(*leaves, ids, *batch)
    out.loss.backward()
    results = world.run(doc_jobs.split_head, *((hidden, weight, ids, batch) for _ in range(2)))
    for result in results:
        assert not isinstance(result, Raised), result
    (loss, d_hidden, first), (other_loss, other, second) = results
    assert loss == other_loss == pytest.approx(float(out.loss.detach()), rel=1e-12)
    for got, grad in ((d_hidden, leaves[0].grad), (other, leaves[0].grad), (torch.cat([first, second]), leaves[1].grad)):
        torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-13)
