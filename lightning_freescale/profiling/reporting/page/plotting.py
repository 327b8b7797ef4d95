"""The plotting library that draws a page's pictures: Plotly's JavaScript, which its Python package carries."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

WITHOUT = (
    "a bubble report's page has no pictures without the package plotly, which is not installed; its tables, the text and "
    "report.json are complete. Run pip install 'lightning-freescale[report]'; afterwards, or on another machine, "
    "python -m lightning_freescale.profiling page report.json -o report.html writes the page again"
)


def is_installed() -> bool:
    """Whether pages can have pictures."""
    return find_spec("plotly") is not None and find_spec("plotly.offline") is not None


def javascript() -> str:
    """Return the library: one script that needs nothing else."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def licence() -> str:
    """Return the licence under which a page carries the library along; its name where the package came without the text."""
    try:
        files = distribution("plotly").files or ()
    except PackageNotFoundError:
        files = ()
    return next((file.read_text() for file in files if file.name == "LICENSE.txt"), "MIT License, Copyright Plotly, Inc.")
