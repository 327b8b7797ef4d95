"""Read the columns of interactions from text files: one line an interaction, or one line a user."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from lightning_freescale.data.text_format import STAND_IN, Column, Line, TextFormat, find_format, ragged

_BLOCK = 1 << 24  # bytes to read at a time


def read_text(
    path: Path, wanted: list[Column], delimiter: str | None = None, header: bool | None = None, line: Line | None = None
) -> pa.Table:
    """The columns of users, items and, if wanted, times. What is None is found out.

    Ids come as dictionary arrays, of 64-bit integers where all of a column are written as such and else of strings.

    Raises:
        ValueError: the format is not clear, or a line does not fit it.
    """
    text_format = find_format(path, wanted, delimiter, header, line)
    table = _read_histories(path, text_format) if text_format.line == "user" else _read_rows(path, text_format)
    users, items, *times = table.columns
    ids = [_as_written(values, column, path) for values, column in zip((users, items), wanted)]
    return pa.table([*ids, *times], names=[str(number) for number in range(len(wanted))])


def _read_rows(path: Path, text_format: TextFormat) -> pa.Table:
    table = _read_any_times(path, text_format)
    lines = _count_lines(path) - text_format.skipped_rows
    if table.num_rows != lines:
        raise ValueError(
            f"{path}: {table.num_rows} rows were read of {lines} lines, because a quotation mark opens a value that ends in "
            "another line: double the marks within values, or write the file with tabs, where marks have no meaning"
        )
    return table


def _count_lines(path: Path) -> int:
    """Return how many lines are not empty."""
    count, last = 0, b"\n"
    with pa.input_stream(str(path)) as file:
        first = file.read(len(codecs.BOM_UTF8))
        rest = b"" if first == codecs.BOM_UTF8 else first
        while block := rest + file.read(_BLOCK):
            rest = b""
            text = np.frombuffer(last + block.replace(b"\r", b"\n"), np.uint8)
            ends = text == ord("\n")
            count += int((ends[:-1] & ~ends[1:]).sum())  # a line begins
            last = b"\n" if ends[-1] else b" "
    return count


def _read_any_times(path: Path, text_format: TextFormat) -> pa.Table:
    try:
        return _read_csv(path, text_format)
    except pa.ArrowInvalid as error:
        if "CSV conversion error" in str(error) and text_format.times is not None:
            return _read_csv(path, replace(text_format, times=pa.string()))  # they are not written as those of the first lines
        if "CSV parse error" in str(error):
            _refuse_ragged(path, text_format)
        raise


def _read_csv(path: Path, text_format: TextFormat, if_ragged: Callable[[Any], str] | None = None) -> pa.Table:
    names = [str(number) for number in text_format.wanted]
    ids = pa.dictionary(pa.int32(), pa.string())  # as written: numbers would lose the zeros that an id begins with
    types = dict(zip(names, (ids, ids, text_format.times)))  # all: to find one out, Arrow keeps the text of the whole file
    delimiter = text_format.delimiter.encode()
    with pa.input_stream(str(path)) as file:
        return pyarrow.csv.read_csv(
            file if len(delimiter) == 1 else _OneByteDelimiter(file, delimiter),
            pyarrow.csv.ReadOptions(
                use_threads=if_ragged is None,  # one thread knows the numbers of rows
                block_size=_BLOCK,
                skip_rows=text_format.skip,
                column_names=[str(number) for number in range(text_format.columns)],
            ),
            pyarrow.csv.ParseOptions(
                delimiter=text_format.delimiter if len(delimiter) == 1 else STAND_IN,
                quote_char='"' if text_format.quoted else False,
                invalid_row_handler=if_ragged,
            ),
            pyarrow.csv.ConvertOptions(column_types=types, include_columns=names, strings_can_be_null=True),
        )


def _refuse_ragged(path: Path, text_format: TextFormat) -> None:
    found: list[Any] = []

    def note(row: Any) -> str:  # what it raised would not come through Arrow
        found.append(row)
        return "error"

    with suppress(pa.ArrowInvalid):
        _read_csv(path, text_format, note)
    for row in found[:1]:
        where = f"row {row.number - text_format.skip - 1}"
        raise ragged(path, where, row.actual_columns, row.expected_columns, text_format.delimiter)


class _OneByteDelimiter:
    """Reads a file with one byte in the place of a delimiter of two."""

    def __init__(self, file: pa.NativeFile, delimiter: bytes) -> None:
        self._file, self._delimiter, self.closed = file, delimiter, False

    def read(self, size: int) -> bytes:
        block = self._file.read(size - 1)
        if block.endswith(self._delimiter[:1]):
            block += self._file.read(1)
        return block.replace(self._delimiter, STAND_IN.encode())

    def close(self) -> None:
        self.closed = True


def _read_histories(path: Path, text_format: TextFormat) -> pa.Table:
    """One row an interaction, of a file with one line a user."""
    users, items, skip, before = [], [], text_format.skip, 0
    with pa.input_stream(str(path)) as file:
        for block in _blocks(file):
            text = pa.array([block], pa.large_binary()).cast(pa.large_string())
            lines = pc.ascii_trim_whitespace(pc.split_pattern(text, "\n").flatten().slice(skip))
            numbers = before + skip + 1 + np.flatnonzero(pc.not_equal(lines, "").to_numpy(zero_copy_only=False))
            before, skip = before + skip + len(lines), 0
            lines = lines.filter(pc.not_equal(lines, ""))
            if text_format.delimiter == " ":
                fields = pc.ascii_split_whitespace(lines)
            else:
                fields = pc.split_pattern(lines, text_format.delimiter)
            counts, values = pc.list_value_length(fields).to_numpy(), fields.flatten()
            _refuse_empty(path, numbers, counts, values)
            is_user = np.zeros(len(values), dtype=bool)
            is_user[np.cumsum(counts) - counts] = True
            of_line = values.filter(pa.array(is_user)).dictionary_encode()
            codes = pa.array(np.repeat(of_line.indices.to_numpy(), counts - 1))
            users.append(pa.DictionaryArray.from_arrays(codes, of_line.dictionary))
            items.append(values.filter(pa.array(~is_user)).dictionary_encode())
    ids = pa.dictionary(pa.int32(), pa.large_string())
    return pa.table([pa.chunked_array(users, ids), pa.chunked_array(items, ids)], names=["0", "1"])


def _blocks(file: pa.NativeFile) -> Iterator[bytes]:
    """Whole lines, some 16 MiB at a time."""
    rest = b""
    while block := file.read(_BLOCK):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield whole
    if rest:
        yield rest


def _refuse_empty(path: Path, lines: np.ndarray, counts: np.ndarray, values: pa.Array) -> None:
    alone = np.flatnonzero(counts < 2)
    if alone.size:
        raise ValueError(f"{path}: line {lines[alone[0]]} and {alone.size - 1} more name a user and no item: leave them out")
    empty = pc.index(values, "").as_py()
    if empty >= 0:
        line = lines[np.searchsorted(np.cumsum(counts), empty, side="right")]
        raise ValueError(f"{path}: line {line} has an empty value: mend it, or pass another delimiter=")


def _as_written(column: pa.ChunkedArray, name: Column, path: Path) -> pa.ChunkedArray:
    """Integers instead of strings where every id is written as one: no zero before, no plus, no fraction, within 64 bits."""
    column = column.unify_dictionaries()
    if not column.num_chunks:
        return column
    written = column.chunk(0).dictionary
    try:
        integers = written.cast(pa.int64())
    except pa.ArrowInvalid:
        _refuse_fractions(column, written, name, path)
        return column
    if not pc.all(pc.equal(integers.cast(written.type), written)).as_py():
        return column
    return pa.chunked_array([pa.DictionaryArray.from_arrays(chunk.indices, integers) for chunk in column.chunks])


def _refuse_fractions(column: pa.ChunkedArray, written: pa.Array, name: Column, path: Path) -> None:
    if pc.all(pc.match_substring_regex(written, r"^[+-]?\d*\.?\d+$")).as_py():
        fractions = pc.match_substring(written, ".")
        if pc.any(fractions).as_py():
            value = written[pc.index(fractions, True).as_py()].as_py()
            row = next(number for number, other in enumerate(column) if other.as_py() == value)
            raise ValueError(
                f"column {name!r} of {path} holds numbers with a fraction, not integers or strings, such as {value} in row "
                f"{row}: pass the column of ids, or write them without"
            )
