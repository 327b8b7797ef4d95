"""Write report documents into one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_freescale.profiling.reporting.atomic_write import write_atomically
from lightning_freescale.profiling.reporting.compare import compare, differences, remarks
from lightning_freescale.profiling.reporting.document import FORMAT, VERSION

_SCRIPTS = ("figures", "parts", "chart", "heatmap", "waterfall", "series", "bars", "tables", "ablation", "page")
"""In this order: later ones use what earlier ones define."""


def write_page(path: str | Path, documents: Sequence[Mapping[str, Any]]) -> Path:
    """Write a page that shows the documents, and return its path; the first is the one that others are compared with.

    The page holds its styles, its scripts and the documents, and its security policy forbids it to load anything.

    Args:
        path: of the HTML file; its folder is made if there is none. An older file stays if anything fails.
        documents: one or more contents of ``report.json``.

    Raises:
        ValueError: without documents, or where one is no report of this version or holds a number that is not finite;
            with several, where one has no wall time to compare.
    """
    if not documents:
        raise ValueError("documents is empty; pass at least one report, as read from a report.json")
    script = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    page = Template(_read("page.html")).substitute(style=_read("page.css"), content=_content(documents), script=script)
    return write_atomically(path, [page])


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _content(documents: Sequence[Mapping[str, Any]]) -> str:
    """JSON that is safe inside a script element: without ``<`` no tag and no comment can begin or end in it."""
    reports = ",".join(_json(index, document) for index, document in enumerate(documents))
    return f'{{"reports":[{reports}],"compared":{json.dumps(_compared(documents))}}}'.replace("<", "\\u003c")


def _json(index: int, document: Mapping[str, Any]) -> str:
    found = (document.get("format"), document.get("version"))
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"documents[{index}] has format {found[0]!r} and version {found[1]!r}, not {FORMAT!r} and {VERSION}; "
            "pass the content of a report.json that this version of lightning_freescale wrote"
        )
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ValueError(f"documents[{index}] cannot be shown: {error}; replace numbers that are not finite by null") from error


def _compared(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if len(documents) < 2:
        return None
    base, *others = documents
    runs = [asdict(one) for one in compare(documents, force=True)]
    lines = {"differences": differences, "remarks": remarks}
    unique = {name: list(dict.fromkeys(line for o in others for line in of(base, o))) for name, of in lines.items()}
    return {"runs": runs, **unique}
