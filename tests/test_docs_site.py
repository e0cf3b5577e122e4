"""The site: every page has a place, every public name is in the API, links and docstrings are rewritten as they should be.

`make docs` builds it with --strict, which finds links and anchors that lead nowhere; .ci/run does that.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer
from doc_blocks import ROOT

import m2po_kernels
from m2po_kernels.cli.app import app

DOCS = ROOT / "docs"
STALE = "examples/stale_rollouts/results"
MADE = {"changelog.md", "contributing.md"}  # of the files in the root, by docs/site/links.py


def load(name: str, needs: str) -> ModuleType:
    """A module of docs/site, which only mkdocs imports."""
    pytest.importorskip(needs)
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_a_line_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | MADE


def test_every_public_name_is_in_the_api():
    page = (DOCS / "api.md").read_text()
    names = set(m2po_kernels.__all__) - {"__version__", "M2POError"}  # errors are shown by their module
    assert set(re.findall(r"^::: m2po_kernels\.(\w+)$", page, re.MULTILINE)) == names | {"errors"}
    assert "::: m2po_kernels.integrations.common\n" in page


def test_command_line_page_names_every_option():
    text = (DOCS / "command-line.md").read_text()
    sections = dict(re.findall(r"^## m2po (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert {"doctor", "check", "inspect", "demo", "bench"} <= set(sections)
    # Two commands have pages of their own.
    sections |= {"stale": (DOCS / "stale.md").read_text(), "collect": (DOCS / "real-model.md").read_text()}
    for name, section in sections.items():
        for parameter in typer.main.get_command(app).commands[name].params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert f"`{parameter.opts[0]}`" in section or f" {parameter.opts[0]}" in section, (
                    f"m2po {name}: {parameter.opts[0]} is not on the page"
                )


@pytest.mark.parametrize(
    ("link", "page", "becomes"),
    [
        ("[a](semantics.md#x)", "index.md", "[a](semantics.md#x)"),
        ("[a](../CHANGELOG.md)", "index.md", "[a](changelog.md)"),
        ("[a](../README.md#results)", "vocabulary.md", "[a](index.md)"),
        ("[a](../../CONTRIBUTING.md)", "integrations/trl.md", "[a](../contributing.md)"),
        ("[a](../m2po_kernels/reference)", "index.md", "a"),
        ("[a](https://x.y/z.md)", "index.md", "[a](https://x.y/z.md)"),
        ("[a](#there)", "index.md", "[a](#there)"),
        ("[a](nowhere.md)", "index.md", "[a](nowhere.md)"),
        ("![a](one-sweep.svg)", "one-sweep.md", "![a](one-sweep.svg)"),
        (f"![a](../{STALE}/stale.png)", "stale.md", f"![a](pictures/{STALE}/stale.png)"),
        (f"![a](../../{STALE}/stale.png)", "integrations/trl.md", f"![a](../pictures/{STALE}/stale.png)"),
    ],
)
def test_links(link, page, becomes):
    links = load("links", "mkdocs")
    place = DOCS / page
    assert links.rewrite(f"x {link} y", place, place.parent, None) == f"x {becomes} y"


def test_pictures_from_elsewhere_are_copied_into_the_site(monkeypatch):
    """The page of the comparison shows its curves, in the repository and on the site."""
    links = load("links", "mkdocs")
    added: dict[str, str | None] = {}

    def generated(config, name, *, content=None, abs_src_path=None):
        added[name] = abs_src_path

    monkeypatch.setattr(links, "File", SimpleNamespace(generated=generated))
    links.on_files([], None)
    page = links.rewrite((DOCS / "stale.md").read_text(), DOCS / "stale.md", DOCS, None)
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert shown == [f"pictures/{STALE}/{name}" for name in ("stale.png", "curves.png")]
    assert all(added[name] == str(ROOT / STALE / Path(name).name) for name in shown)


def test_links_of_pages_from_the_root():
    links = load("links", "mkdocs")
    place = DOCS / "contributing.md"
    assert links.rewrite("[a](docs/semantics.md#x)", place, ROOT, None) == "[a](semantics.md#x)"
    with_address = links.rewrite("[a](csrc/cuda)", place, ROOT, "https://forge.example/me/it/")
    assert with_address == "[a](https://forge.example/me/it/blob/main/csrc/cuda)"


def test_arguments_become_a_list():
    as_markdown = load("docstrings", "griffe").as_markdown
    text = "What it is: one line.\n\nx, y: [B, T]; more\n    of it.\nz: last.\nNot one.\n\nRaises E."
    assert (
        as_markdown(text) == "What it is: one line.\n\n- `x`, `y`: [B, T]; more\n  of it.\n- `z`: last.\n\nNot one.\n\nRaises E."
    )
