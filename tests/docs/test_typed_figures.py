"""No page has a figure that somebody measured and typed: figures come from results."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

BLOCKS = re.compile(r"<!-- figures.*?<!-- /figures -->|```.*?```", re.DOTALL)
FIGURE = re.compile(r"(?<![\w.])[\d.,]*\d ?(?:%|ms|us|µs|x|GB|MB|MiB|Mbit/s)(?!\w)")
TYPED = {
    "README.md": {"0.1 %"},
    "docs/balance.md": {"0.03 %", "2 %"},
    "docs/benchmarks.md": {
        *("0.1 %", "0.2 %", "2 %", "5 %", "75 %", "1 MiB", "64 MiB", "458 MiB", "12 MB", "62 MB", "1000 MB", "2000 MB"),
        *("5 ms", "40 ms", "60 ms", "100 ms", "200 ms", "240 ms", "280 ms", "400 ms", "900 ms", "50 Mbit/s", "200 Mbit/s"),
    },
    "docs/communication.md": {
        *("18 MiB", "48 us", "400 GB", "64 MiB", "32 MiB", "5 %", "1 MiB", "4 MiB", "2 ms", "20 ms", "256 MiB"),
        *("2.6 ms", "200 Mbit/s"),
    },
    "docs/data.md": {"1 %"},
    "docs/index.md": {"50 Mbit/s", "720 ms"},
    "docs/ladder.md": {"25 %", "100 %", "90 %", "1.6 %", "3.3 %", "1.53x"},
    "docs/limits.md": {"2 %"},
    "docs/profiler.md": {"2 %", "0.25 %", "80 GB", "20 MB"},
    "docs/simulator.md": {"90 %", "90.4 %", "28 %", "90.3 %"},
    "docs/strategy.md": {"1 %"},
}
"""What is not measured here: goals, settings, limits, arithmetic, and what others have published."""
EXAMPLES = ("docs/quick_start.md", "docs/report.md", "docs/tutorial.md", "docs/how_to/", "docs/design/")
"""Explain what a reader's own run prints, or why something was chosen."""
PAGES = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name != "trends.md"
]


def typed(text: str) -> set[str]:
    """Return figures with a unit outside of blocks that are written from results, and of code."""
    return set(FIGURE.findall(BLOCKS.sub("", text)))


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(EXAMPLES)])
def test_figures_of_a_page_are_known(page: str) -> None:
    new = typed((ROOT / page).read_text()) - TYPED.get(page, set())
    assert not new, "take them from a result in a block of figures (scripts/figures.py), or say here that nobody measured them"


def test_known_figures_are_still_there() -> None:
    for page, figures in TYPED.items():
        assert figures <= typed((ROOT / page).read_text()), page


def test_a_typed_figure_is_found() -> None:
    assert typed("a step of 12.5 ms\n```\n3 %\n```\n<!-- figures a\n{x:.1%}\n-->\n4.0 %\n<!-- /figures -->\n1,440 MB") == {
        "12.5 ms",
        "1,440 MB",
    }
