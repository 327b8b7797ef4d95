"""Find out from the first lines how a text file holds interactions."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

Column = int | str
Line = Literal["interaction", "user"]
STAND_IN = "\x1f"
"""Stands for a delimiter of two bytes where only one can be split at."""
_DELIMITERS = ("\t", ",", " ", "::")
_SAID_BY_SUFFIX = {".csv": ",", ".tsv": "\t"}
_SAMPLE = 1 << 16  # bytes to look at
_NUMBER = re.compile(r"\s*[+-]?\.?\d[\d.,:TZ eE+-]*")  # or a date
TIME_TYPES = (
    pa.int64(),
    pa.float64(),
    pa.timestamp("s"),
    pa.timestamp("s", "UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ns", "UTC"),
)
"""The types that times written as text may have. If two of them fit a value, the later one takes more values."""


@dataclass(frozen=True)
class TextFormat:
    """The format of a text file of interactions.

    Attributes:
        delimiter: text between two values, one or two bytes in UTF-8.
        line: content of a line: one interaction, or a user and all items of that user in order.
        skip: lines before the first value: blank ones and the header.
        skipped_rows: number of these lines that are not empty.
        columns: number of columns.
        wanted: numbers of the columns of users, items and, if there are any, times.
        times: type of the times in the first lines; strings if they are no times.
    """

    delimiter: str
    line: Line
    skip: int
    skipped_rows: int
    columns: int
    wanted: tuple[int, ...]
    times: pa.DataType | None

    @property
    def quoted(self) -> bool:
        """Whether ``"`` encloses values; in files that are split at tabs or ``::`` it is a part of them."""
        return _is_quoted(self.delimiter)


def find_format(
    path: Path, wanted: list[Column], delimiter: str | None = None, header: bool | None = None, line: Line | None = None
) -> TextFormat:
    """Return the format of a file. Arguments that are None are detected from the first 64 KiB.

    Raises:
        ValueError: more than one format fits, or none; names what to pass.
    """
    first_lines = _first_lines(path)
    numbered = {number: text for number, text in enumerate(first_lines, 1) if text.strip()}
    if not numbered:
        raise ValueError(f"interactions file {path} is empty: pass a file with columns {wanted}")
    _refuse_json(path, next(iter(numbered.values())))
    if delimiter is not None and not 1 <= len(delimiter.encode()) <= 2:
        raise ValueError(f"delimiter={delimiter!r}: pass one or two bytes, such as ',' or '::'")
    if line not in (None, "interaction", "user"):
        raise ValueError(f'line={line!r}: pass "interaction", or "user" where a line holds a user and all items in order')
    numbers, lines = list(numbered), list(numbered.values())
    splits = {each: _split(lines, each) for each in ([delimiter] if delimiter else _DELIMITERS)}
    splits = {each: rows for each, rows in splits.items() if max(map(len, rows)) > 1}
    if not splits:
        at = repr(delimiter) if delimiter else "tab, comma, space or '::'"
        raise ValueError(f"{path}: no line of the first has {at} between values, as {lines[0][:80]!r}: pass delimiter=")
    if line is None:
        line = "user" if _holds_histories(splits, wanted) else "interaction"
    if line == "user":
        _refuse_columns(path, wanted)
    delimiter = _choose(path, numbers, splits, wanted, line)
    rows = splits[delimiter]
    named = _has_header(path, rows, [] if line == "user" else wanted, header)
    names: list[Any] = rows[0] if named else list(range(len(rows[0])))
    where = (0, 1) if line == "user" else positions(names, wanted, path)
    times = _time_type([fields[where[2]] for fields in rows[named:]]) if len(where) > 2 else None
    skip = numbers[0] - 1 + named
    return TextFormat(delimiter, line, skip, sum(map(bool, first_lines[:skip])), len(rows[0]), where, times)


def _first_lines(path: Path) -> list[str]:
    with pa.input_stream(str(path)) as file:
        sample, is_cut = file.read(_SAMPLE), bool(file.read(1))
    lines = re.split(r"\r\n|\r|\n", sample.decode("utf-8-sig", errors="replace"))
    return lines[:-1] if is_cut and len(lines) > 1 else lines


def _is_quoted(delimiter: str) -> bool:
    return delimiter != "\t" and len(delimiter.encode()) == 1


def _refuse_json(path: Path, line: str) -> None:
    try:
        value = json.loads(line)
    except ValueError:
        return
    if isinstance(value, dict):
        raise ValueError(
            f"{path} holds JSON lines, which are not read: pass pyarrow.json.read_json({str(path)!r}), or another table of its "
            "columns"
        )


def _split(lines: list[str], delimiter: str) -> list[list[str]]:
    quoting: Any = csv.QUOTE_MINIMAL if _is_quoted(delimiter) else csv.QUOTE_NONE
    if len(delimiter.encode()) == 2:
        lines, delimiter = [text.replace(delimiter, STAND_IN) for text in lines], STAND_IN
    return list(csv.reader(lines, delimiter=delimiter, quoting=quoting))


def _even(rows: list[list[str]]) -> bool:
    return len({len(fields) for fields in rows}) == 1


def _holds_histories(splits: dict[str, list[list[str]]], wanted: list[Column]) -> bool:
    """Return whether each line belongs to a user: lines of unequal length, each with another first value, and no times."""
    if len(wanted) > 2 or any(_even(rows) for rows in splits.values()):
        return False
    return all(len({fields[0] for fields in rows}) == len(rows) for rows in splits.values())


