"""Write report documents into one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import gzip
import json
import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from html import escape
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.profiling.reporting.compare import compare, differences, remarks
from lightning_freescale.profiling.reporting.document import FORMAT, VERSION, write_atomically

WITHOUT_PLOTLY = (
    "a bubble report's page has no pictures without the package plotly, which is not installed; its tables, the text and "
    "report.json are complete. Run pip install 'lightning-freescale[report]'; afterwards, or on another machine, "
    "python -m lightning_freescale.profiling page report.json -o report.html writes the page again"
)
_SCRIPTS = ("figures", "packed", "parts", "plot", "pictures", "bars", "tables", "ablation", "page")
"""In this order: later ones use what earlier ones define."""
_LICENCE = "<details><summary>Pictures by plotly.js, under its licence</summary><pre>{}</pre></details>\n"


def write_page(path: str | Path, documents: Sequence[Mapping[str, Any]]) -> Path:
    """Write a page that shows the documents, and return its path; the first is the one that others are compared with.

    The page holds its styles, its scripts and the documents, and its security policy forbids it to load anything, or to run
    another script. Without the package ``plotly`` a warning says so, and so does the page where its pictures would be; it has
    everything else.

    Args:
        path: of the HTML file; its folder is made if there is none. An older file stays if anything fails.
        documents: one or more contents of ``report.json``.

    Raises:
        ValueError: without documents, or where one is no report of this version or holds a number that is not finite;
            with several, where one has no wall time to compare.
    """
    if not documents:
        raise ValueError("documents is empty; pass at least one report, as read from a report.json")
    if not has_plotly():
        warnings.warn(WITHOUT_PLOTLY, stacklevel=2)
    packed = [_packed(index, document) for index, document in enumerate(documents)]
    reports = ",".join(shown for shown, _ in packed)
    content = f'{{"reports":[{reports}],"compared":{json.dumps(_compared(documents))}}}'
    series = "".join(_element(planes, 'class="series"', level=1) for _, planes in packed)
    script = f'"use strict";\n(() => {{\n{"".join(_read(f"{name}.js") for name in _SCRIPTS)}}})();'
    library = _plotly_javascript() if has_plotly() else None
    page = Template(_read("page.html")).substitute(
        style=_read("page.css"),
        policy=" ".join(_hash(text) for text in (script, library) if text is not None),
        content=_element(content.encode(), 'id="content"') + series,
        library="" if library is None else _element(library.encode(), 'id="library"'),
        licence="" if library is None else _LICENCE.format(escape(_plotly_licence())),
        script=script,
    )
    return write_atomically(path, [page])


def _read(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """As a security policy names the only scripts that may run."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _element(content: bytes, attributes: str, level: int = 6) -> str:
    """A script element that is never run; base64 holds nothing that could end it."""
    packed = b64encode(gzip.compress(content, compresslevel=level, mtime=0)).decode()
    return f'<script type="application/gzip" {attributes}>{packed}</script>\n'


def _packed(index: int, document: Mapping[str, Any]) -> tuple[str, bytes]:
    """The document as JSON, but without what has the length of the run; and the breakdown, all that the page shows of that."""
    found = (document.get("format"), document.get("version"))
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"documents[{index}] has format {found[0]!r} and version {found[1]!r}, not {FORMAT!r} and {VERSION}; "
            "pass the content of a report.json that this version of lightning_freescale wrote"
        )
    seconds = np.asarray(document["series"]["breakdown_s"], dtype=np.float64)
    series = {name: document["series"][name] for name in ("columns", "step")}
    try:
        if not np.isfinite(seconds).all():
            raise ValueError("series.breakdown_s is not JSON compliant")
        return json.dumps({**document, "series": series}, allow_nan=False, separators=(",", ":")), _planes(seconds)
    except ValueError as error:
        raise ValueError(f"documents[{index}] cannot be shown: {error}; replace numbers that are not finite by null") from error


def _planes(seconds: NDArray[np.float64]) -> bytes:
    """Whole microseconds by column, rank and step: the first byte of each number, then the second of each, ...

    As text they would be 13 MB for 64 ranks and 2,000 steps, and 4.4 packed; the planes pack into 2.5, in a tenth of the time.
    """
    whole = np.rint(seconds.T * 1e6).astype("<i8").ravel()
    return whole.view(np.uint8).reshape(-1, 8).T.tobytes()


def _compared(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if len(documents) < 2:
        return None
    base, *others = documents
    runs = [asdict(one) for one in compare(documents, force=True)]
    lines = {"differences": differences, "remarks": remarks}
    unique = {name: list(dict.fromkeys(line for o in others for line in of(base, o))) for name, of in lines.items()}
    return {"runs": runs, **unique}


def has_plotly() -> bool:
    """Whether pages can have pictures."""
    return find_spec("plotly") is not None and find_spec("plotly.offline") is not None


def _plotly_javascript() -> str:
    """Return the library: one script that needs nothing else."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _plotly_licence() -> str:
    """Return the licence under which a page carries the library along; its name where the package came without the text."""
    try:
        files = distribution("plotly").files or ()
    except PackageNotFoundError:
        files = ()
    return next((file.read_text() for file in files if file.name == "LICENSE.txt"), "MIT License, Copyright Plotly, Inc.")
