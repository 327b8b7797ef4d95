"""The index of messages in docs/limits.md quotes what the package says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "limits.md").read_text().splitlines()
    if line.startswith("| `")
]


def _templates() -> list[str]:
    """Every string of the package, with a NUL in the place of each value that is filled in."""
    found = []
    for path in (ROOT / "lightning_freescale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _is_quoted(beginning: str, templates: list[str]) -> bool:
    """Whether a string begins so; "..." stands for what is filled in."""
    pattern = re.compile(r"(?:\0|\.\.\.)".join(re.escape(part) for part in beginning.split("...")))
    return any(pattern.match(template) for template in templates)


def test_every_quoted_beginning_is_said_by_the_package() -> None:
    templates = _templates()
    quoted = [row[0].strip("`") for row in ROWS]
    assert len(quoted) > 100
    assert [beginning for beginning in quoted if not _is_quoted(beginning, templates)] == []
    assert sorted(quoted) == sorted(set(quoted)), "each message once"


@pytest.mark.parametrize("beginning", ["this is said nowhere", "the ranks plan epoch 3 differently"])
def test_what_nobody_says_is_noticed(beginning: str) -> None:
    assert not _is_quoted(beginning, _templates())


def test_every_row_has_a_reason_and_a_way_out() -> None:
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []
