"""Writes the figures of benchmarks/results into README.md and docs/: ``python scripts/figures.py [--check]``.

Each file of benchmarks/tables is a template. Its first line names one or more files of benchmarks/results. After an empty line
follows a table or a paragraph, in which ``{FILE.FIGURE:FORMAT}`` is replaced by a figure::

    ladder_2 ladder_8

    The step is {ladder_2.best_speed_up:.2f} times as fast on 2 ranks and {ladder_8.best_speed_up:.2f} times on 8 ranks.

The script finds the place in the pages by the text between the figures. A new table is therefore printed by
``--print NAME`` and pasted into a page once. To change the text around figures, change the template and the page.

If the first line names one file, its name can be omitted: ``{best_speed_up:.2f}``. ``{where}`` is replaced by commit, date and
processor. A format that begins with k, M, G, m or u uses that unit: ``{bytes:M.2f} MB``. Percentages have a
space before the sign.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "benchmarks" / "tables"
FACTORS = {"k": 1e-3, "M": 1e-6, "G": 1e-9, "m": 1e3, "u": 1e6}
"""The factor for each unit."""


class Table(string.Formatter):
    """A template and the results that it names.

    Args:
        path: the file of the template.

    Raises:
        ValueError: a result file does not exist.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        names, _, template = path.read_text().partition("\n\n")
        self.name, self.template = path.stem, template.rstrip("\n")
        missing = [f"{name}.json" for name in names.split() if not (RESULTS / f"{name}.json").exists()]
        if missing:
            raise ValueError(
                f"{path.name}: {RESULTS.name} has no {', '.join(missing)}; the --json flag of a benchmark writes it"
            )
        self._results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names.split()}

    def text(self) -> str:
        """Return the template with its figures.

        Raises:
            ValueError: the template names a figure that does not exist.
        """
        try:
            return self.format(self.template)
        except ValueError as error:
            raise ValueError(f"{self.name}.md: {error}") from None

    def pattern(self) -> re.Pattern[str]:
        """Return an expression that matches the template with any figures, as whole lines of a page."""
        parts = [
            re.escape(literal) + ("" if field is None else r"[^|\n]+?") for literal, field, _, _ in self.parse(self.template)
        ]
        return re.compile(f"^{''.join(parts)}$", re.MULTILINE)

    def fields(self) -> set[tuple[str, str]]:
        """Return file and figure of each field."""
        fields = [self._split(field) for _, field, _, _ in self.parse(self.template) if field]
        return {(file, figure) for file, figure in fields if figure != "where"}

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        """Return the value of a field."""
        file, name = self._split(field_name)
        result = self._results[file]
        if name == "where":
            results = [result] if field_name != name else self._results.values()
            return "; ".join(dict.fromkeys(_where(each["measured_on"]) for each in results)), field_name
        if name not in result["figures"]:
            raise ValueError(f"{{{field_name}}} is no figure of {file}; its figures are {sorted(result['figures'])}")
        return result["figures"][name], field_name

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Return the text of a value, with the units and the percentages of this module."""
        factor = FACTORS.get(format_spec[:1])
        if factor is not None:
            value, format_spec = value * factor, format_spec[1:]
        shown = super().format_field(value, format_spec)
        if not isinstance(value, str) and not any(digit in shown for digit in "123456789"):
            shown = shown.replace("-", "")  # zero has no sign
        return shown[:-1] + " %" if format_spec.endswith("%") else shown

    def _split(self, field: str) -> tuple[str, str]:
        """Return file and figure of a field; the name of a figure may contain dots."""
        file = next((name for name in self._results if field.startswith(f"{name}.")), None)
        if file is None and len(self._results) > 1 and field != "where":
            raise ValueError(f"{{{field}}}: write {{FILE.FIGURE}} with a file of {sorted(self._results)}")
        return file or next(iter(self._results)), field.removeprefix(f"{file}.")


def _where(measured_on: dict[str, Any]) -> str:
    gpu = f"{measured_on['gpu']}, " if "gpu" in measured_on else ""
    cores = f"{measured_on['cores']} cores of {measured_on['processor']}"
    return f"commit {measured_on['commit']}, {measured_on['date']}, {gpu}{cores}"


def tables() -> list[Table]:
    """Return all tables."""
    return [Table(path) for path in sorted(TABLES.glob("*.md"))]


def wanted() -> dict[Path, str]:
    """Return the text that each page must have.

    Raises:
        ValueError: no page contains one of the tables, or a template is wrong.
    """
    pages = {page: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
    for table in tables():
        text, pattern, found = table.text(), table.pattern(), 0
        for page, old in pages.items():
            pages[page], count = pattern.subn(lambda _, text=text: text, old)
            if count > 1:
                raise ValueError(f"{page.name} has {count} places for the table {table.name}.md; use different words in them")
            found += count
        if not found:
            raise ValueError(f"no page contains the table {table.name}.md; the words in page and template must be the same")
    return pages


def main() -> None:
    """Write the pages, or print the names of pages that differ from the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a page has to be written")
    parser.add_argument("--print", metavar="NAME", help="print one table, to be pasted into a page")
    options = parser.parse_args()
    try:
        if options.print:
            sys.exit(print(Table(TABLES / f"{options.print}.md").text()))
        pages = wanted()
    except ValueError as error:
        sys.exit(str(error))
    old = [page for page, text in pages.items() if page.read_text() != text]
    for page in old:
        print(page.relative_to(ROOT))
        if not options.check:
            page.write_text(pages[page])
    sys.exit(bool(old) and options.check)


if __name__ == "__main__":
    main()
