"""The pages of docs/ as their reader follows them: files to save, commands to run, and what these are said to print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
RUN = [DOCS / "quick_start.md", DOCS / "tutorial.md", *sorted((DOCS / "how_to").glob("*.md"))]
"""Pages whose every block is run; the others show excerpts."""

_FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``title`` is the file it is to be saved as."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """In the order of the page."""
    for found in _FENCED.finditer(page.read_text()):
        yield Block(*(part or "" for part in found.groups()))


def save_files(page: Path, folder: Path) -> None:
    """Save the files that a reader of the page is told to."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)


def without_code(text: str) -> str:
    """The page without fenced blocks and code spans, in which nothing is a link or a heading."""
    return re.sub(r"`[^`\n]*`", "`code`", _FENCED.sub("", text))
