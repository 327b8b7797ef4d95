"""JSON that is compact and that a person can read."""

from __future__ import annotations

import json
from typing import Any

_WIDTH = 128


def readable(value: Any) -> str:
    """What fits in a line stands in one, so does a list of plain values; all else is indented."""
    return _lines(value, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    line = _line(value)
    children = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    nested = isinstance(value, dict) or any(isinstance(child, (dict, list)) for child in children)
    if not children or not nested or len(indent) + len(line) <= _WIDTH:
        return line
    deeper = indent + " "
    names = [f"{_line(name)}: " for name in value] if isinstance(value, dict) else [""] * len(children)
    inner = ",\n".join(deeper + name + _lines(child, deeper) for name, child in zip(names, children))
    return f"{line[0]}\n{inner}\n{indent}{line[-1]}"


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
