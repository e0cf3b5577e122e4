"""What mkdocs is told beyond mkdocs.yml: pages made of files in the root, pictures beside docs/, and links that leave docs/.

The documents are written to be read in the repository, where a link to CHANGELOG.md or to a source file leads there. On the site
the first is a page; the second leads to the repository if mkdocs.yml says where that is (repo_url), and is plain text else. A
picture that lies elsewhere, beside the rows that it was made from, is copied into the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# README.md says in short what the pages say, and is none of them; a link to a part of it leads to the first page.
ON_SITE = {**{ROOT / name: DOCS / page for name, page in ROOT_PAGES.items()}, ROOT / "README.md": DOCS / "index.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files of the root that are pages, and the pictures from elsewhere."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for file in pictures():
        files.append(File.generated(config, _on_site(file), abs_src_path=str(file)))
    return files


def pictures() -> list[Path]:
    """The images in pages of docs/ that lie outside it."""
    found = set()
    for page in DOCS.rglob("*.md"):
        targets = [target for image, _, target in _LINK.findall(page.read_text(encoding="utf-8")) if image]
        files = [Path(os.path.normpath(page.parent / target)) for target in targets]
        found |= {file for file in files if file.is_file() and not file.is_relative_to(DOCS)}
    return sorted(found)


def _on_site(picture: Path) -> str:
    return f"pictures/{picture.relative_to(ROOT).as_posix()}"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrites the links that are right in the repository and wrong on the site."""
    place = DOCS / page.file.src_uri
    written_in = {on_site: own for own, on_site in ON_SITE.items() if own.name in ROOT_PAGES}.get(place, place)
    return rewrite(markdown, place, written_in.parent, config.repo_url)


def rewrite(markdown: str, place: Path, folder: Path, repo_url: str | None) -> str:
    """`markdown` of the page at `place`, whose links are relative to `folder`. What leads nowhere stays, for mkdocs to find."""

    def replaced(link: re.Match) -> str:
        image, text, target = link.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return link.group()
        file = Path(os.path.normpath(folder / path))
        if file == ROOT / "README.md":
            hash_ = anchor = ""
        file = ON_SITE.get(file, file)
        if file.is_relative_to(DOCS) or not file.exists():
            if folder == place.parent and not path.startswith(".."):
                return link.group()
            return f"{image}[{text}]({os.path.relpath(file, place.parent)}{hash_}{anchor})"
        if image:
            return f"![{text}]({os.path.relpath(DOCS / _on_site(file), place.parent)})"
        if repo_url:
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{file.relative_to(ROOT)})"
        return text

    return _LINK.sub(replaced, markdown)
