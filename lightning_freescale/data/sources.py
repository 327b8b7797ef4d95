"""Read the columns of interactions from any source: text, Parquet, data frames and Arrow tables."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from lightning_freescale._runtime.error_text import a
from lightning_freescale.data.text_format import (
    STAND_IN,
    TIME_TYPES,
    Column,
    Line,
    TextFormat,
    find_format,
    is_quoted,
    positions,
    ragged,
    try_cast,
)

_BLOCK = 1 << 24  # bytes to read at a time


def read_columns(
    source: Any, wanted: list[Column], delimiter: str | None = None, header: bool | None = None, line: Line | None = None
) -> pa.Table:
    """Return the wanted columns in their order, with unspecified names."""
    if isinstance(source, (str, Path)):
        table = _read_file(Path(source), wanted, delimiter, header, line)
        pa.default_memory_pool().release_unused()  # frees the memory of the parser before the rows are grouped
        return table
    _refuse_format("table", delimiter, header, line)
    try:
        return _select(source, wanted)
    except pa.ArrowException as error:
        raise ValueError(
            f"the columns {wanted} of the table cannot be converted to Arrow ({error}). Each column needs a single type"
        ) from error


def _read_file(path: Path, wanted: list[Column], delimiter: str | None, header: bool | None, line: Line | None) -> pa.Table:
    if not path.exists():
        raise FileNotFoundError(f"interactions file {path} does not exist")
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"interactions file {path} is empty. Pass a file with columns {wanted}")
    try:
        if path.is_file() and path.suffix not in (".parquet", ".pq"):
            return _read_text(path, wanted, find_format(path, wanted, delimiter, header, line))
        _refuse_format(path, delimiter, header, line)
        dataset = pyarrow.parquet.ParquetDataset(path)
        chosen = [dataset.schema.names[number] for number in positions(dataset.schema.names, wanted, path)]
        return dataset.read(columns=chosen).select(chosen)
    except (pa.ArrowException, OSError, EOFError, csv.Error) as error:
        raise ValueError(
            f"cannot read interactions file {path} ({error}). It may be truncated, or neither text in UTF-8 nor Parquet"
        ) from error


def _refuse_format(source: object, delimiter: str | None, header: bool | None, line: Line | None) -> None:
    if (delimiter, header, line) != (None, None, None):
        raise ValueError(
            f"delimiter={delimiter!r}, header={header!r}, line={line!r} only apply to text files, but {source} is not a "
            "text file. Remove them"
        )


def _select(source: Any, wanted: list[Column]) -> pa.Table:
    if hasattr(source, "to_numpy") and hasattr(source, "columns"):
        # pandas or polars: other columns may have types that Arrow does not support
        names = list(source.columns)
        source = source[[names[number] for number in positions(names, wanted, "table")]]
        wanted = list(range(len(wanted)))
    elif not hasattr(source, "__arrow_c_stream__"):
        raise TypeError(
            f"{a(type(source))} is no source of interactions. Pass a path, a pandas or polars DataFrame, a "
            "pyarrow Table, or any object with __arrow_c_stream__"
        )
    table = source if isinstance(source, pa.Table) else pa.table(source)
    return table.select(list(positions(table.column_names, wanted, "table")))


# -- text files


def _read_text(path: Path, wanted: list[Column], text_format: TextFormat) -> pa.Table:
    """Return the columns of users, items and, if wanted, times.

    Ids are dictionary arrays of 64-bit integers if all ids of a column are written as integers, and otherwise of strings.
    """
    table = _read_histories(path, text_format) if text_format.line == "user" else _read_rows(path, text_format)
    users, items, *times = table.columns
    ids = [_as_written(values, column, path) for values, column in zip((users, items), wanted)]
    return pa.table([*ids, *times], names=[str(number) for number in range(len(wanted))])


def _read_rows(path: Path, text_format: TextFormat) -> pa.Table:
    try:
        table = _read_csv(path, text_format)
    except pa.ArrowInvalid as error:
        if "CSV parse error" in str(error):
            _refuse_ragged(path, text_format)
        if "CSV conversion error" not in str(error) or text_format.times is None:
            raise
        table = _read_csv(path, replace(text_format, times=pa.string()))  # later times have another format
    lines = _count_lines(path) - text_format.skipped_rows
    if table.num_rows != lines:
        raise ValueError(
            f"{path} has {lines} lines, but {table.num_rows} rows, because a quotation mark opens a value that ends in another "
            "line. Double the quotation marks within values, or separate values by tabs, which disables quotation marks"
        )
    return table


def _count_lines(path: Path) -> int:
    """Return the number of lines that are not empty."""
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


def _read_csv(path: Path, text_format: TextFormat, if_ragged: Callable[[Any], str] | None = None) -> pa.Table:
    names = [str(number) for number in text_format.wanted]
    ids = pa.dictionary(pa.int32(), pa.string())  # numbers would lose leading zeros
    types = dict(zip(names, (ids, ids, text_format.times)))  # all types, because Arrow keeps the whole text to infer one
    delimiter = text_format.delimiter.encode()
    with pa.input_stream(str(path)) as file:
        return pyarrow.csv.read_csv(
            file if len(delimiter) == 1 else _OneByteDelimiter(file, delimiter),
            pyarrow.csv.ReadOptions(
                use_threads=if_ragged is None,  # only a single thread counts rows
                block_size=_BLOCK,
                skip_rows=text_format.skip,
                column_names=[str(number) for number in range(text_format.columns)],
            ),
            pyarrow.csv.ParseOptions(
                delimiter=text_format.delimiter if len(delimiter) == 1 else STAND_IN,
                quote_char='"' if is_quoted(text_format.delimiter) else False,
                invalid_row_handler=if_ragged,
            ),
            pyarrow.csv.ConvertOptions(column_types=types, include_columns=names, strings_can_be_null=True),
        )


def _refuse_ragged(path: Path, text_format: TextFormat) -> None:
    found: list[Any] = []

    def note(row: Any) -> str:  # Arrow discards exceptions of this function
        found.append(row)
        return "error"

    with suppress(pa.ArrowInvalid):
        _read_csv(path, text_format, note)
    for row in found[:1]:
        where = f"row {row.number - text_format.skip - 1}"
        raise ragged(path, where, row.actual_columns, row.expected_columns, text_format.delimiter)


class _OneByteDelimiter:
    """A file that replaces a delimiter of two bytes by one byte."""

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
    """Return one row per interaction of a file with one line per user."""
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
    """Yield whole lines, about 16 MiB at a time."""
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
        raise ValueError(
            f"{path}: line {lines[alone[0]]} and {alone.size - 1} more have a user without items. Remove these lines"
        )
    empty = pc.index(values, "").as_py()
    if empty >= 0:
        line = lines[np.searchsorted(np.cumsum(counts), empty, side="right")]
        raise ValueError(f"{path}: line {line} has an empty value. Correct the line, or pass another delimiter=")


def _as_written(column: pa.ChunkedArray, name: Column, path: Path) -> pa.ChunkedArray:
    """Return integers if each id is the canonical text of a 64-bit integer; otherwise the column."""
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
                f"column {name!r} of {path} has numbers with a fraction, such as {value} in row {row}. Ids must be integers or "
                "strings. Pass the column of ids, or write them without fraction"
            )


# -- times


def as_times(values: pa.ChunkedArray, column: int | str, name: str) -> NDArray[Any]:
    """Return the times as int64 or float64, see :class:`~lightning_freescale.data.Histories`."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if str(values.type) in ("string", "large_string", "string_view"):
        values = _parsed(values.cast(pa.large_string()), column, name)
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("s"))
    if pa.types.is_floating(values.type):
        times: NDArray[np.float64] = values.cast(pa.float64()).to_numpy()
        bad = np.flatnonzero(~np.isfinite(times))
        if bad.size:
            raise ValueError(
                f"column {column!r} of {name} has {times[bad[0]]} in row {bad[0]} and {bad.size - 1} more invalid times. Drop "
                "or fill these rows"
            )
        return times
    if not (pa.types.is_integer(values.type) or pa.types.is_timestamp(values.type)):
        raise ValueError(
            f"column {column!r} of {name} has type {values.type}, such as {values[0]} in row 0, which is no time. Pass the "
            "column of times, or time=None if the rows of each user are in order"
        )
    return np.asarray(as_int64(values, column, name).to_numpy())


