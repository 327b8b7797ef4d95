"""Detect the format of a text file of interactions from its first lines."""

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
"""The byte that replaces a delimiter of two bytes for parsers that support one byte."""
_DELIMITERS = ("\t", ",", " ", "::")
_SAID_BY_SUFFIX = {".csv": ",", ".tsv": "\t"}
_SAMPLE = 1 << 16  # bytes
_NUMBER = re.compile(r"\s*[+-]?\.?\d[\d.,:TZ eE+-]*")  # or a date
TIME_TYPES = (
    pa.int64(),
    pa.float64(),
    pa.timestamp("s"),
    pa.timestamp("s", "UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ns", "UTC"),
)
"""The possible types of times in text. If two types fit a value, the later one fits more values."""


@dataclass(frozen=True)
class TextFormat:
    """The format of a text file of interactions."""

    delimiter: str  # text between two values, one or two bytes in UTF-8
    line: Line  # content of a line, as in read_interactions
    skip: int  # number of lines before the first value: blank lines and the header
    skipped_rows: int  # number of these lines that are not empty
    columns: int
    wanted: tuple[int, ...]  # numbers of the columns of users, items and, optionally, times
    times: pa.DataType | None  # type of the times in the first lines; string if they are no times


def find_format(
    path: Path, wanted: list[Column], delimiter: str | None = None, header: bool | None = None, line: Line | None = None
) -> TextFormat:
    """Return the format of a file. Arguments that are None are detected from the first 64 KiB."""
    first_lines = _first_lines(path)
    numbered = {number: text for number, text in enumerate(first_lines, 1) if text.strip()}
    if not numbered:
        raise ValueError(f"interactions file {path} is empty. Pass a file with columns {wanted}")
    _refuse_json(path, next(iter(numbered.values())))
    if delimiter is not None and not 1 <= len(delimiter.encode()) <= 2:
        raise ValueError(f"delimiter={delimiter!r}: pass one or two bytes, such as ',' or '::'")
    if line not in (None, "interaction", "user"):
        raise ValueError(f'line={line!r}: pass "interaction", or "user" if each line has a user and all items in order')
    numbers, lines = list(numbered), list(numbered.values())
    splits = {each: _split(lines, each) for each in ([delimiter] if delimiter else _DELIMITERS)}
    splits = {each: rows for each, rows in splits.items() if max(map(len, rows)) > 1}
    if not splits:
        at = repr(delimiter) if delimiter else "tab, comma, space or '::'"
        raise ValueError(f"{path}: the first lines, such as {lines[0][:80]!r}, have no {at} between values. Pass delimiter=")
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


def is_quoted(delimiter: str) -> bool:
    """Return whether ``"`` encloses values. In files with tabs or ``::`` it is part of the values."""
    return delimiter != "\t" and len(delimiter.encode()) == 1


def _refuse_json(path: Path, line: str) -> None:
    try:
        value = json.loads(line)
    except ValueError:
        return
    if isinstance(value, dict):
        raise ValueError(
            f"{path} has JSON lines, which are not supported. Pass pyarrow.json.read_json({str(path)!r}) or another table"
        )


def _split(lines: list[str], delimiter: str) -> list[list[str]]:
    quoting: Any = csv.QUOTE_MINIMAL if is_quoted(delimiter) else csv.QUOTE_NONE
    if len(delimiter.encode()) == 2:
        lines, delimiter = [text.replace(delimiter, STAND_IN) for text in lines], STAND_IN
    return list(csv.reader(lines, delimiter=delimiter, quoting=quoting))


def _even(rows: list[list[str]]) -> bool:
    return len({len(fields) for fields in rows}) == 1


def _holds_histories(splits: dict[str, list[list[str]]], wanted: list[Column]) -> bool:
    """Return whether each line belongs to a user: different lengths, different first values, and no times."""
    if len(wanted) > 2 or any(_even(rows) for rows in splits.values()):
        return False
    return all(len({fields[0] for fields in rows}) == len(rows) for rows in splits.values())


