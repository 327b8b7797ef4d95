"""Links within the repository lead to files and headings that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, without_code

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s[^)]*)?\)|(?:src|href)=\"([^\"]+)\"")


@cache
def _anchors(page: Path) -> set[str]:
    """As forges and the site make them of headings: lower case, no punctuation, a hyphen for each space."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def _broken(page: Path, text: str) -> list[str]:
    broken = []
    for link in (first or second for first, second in _LINK.findall(without_code(text))):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert _broken(page, page.read_text()) == []


def test_a_broken_link_is_noticed() -> None:
    page = DOCS / "index.md"
    text = '[a](nowhere.md) [b](limits.md#nowhere) [c](#nowhere) [d](limits.md) `[e](code.md)` <img src="no.png">'
    assert _broken(page, text) == ["nowhere.md", "limits.md#nowhere", "#nowhere", "no.png"]