def _refuse_columns(path: Path, wanted: list[Column]) -> None:
    if len(wanted) > 2:
        raise ValueError(f'{path}: line="user" with time={wanted[2]!r}: the items of a line are in order, pass time=None')
    if wanted[0] not in ("user", 0) or wanted[1] not in ("item", 1):
        raise ValueError(
            f'{path}: line="user" with user={wanted[0]!r}, item={wanted[1]!r}: the user comes first, leave them out'
        )


def _choose(path: Path, numbers: list[int], splits: dict[str, list[list[str]]], wanted: list[Column], line: Line) -> str:
    """Return the delimiter by which all lines have equally many values, or the only one in lines of histories."""
    fit = splits if line == "user" else {each: rows for each, rows in splits.items() if _even(rows)}
    if not fit:
        delimiter, rows = min(splits.items(), key=lambda split: len(set(map(len, split[1]))))
        number, odd = next(each for each in zip(numbers, rows) if len(each[1]) != len(rows[0]))
        raise ragged(path, f"line {number}", len(odd), len(rows[0]), delimiter)
    said = _SAID_BY_SUFFIX.get(next((part for part in reversed(path.suffixes) if part in _SAID_BY_SUFFIX), ""))
    if said in fit:
        return said
    if len(fit) > 1 and line != "user":
        fit = {each: rows for each, rows in fit.items() if _has_columns(rows, wanted)} or fit
    if len(fit) > 1:
        counts = ", ".join(f"{each!r} ({len(rows[0])} values in the first line)" for each, rows in fit.items())
        raise ValueError(f"{path}: several delimiters fit its first lines: pass delimiter= one of {counts}")
    return next(iter(fit))


def _has_columns(rows: list[list[str]], wanted: list[Column]) -> bool:
    return all(column < len(rows[0]) if isinstance(column, int) else column in rows[0] for column in wanted)


def ragged(path: Path, where: str, found: int, expected: int, delimiter: str) -> ValueError:
    """Return the error for a line or row that has another number of values than the first."""
    return ValueError(
        f"{path}: {where} has {found} values, the first line {expected} (delimiter={delimiter!r}): mend that line or "
        'pass another delimiter=; where each line holds a user and all items in order, pass line="user", time=None'
    )


def _has_header(path: Path, rows: list[list[str]], wanted: list[Column], header: bool | None) -> bool:
    names = [column for column in wanted if isinstance(column, str)]
    if header is None and names and set(names) <= set(rows[0]):
        return True
    found = _looks_named(rows) if header is None else header
    if found is False and names:
        why = "header=False" if header is False else f"its first line {rows[0]} holds no names"
        raise ValueError(
            f"{path} has no header ({why}), so there is no column {names[0]!r}: pass the columns' numbers, such as "
            'user=0, item=1, time=2; where each line holds a user and all items in order, pass line="user", time=None'
        )
    if found is None and not names:
        raise ValueError(
            f"{path}: its first line {rows[0]} may be names or values, by what is below: pass header=True or header=False"
        )
    return found is not False


def _looks_named(rows: list[list[str]]) -> bool | None:
    """Return whether the first line holds names: words above numbers or dates. None if that is not clear."""
    if len(rows) == 1:
        return False if any(map(_NUMBER.fullmatch, rows[0])) else None
    columns = [(first, [value for value in below if value]) for first, *below in zip(*rows) if first]
    named = {not _NUMBER.fullmatch(first) for first, below in columns if below and all(map(_NUMBER.fullmatch, below))}
    return named.pop() if len(named) == 1 else None


def positions(names: list[Any], wanted: list[Column], source: object) -> tuple[int, ...]:
    """Return the numbers of the wanted columns among ``names``.

    Raises:
        ValueError: there is no such column, or two are wanted for one and the same.
    """
    for column in wanted:
        name = column if isinstance(column, str) else str(dict(enumerate(names)).get(column))
        if name.endswith("_seq") and ":" in name:
            raise ValueError(
                f"{source}: column {name!r} holds a list in each row, which would be read as one id: write one row for each "
                "interaction, or pass a table"
            )
        if column not in (range(len(names)) if isinstance(column, int) else names):
            raise ValueError(
                f"{source} has no column {column!r}, only {names}: name yours with user=, item=, time=, or give "
                "its number from 0"
            )
        if names.count(column) > 1 and isinstance(column, str):
            raise ValueError(f"{source} has several columns {column!r}: give the number of yours, from 0")
    found = tuple(column if isinstance(column, int) else names.index(column) for column in wanted)
    if len(set(found)) < len(found):
        raise ValueError(f"{source}: user, item and time are columns {wanted}, of which two are the same: pass one for each")
    return found


def try_cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """Return the values as another type, None if they do not fit it."""
    try:
        return pc.cast(values, kind)
    except pa.ArrowInvalid:
        return None


def _time_type(written: list[str]) -> pa.DataType:
    """Return the type of these times, empty ones aside; string if they are no times."""
    values = pa.chunked_array([pa.array([value for value in written if value], pa.large_string())])
    return next((kind for kind in TIME_TYPES if try_cast(values, kind) is not None), pa.string())
