"""A hook of MkDocs that adds the page of trends: the last runs of each benchmark, from benchmarks/results."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.append(str(Path(__file__).parent))

import figures

RUNS = 8
"""The number of runs that the page shows; the result files keep more."""
HEAD = """# Trends

The figures of the last runs of each benchmark, newest run first. For benchmarks with a table in README.md or in the
documentation, the page has only the figures of that table. Compare times only within a run, and ratios and counts between runs.
"""


def on_files(files: Any, config: Any) -> None:
    """Add the page to the site."""
    files.append(File.generated(config, "benchmarks/trends.md", content=page()))


def page() -> str:
    """Return the page in Markdown."""
    shown = {field for table in figures.tables() for field in table.fields()}
    results = {path.stem: json.loads(path.read_text()) for path in sorted(figures.RESULTS.glob("*.json"))}
    return "\n".join(
        [HEAD, *(_section(name, result, {row for file, row in shown if file == name}) for name, result in results.items())]
    )


def _section(name: str, result: Mapping[str, Any], shown: set[str]) -> str:
    last = result["measured_on"]
    runs = [{**last, "figures": result["figures"]}, *result.get("earlier", [])][:RUNS]
    lines = [f"## {name}", "", f"`{last['command']}`, on {last['processor']}.", ""]
    lines += ["| | " + " | ".join(_head(run, last) for run in runs) + " |", "|---|" + "--:|" * len(runs)]
    rows = [figure for figure in result["figures"] if figure in shown or not shown]
    lines += [f"| {_breakable(row)} | " + " | ".join(_cell(run["figures"].get(row)) for run in runs) + " |" for row in rows]
    return "\n".join([*lines, ""])


def _breakable(name: str) -> str:
    """Allow a new line after each part of a long name."""
    return name.replace("_", "_<wbr>")


def _head(run: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return commit and date, and the reasons why the run cannot be compared with the last one."""
    other = [f"other {name}" for name in ("processor", "command") if run[name] != last[name]]
    return ", ".join([run["commit"], run["date"], *other])


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value.partition(":")[0]  # a word, and the message after it
    return "-" if value is None else f"{value:.4g}"
