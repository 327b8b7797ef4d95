"""A hook of MkDocs that shows the callouts of a forge, ``> [!WARNING]``, as admonitions with the bold text as their title."""

from __future__ import annotations

import re
from typing import Any

_CALLOUT = re.compile(r"^> \[!(\w+)\]\n> \*\*(.+?)\.\*\* (.*)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the callouts; the text of one is a line."""
    return _CALLOUT.sub(lambda callout: f'!!! {callout[1].lower()} "{callout[2]}"\n\n    {callout[3]}', markdown)
