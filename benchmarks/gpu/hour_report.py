"""Results of a part of the first hour: rows, skips, failures and figures, in one JSON file.

A part is a script ``part_X.py --out DIR [--quick]``. It creates one :class:`Report`. Each call that adds a result rewrites
DIR/part_X.json atomically, so a part that is killed keeps its results. At its end it calls :meth:`Report.end`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).parents[1]))

import harness

Cell = str | int | float | bool | None
_MOST = 4000  # characters of an error that are kept, its last ones


class Skip(Exception):  # noqa: N818 (nothing went wrong)
    """Raised inside :meth:`Report.check` if something is not possible here; the message is the reason."""


class Report:
    """The results of one part so far, always on disk.

    Args:
        part: name of the part, as in ``part_<name>.py``.
        out: folder of the files; it is created if it does not exist.

    Attributes:
        part: name of the part.
        device: name of the GPU, or "CPU".
    """

    def __init__(self, part: str, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.part, self._out = part, out
        found = harness.where()
        self.device = found.get("gpu", "CPU")
        self._versions, self._commit = found, found.pop("commit")
        self._rows: list[dict[str, Cell]] = []
        self._skipped: list[dict[str, str]] = []
        self._failed: list[dict[str, str]] = []
        self._figures: dict[str, float] = {}
        self.write()

    def row(self, **cells: Cell) -> None:
        """Add a row of the table; rows of one part may have different columns.

        Infinity and NaN become None, because JSON has neither, and the row counts as failed.
        """
        odd = {column: cell for column, cell in cells.items() if isinstance(cell, float) and not math.isfinite(cell)}
        self._rows.append({**cells, **dict.fromkeys(odd)})
        if odd:
            name = ", ".join(cell for cell in cells.values() if isinstance(cell, str))
            self.fail(name or f"row {len(self._rows)}", f"not finite: {odd}")
        self.write()

    def skip(self, what: str, why: str) -> None:
        """Record that something is not possible here, which is no failure."""
        self._skipped.append({"what": what, "why": why})
        self.write()

    def fail(self, what: str, error: BaseException | str) -> None:
        """Record that a check failed or could not run; the part continues and ends with 1."""
        said = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        self._failed.append({"what": what, "error": said.strip()[-_MOST:]})
        self.write()

    def figure(self, name: str, value: float) -> None:
        """Add a number that ``--require`` of the driver can check, as ``X.name``; a number that is not finite is a failure."""
        if math.isfinite(value):
            self._figures[name] = value
        else:
            self.fail(name, f"not finite: {value}")
        self.write()

    @contextmanager
    def check(self, what: str) -> Iterator[None]:
        """Record an exception of the block as a failure, or as a skip if it is :class:`Skip`; the part then continues."""
        try:
            yield
        except Skip as reason:
            self.skip(what, str(reason))
        except Exception as error:
            self.fail(what, error)

    def take(self, what: str, said: Iterable[tuple[str, dict]]) -> None:
        """Apply a message of another process: a method of this class and its arguments. If it fails, ``what`` has failed."""
        with self.check(what):
            for name, arguments in said:
                getattr(self, name)(**arguments)

    def write(self) -> None:
        """Write DIR/part_X.json atomically."""
        replace(self._out / f"part_{self.part}.json", json.dumps(self.found(), indent=2, allow_nan=False) + "\n")

    def found(self) -> dict[str, object]:
        """Return the content of the JSON file."""
        return {
            "part": self.part,
            "device": self.device,
            "versions": self._versions,
            "commit": self._commit,
            "rows": self._rows,
            "skipped": self._skipped,
            "failed": self._failed,
            "figures": self._figures,
        }

    def end(self) -> NoReturn:
        """Write and print DIR/part_X.md; exit with 1 if anything failed, with 0 otherwise."""
        text = markdown(self.found())
        replace(self._out / f"part_{self.part}.md", text)
        print(text, flush=True)
        sys.exit(1 if self._failed else 0)


def options(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags that all parts have: ``out`` and ``quick``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of part_X.json and part_X.md")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    return parser.parse_args(arguments)


def markdown(found: dict) -> str:
    """Return the JSON of a part as tables in Markdown: one for each set of columns, in the order of their first rows."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if name not in ("gpu", "machine"))
    lines = [f"## {found['part']}", "", f"{found['device']}; {versions}; commit {found['commit']}"]
    tables: dict[tuple[str, ...], list[dict]] = {}
    for row in found["rows"]:
        tables.setdefault(tuple(row), []).append(row)
    for columns, rows in tables.items():
        lines += ["", _line(columns), _line("---" for _ in columns)]
        lines += [_line(_shown(row[column]) for column in columns) for row in rows]
    for title, entries, said in (("Failed", found["failed"], "error"), ("Skipped", found["skipped"], "why")):
        if entries:
            lines += ["", f"{title}:", ""] + [f"- {entry['what']}: {_last_line(entry[said])}" for entry in entries]
    return "\n".join(lines) + "\n"


def replace(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds the old text or the new one."""
    written = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    written.write_text(text)
    os.replace(written, path)


def _line(cells: Iterator[str] | Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ")


def _last_line(text: str) -> str:
    """Return the line of a traceback that names the error."""
    return (text.strip() or "nothing said").splitlines()[-1]