def _refuse_columns(path: Path, wanted: list[Column]) -> None:
    if len(wanted) > 2:
        raise ValueError(f'{path}: line="user" needs time=None, but time={wanted[2]!r}. The items of a line must be in order')
    if wanted[0] not in ("user", 0) or wanted[1] not in ("item", 1):
        raise ValueError(
            f'{path}: line="user" cannot be combined with user={wanted[0]!r}, item={wanted[1]!r}. The user must come first. '
            "Remove user= and item="
        )


def _choose(path: Path, numbers: list[int], splits: dict[str, list[list[str]]], wanted: list[Column], line: Line) -> str:
    """Return the delimiter with which all lines have the same number of values, or the only one in lines of histories."""
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
        raise ValueError(f"{path}: several delimiters fit the first lines. Pass delimiter= with one of {counts}")
    return next(iter(fit))


def _has_columns(rows: list[list[str]], wanted: list[Column]) -> bool:
    return all(column < len(rows[0]) if isinstance(column, int) else column in rows[0] for column in wanted)


def ragged(path: Path, where: str, found: int, expected: int, delimiter: str) -> ValueError:
    """Return the error for a line whose number of values differs from that of the first line."""
    return ValueError(
        f"{path}: {where} has {found} values, but the first line has {expected} (delimiter={delimiter!r}). Correct the "
        'line, or pass another delimiter=. If each line has a user and all items in order, pass line="user", time=None'
    )


def _has_header(path: Path, rows: list[list[str]], wanted: list[Column], header: bool | None) -> bool:
    names = [column for column in wanted if isinstance(column, str)]
    if header is None and names and set(names) <= set(rows[0]):
        return True
    found = _looks_named(rows) if header is None else header
    if found is False and names:
        why = "header=False" if header is False else f"the first line {rows[0]} has no names"
        raise ValueError(
            f"{path} has no header ({why}), so there is no column {names[0]!r}. Pass the numbers of columns, such as "
            'user=0, item=1, time=2. If each line has a user and all items in order, pass line="user", time=None'
        )
    if found is None and not names:
        raise ValueError(f"{path}: the first line {rows[0]} may be names or values. Pass header=True or header=False")
    return found is not False


def _looks_named(rows: list[list[str]]) -> bool | None:
    """Return whether the first line has words above numbers or dates; None if this is ambiguous."""
    if len(rows) == 1:
        return False if any(map(_NUMBER.fullmatch, rows[0])) else None
    columns = [(first, [value for value in below if value]) for first, *below in zip(*rows) if first]
    named = {not _NUMBER.fullmatch(first) for first, below in columns if below and all(map(_NUMBER.fullmatch, below))}
    return named.pop() if len(named) == 1 else None


def positions(names: list[Any], wanted: list[Column], source: object) -> tuple[int, ...]:
    """Return the numbers of the wanted columns among ``names``."""
    for column in wanted:
        name = column if isinstance(column, str) else str(dict(enumerate(names)).get(column))
        if name.endswith("_seq") and ":" in name:
            raise ValueError(
                f"{source}: column {name!r} has a list in each row, which would be read as one id. Write one row per "
                "interaction, or pass a table"
            )
        if column not in (range(len(names)) if isinstance(column, int) else names):
            raise ValueError(
                f"{source} has no column {column!r}, only {names}. Pass names or numbers, counted from 0, as user=, "
                "item= and time="
            )
        if names.count(column) > 1 and isinstance(column, str):
            raise ValueError(f"{source} has several columns {column!r}. Pass the number of the column, counted from 0")
    found = tuple(column if isinstance(column, int) else names.index(column) for column in wanted)
    if len(set(found)) < len(found):
        raise ValueError(f"{source}: two of the columns {wanted} for user, item and time are the same. Pass different columns")
    return found


def try_cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """Return the values as another type, None if they do not fit it."""
    try:
        return pc.cast(values, kind)
    except pa.ArrowInvalid:
        return None


def _time_type(written: list[str]) -> pa.DataType:
    """Return the type of times in text without empty values; string if they are no times."""
    values = pa.chunked_array([pa.array([value for value in written if value], pa.large_string())])
    return next((kind for kind in TIME_TYPES if try_cast(values, kind) is not None), pa.string())
