"""A hook of MkDocs that gives each cell of a table the name of its column, which narrow screens show beside it."""

from __future__ import annotations

import re
from typing import Any

_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<t[dh]\b(.*?)>(.*?)</t[dh]>", re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Label the cells of all tables."""
    return re.sub(r"<table>.*?</table>", lambda table: _labelled(table[0]), html, flags=re.DOTALL)


def _labelled(table: str) -> str:
    names = [re.sub(r"<[^>]*>", "", name).replace('"', "&quot;") for _, name in _CELL.findall(_ROW.search(table)[0])]

    def label(row: re.Match[str]) -> str:
        cells = iter(names)
        return re.sub(r"<td\b", lambda _: f'<td data-label="{next(cells)}"', row[0])

    return _ROW.sub(label, table)
