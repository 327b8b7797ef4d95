"""Times of interactions as numbers that grow with time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_WRITTEN = (
    pa.int64(),
    pa.float64(),
    pa.timestamp("s"),
    pa.timestamp("s", "UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ns", "UTC"),
)
"""What times written as text may be; of two kinds that fit a value the later one takes more values."""


def kind_of(written: list[str]) -> pa.DataType:
    """The kind of times that these strings are, empty ones aside, or strings."""
    values = pa.chunked_array([pa.array([value for value in written if value], pa.large_string())])
    return next((kind for kind in _WRITTEN if _cast(values, kind) is not None), pa.string())


def as_times(values: pa.ChunkedArray, column: int | str, name: str) -> NDArray[Any]:
    """Int64 or float64 of every row, as :class:`~lightning_freescale.data.Histories` describes them; no value is missing.

    Raises:
        ValueError: a value is no time; names it, its row and what to pass.
    """
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if str(values.type) in ("string", "large_string", "string_view"):
        values = _parsed(values.cast(pa.large_string()), column, name)
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("s"))
    if pa.types.is_floating(values.type):
        return _finite(values.cast(pa.float64()).to_numpy(), column, name)
    if not (pa.types.is_integer(values.type) or pa.types.is_timestamp(values.type)):
        raise ValueError(
            f"column {column!r} of {name} holds {values.type}, not times, such as {values[0]} in row 0: pass the column "
            "of times, or time=None if the rows of each user are in order"
        )
    try:
        return np.asarray(values.cast(pa.int64()).to_numpy())
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {column!r} of {name} holds values beyond 64-bit integers ({error}): map them first"
        ) from error


def _parsed(values: pa.ChunkedArray, column: int | str, name: str) -> pa.ChunkedArray:
    parsed = next((found for kind in _WRITTEN if (found := _cast(values, kind)) is not None), None)
    if parsed is not None:
        return parsed
    row = _first_bad(values)
    other = f", and {values[0].as_py()!r} in row 0" if row else ""
    raise ValueError(
        f"column {column!r} of {name} has {values[row].as_py()!r} in row {row}{other}: times are all numbers, or all dates or "
        "ISO 8601, with a time zone or all without. Convert them, or pass time=None if the rows of each user are in order"
    )


def _cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    try:
        return pc.cast(values, kind)
    except pa.ArrowInvalid:
        return None


def _first_bad(values: pa.ChunkedArray) -> int:
    """The first row whose value is of another kind than that of row 0, or row 0 if that is of none."""
    kinds = [kind for kind in _WRITTEN if _cast(values.slice(0, 1), kind) is not None]
    good, bad = 0, len(values)  # that many values can be cast, and cannot
    while kinds and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if _cast(values.slice(good, middle - good), kinds[-1]) is None else (middle, bad)
    return bad - 1 if kinds else 0


def _finite(times: NDArray[np.float64], column: int | str, name: str) -> NDArray[np.float64]:
    bad = np.flatnonzero(~np.isfinite(times))
    if bad.size:
        raise ValueError(
            f"column {column!r} of {name} has {times[bad[0]]} in row {bad[0]} and {bad.size - 1} more that are no times: drop "
            "or fill those rows"
        )
    return times
