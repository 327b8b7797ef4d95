"""Figures in README and docs come from benchmarks/results: write them anew, or ``--check`` that they are as they would be.

A block of Markdown follows its own template, which nobody sees on a rendered page::

    <!-- figures ladder_8 ladder_2
    With 8 ranks {ladder_8.best_speed_up:.2f} times as fast, with 2 {ladder_2.best_speed_up:.2f} times.
    -->
    With 8 ranks 2.18 times as fast, with 2 2.16 times.
    <!-- /figures -->

Named are files of benchmarks/results, as a benchmark's ``--json`` writes them. With a single one its name can be left out:
``{best_speed_up:.2f}``. A format of ``%`` has a space before the sign; one that begins with k, M, G, m or u is in such units:
``{bytes:M.2f} MB``. ``{where}`` is commit, date and processor, where files differ of each, ``{command}`` what the first ran. A
template of a table begins with an empty line. docs/trends.md is written as a whole (:mod:`trends`).
"""

from __future__ import annotations

import argparse
import json
import re
import string
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import trends

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRENDS = ROOT / "docs" / "trends.md"
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {TRENDS})]
FACTORS = {"k": 1e-3, "M": 1e-6, "G": 1e-9, "m": 1e3, "u": 1e6}
"""By the first letter of a format."""
BLOCK = re.compile(r"(<!-- figures ([\w ]+)\n(.*?)-->\n)(.*?)(<!-- /figures -->)", re.DOTALL)


class Figures(string.Formatter):
    """Formats templates with the figures of some results."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        missing = [f"{name}.json" for name in names if not (RESULTS / f"{name}.json").exists()]
        if missing:
            raise ValueError(f"{', '.join(missing)}: there is no such file in {RESULTS.name}; a benchmark's --json writes it")
        self._results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names}
        self._first = names[0]

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        """A figure, by its name or by its file's and its own."""
        file, name = split_field(field_name, self._results)
        if not file and len(self._results) > 1 and name not in ("where", "command"):
            raise ValueError(f"{{{field_name}}}: write {{FILE.FIGURE}} with a file of {sorted(self._results)}")
        result = self._results[file or self._first]
        if name == "where":
            results = [result] if file else self._results.values()
            return "; ".join(dict.fromkeys(_where(each["measured_on"]) for each in results)), field_name
        if name == "command":
            return result["measured_on"]["command"], field_name
        if name not in result["figures"]:
            raise ValueError(
                f"{{{field_name}}}: there is no such figure in {file or self._first}, but {sorted(result['figures'])}"
            )
        return result["figures"][name], field_name

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Percentages as in ``57.1 %``; ``M.2f`` is in millions, and so on."""
        factor = FACTORS.get(format_spec[:1])
        if factor is not None:
            value, format_spec = value * factor, format_spec[1:]
        shown = super().format_field(value, format_spec)
        if not any(digit in shown for digit in "123456789"):
            shown = shown.replace("-", "")  # zero has no sign
        return shown[:-1] + " %" if format_spec.endswith("%") else shown


def split_field(field: str, files: Iterable[str]) -> tuple[str, str]:
    """Return file and figure; the former is empty where it is left out. A figure's name may have dots, too."""
    file = next((name for name in files if field.startswith(f"{name}.")), "")
    return file, field.removeprefix(f"{file}.")


def _where(measured_on: dict[str, Any]) -> str:
    gpu = f"{measured_on['gpu']}, " if "gpu" in measured_on else ""
    cores = f"{measured_on['cores']} cores of {measured_on['processor']}"
    return f"commit {measured_on['commit']}, {measured_on['date']}, {gpu}{cores}"


def with_figures(text: str) -> str:
    """Return the page as it should be.

    Raises:
        ValueError: a template names a figure or a file that is not there.
    """
    return BLOCK.sub(lambda block: block[1] + Figures(block[2].split()).format(block[3]) + block[5], text)


def wanted() -> dict[Path, str]:
    """Every page as it should be.

    Raises:
        ValueError: as :func:`with_figures`, with the page's name.
    """
    pages = {}
    for page in PAGES:
        try:
            pages[page] = with_figures(page.read_text())
        except ValueError as error:
            raise ValueError(f"{page.relative_to(ROOT)}: {error}") from None
    return pages | {TRENDS: trends.page(RESULTS, _shown())}


def _shown() -> dict[str, set[str]]:
    """The figures of every file that templates name."""
    shown: dict[str, set[str]] = {}
    for block in (block for page in PAGES for block in BLOCK.finditer(page.read_text())):
        files = block[2].split()
        fields = [split_field(field, files) for _, field, _, _ in string.Formatter().parse(block[3]) if field]
        for file, name in fields:
            if name not in ("where", "command"):
                shown.setdefault(file or files[0], set()).add(name)
    return shown


def main() -> None:
    """Write the pages, or say which are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if something would be written")
    options = parser.parse_args()
    try:
        pages = wanted()
    except ValueError as error:
        sys.exit(str(error))
    old = [page for page, text in pages.items() if not page.exists() or page.read_text() != text]
    for page in old:
        print(page.relative_to(ROOT))
        if not options.check:
            page.write_text(pages[page])
    sys.exit(bool(old) and options.check)


if __name__ == "__main__":
    main()
