"""The page of trends: what the last runs of every benchmark found, commit by commit, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUNS = 8
"""So many are shown; the files remember more."""
HEAD = """# Trends

Written by `make figures` from `benchmarks/results`, where every file remembers its former runs; not to be edited. For each
benchmark the figures that the README and these pages show, or all where they show none, the newest run first. A benchmark that
has run once has one column. *Predicted* figures are those of the benchmarks that predict, and times are comparable only within
a run: what is worth following are ratios and counts.
"""


def page(results: Path, shown: Mapping[str, set[str]]) -> str:
    """Return the page of the files in a folder; ``shown`` has the figures that other pages show, by file."""
    files = sorted(results.glob("*.json"))
    parts = [_part(file.stem, json.loads(file.read_text()), shown.get(file.stem, set())) for file in files]
    return "\n".join([HEAD, *parts])


def _part(name: str, result: Mapping[str, Any], shown: set[str]) -> str:
    """A heading, the command and a table of figures over runs."""
    last = result["measured_on"]
    runs = [{**last, "figures": result["figures"]}, *result.get("earlier", [])][:RUNS]
    rows = [figure for figure in result["figures"] if figure in shown or not shown]
    lines = [f"## {name}", "", f"`{last['command']}`, on {last['processor']}.", ""]
    lines += ["| | " + " | ".join(_head(run, last) for run in runs) + " |", "|---|" + "--:|" * len(runs)]
    lines += [f"| {row} | " + " | ".join(_cell(run["figures"].get(row)) for run in runs) + " |" for row in rows]
    return "\n".join([*lines, ""])


def _head(run: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Commit and date, and what keeps a run from being compared with the last one."""
    other = [f"other {name}" for name in ("processor", "command") if run[name] != last[name]]
    return ", ".join([run["commit"], run["date"], *other])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