def as_int64(values: Any, column: int | str, name: str) -> Any:
    """Return an Arrow array as 64-bit integers."""
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {column!r} of {name} has values beyond 64-bit integers ({error}). Map them to smaller integers"
        ) from error


def _parsed(values: pa.ChunkedArray, column: int | str, name: str) -> pa.ChunkedArray:
    parsed = next((found for kind in TIME_TYPES if (found := try_cast(values, kind)) is not None), None)
    if parsed is not None:
        return parsed
    row = _first_bad(values)
    other = f", and {values[0].as_py()!r} in row 0" if row else ""
    raise ValueError(
        f"column {column!r} of {name} has {values[row].as_py()!r} in row {row}{other}. Times must be all "
        "numbers, or all dates or ISO 8601, all with or all without a time zone. Convert them, or pass time=None if the "
        "rows of each user are in order"
    )


def _first_bad(values: pa.ChunkedArray) -> int:
    """Return the first row whose value has a different type than row 0; 0 if row 0 is no time."""
    kinds = [kind for kind in TIME_TYPES if try_cast(values.slice(0, 1), kind) is not None]
    good, bad = 0, len(values)  # the first ``good`` values can be cast, the first ``bad`` ones cannot
    while kinds and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if try_cast(values.slice(good, middle - good), kinds[-1]) is None else (middle, bad)
    return bad - 1 if kinds else 0
