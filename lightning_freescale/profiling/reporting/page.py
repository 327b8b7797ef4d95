"""Write report documents into one HTML page that loads no other resources."""

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

from lightning_freescale._version import SITE
from lightning_freescale.profiling.reporting.compare import compare, differences, remarks
from lightning_freescale.profiling.reporting.document import FORMAT, VERSION, write_atomically

WITHOUT_PLOTLY = (
    "the page of the bubble report will have no pictures, because the package plotly is not installed. Tables, text and "
    "report.json are complete. Run pip install 'lightning-freescale[report]'. Then, or on another machine, "
    "freescale profile page report.json -o report.html writes the page again"
)
_SCRIPTS = ("figures", "packed", "parts", "plot", "pictures", "bars", "tables", "ablation", "page")
"""The scripts in the order of their dependencies."""
_LICENCE = "<details><summary>Licence of plotly.js, which draws the pictures</summary><pre>{}</pre></details>\n"


def write_page(path: str | Path, documents: Sequence[Mapping[str, Any]]) -> Path:
    """Write a page that shows the documents and compares the others with the first, and return its path.

    The page contains its styles, its scripts and the documents. Its security policy forbids other resources and scripts.
    Without the package ``plotly``, the function warns, and the page has a notice in place of each picture.

    Args:
        path: path of the HTML file. Its folder is created. An older file stays if the function fails.
        documents: one or more contents of ``report.json``.

    Raises:
        ValueError: there are no documents, one is no report of this version or has a number that is not finite, or one of
            several has no wall time.
    """
    if not documents:
        raise ValueError("documents is empty. Pass the content of at least one report.json")
    library = None
    if has_plotly():
        from plotly.offline import get_plotlyjs

        library = get_plotlyjs()
    else:
        warnings.warn(WITHOUT_PLOTLY, stacklevel=2)
    packed = [_packed(index, document) for index, document in enumerate(documents)]
    reports = ",".join(shown for shown, _ in packed)
    content = f'{{"reports":[{reports}],"compared":{json.dumps(_compared(documents))}}}'
    series = "".join(_element(planes, 'class="series"', level=1) for _, planes in packed)
    script = f'"use strict";\n(() => {{\n{"".join(_read(f"{name}.js") for name in _SCRIPTS)}}})();'
    page = Template(_read("page.html")).substitute(
        style=_read("page.css"),
        policy=" ".join(_hash(text) for text in (script, library) if text is not None),
        site=SITE,
        content=_element(content.encode(), 'id="content"') + series,
        library="" if library is None else _element(library.encode(), 'id="library"'),
        licence="" if library is None else _LICENCE.format(escape(_plotly_licence())),
        script=script,
    )
    return write_atomically(path, [page])


def _read(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script for the security policy, which allows no others."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _element(content: bytes, attributes: str, level: int = 6) -> str:
    """Return a script element that never runs; base64 cannot contain the end of the element."""
    packed = b64encode(gzip.compress(content, compresslevel=level, mtime=0)).decode()
    return f'<script type="application/gzip" {attributes}>{packed}</script>\n'


def _packed(index: int, document: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the document as JSON without the series, and their breakdown, the only part that the page shows."""
    found = (document.get("format"), document.get("version"))
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"documents[{index}] has format {found[0]!r} and version {found[1]!r}, not {FORMAT!r} and {VERSION}. "
            "Pass the content of a report.json of this version of lightning_freescale"
        )
    seconds = np.asarray(document["series"]["breakdown_s"], dtype=np.float64)
    series = {name: document["series"][name] for name in ("columns", "step")}
    try:
        if not np.isfinite(seconds).all():
            raise ValueError("series.breakdown_s is not JSON compliant")
        return json.dumps({**document, "series": series}, allow_nan=False, separators=(",", ":")), _planes(seconds)
    except ValueError as error:
        raise ValueError(f"documents[{index}] is invalid: {error}. Replace numbers that are not finite by null") from error


def _planes(seconds: NDArray[np.float64]) -> bytes:
    """Return whole microseconds by column, rank and step: the first byte of each number, then the second of each, ...

    For 64 ranks and 2,000 steps, text has 13 MB, or 4.4 MB packed. The planes pack into 2.5 MB, in a tenth of the time.
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
    """Return True if pages can have pictures."""
    return find_spec("plotly") is not None and find_spec("plotly.offline") is not None


def _plotly_licence() -> str:
    """Return the licence of the library in the page; its name if the package has no text."""
    try:
        files = distribution("plotly").files or ()
    except PackageNotFoundError:
        files = ()
    return next((file.read_text() for file in files if file.name == "LICENSE.txt"), "MIT License, Copyright Plotly, Inc.")
