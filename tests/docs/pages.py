"""The pages of docs/ with their code blocks: files to save, commands to run and their output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
RUN = [DOCS / "quick_start.md", DOCS / "tutorial.md", *sorted((DOCS / "how_to").glob("*.md"))]
"""The pages whose blocks are all run. The other pages show excerpts."""

_FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``title`` is the name of its file."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for found in _FENCED.finditer(page.read_text()):
        yield Block(*(part or "" for part in found.groups()))


def save_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)


def without_code(text: str) -> str:
    """Return the page without code, because code has no links or headings."""
    return re.sub(r"`[^`\n]*`", "`code`", _FENCED.sub("", text))
