"""The columns of interactions, from whatever holds them: text, Parquet, data frames and Arrow tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from lightning_freescale.data.raw_files import read_text
from lightning_freescale.data.text_format import Column, Line, positions


def read_columns(
    source: Any, wanted: list[Column], delimiter: str | None = None, header: bool | None = None, line: Line | None = None
) -> pa.Table:
    """The wanted columns, in that order, under whatever names.

    Raises:
        FileNotFoundError, ValueError, TypeError: the source cannot be read, or has no such columns.
    """
    if isinstance(source, (str, Path)):
        table = _read_file(Path(source), wanted, delimiter, header, line)
        pa.default_memory_pool().release_unused()  # what parsing has used would else be held while the rows are grouped
        return table
    _refuse_format("table", delimiter, header, line)
    try:
        return _select(source, wanted)
    except pa.ArrowException as error:
        raise ValueError(f"the columns {wanted} of the table are no Arrow columns ({error}): give each one type") from error


def _read_file(path: Path, wanted: list[Column], delimiter: str | None, header: bool | None, line: Line | None) -> pa.Table:
    if not path.exists():
        raise FileNotFoundError(f"interactions file {path} does not exist")
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"interactions file {path} is empty: pass a file with columns {wanted}")
    try:
        if path.is_file() and path.suffix not in (".parquet", ".pq"):
            return read_text(path, wanted, delimiter, header, line)
        _refuse_format(path, delimiter, header, line)
        return _read_parquet(path, wanted)
    except (pa.ArrowException, OSError, EOFError, csv.Error) as error:
        raise ValueError(
            f"interactions file {path} cannot be read ({error}): is it truncated, or neither text in UTF-8 nor Parquet?"
        ) from error


def _refuse_format(source: object, delimiter: str | None, header: bool | None, line: Line | None) -> None:
    if (delimiter, header, line) != (None, None, None):
        raise ValueError(
            f"delimiter={delimiter!r}, header={header!r}, line={line!r} say how a text file is written, and {source} is none: "
            "leave them out"
        )


def _read_parquet(path: Path, wanted: list[Column]) -> pa.Table:
    dataset = pyarrow.parquet.ParquetDataset(path)
    names = dataset.schema.names
    chosen = [names[number] for number in positions(names, wanted, path)]
    return dataset.read(columns=chosen).select(chosen)


def _select(source: Any, wanted: list[Column]) -> pa.Table:
    if hasattr(source, "to_numpy") and hasattr(source, "columns"):
        # pandas or polars, whose other columns need not be such as Arrow has
        names = list(source.columns)
        source = source[[names[number] for number in positions(names, wanted, "table")]]
        wanted = list(range(len(wanted)))
    elif not hasattr(source, "__arrow_c_stream__"):
        raise TypeError(
            f"interactions in a {type(source).__name__}: pass a path, a pandas or polars DataFrame, a pyarrow Table, or what "
            "else has __arrow_c_stream__"
        )
    table = source if isinstance(source, pa.Table) else pa.table(source)
    return table.select(list(positions(table.column_names, wanted, "table")))
