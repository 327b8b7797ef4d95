"""Read user-item-time interactions from CSV or Parquet into one sorted history per user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray


@dataclass(frozen=True)
class Histories:
    """Every user's interactions in time order, back to back.

    Attributes:
        items: dense item ids ``0 .. num_items - 1``, shape ``[interactions]``.
        times: time stamps as in the file, shape ``[interactions]``.
        offsets: user ``u`` owns ``items[offsets[u]:offsets[u + 1]]``, shape ``[users + 1]``.
        user_ids: the file's id of user ``u``, shape ``[users]``.
        item_ids: the file's id of item ``i``, shape ``[num_items]``; keep it for serving.
    """

    items: NDArray[np.int64]
    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    user_ids: NDArray[np.int64]
    item_ids: NDArray[np.int64]

    @property
    def num_items(self) -> int:
        """How many different items there are; a table for them needs as many rows."""
        return len(self.item_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Interactions of every user, shape ``[users]``."""
        return np.diff(self.offsets)


def read_interactions(
    source: str | Path | pa.Table,
    *,
    user: str = "user",
    item: str = "item",
    time: str = "time",
    order: Literal["given", "sort"] = "given",
    ties: Literal["error", "keep"] = "error",
) -> Histories:
    """Read interactions and group them by user.

    Args:
        source: a ``.csv`` (also ``.csv.gz``) or ``.parquet`` file, or a pyarrow table, one row an interaction.
        user: column of user ids, integers.
        item: column of item ids, integers.
        time: column of time stamps, integers.
        order: ``"given"`` demands that each user's rows come in time order; ``"sort"`` sorts them.
        ties: ``"error"`` refuses two interactions of a user at the same time; ``"keep"`` leaves them in file order.

    Raises:
        FileNotFoundError, ValueError: what is wrong, in which column or row, and what to pass instead.
    """
    name = "table" if isinstance(source, pa.Table) else str(source)
    table = source if isinstance(source, pa.Table) else _read(Path(source), [user, item, time])
    users, items, times = (_integers(table, column, name) for column in (user, item, time))
    if not len(users):
        raise ValueError(f"{name} holds no interaction: pass a file with at least one row")
    by_user = np.lexsort((times, users) if order == "sort" else (users,))
    users, items, times = users[by_user], items[by_user], times[by_user]
    _check_times(users, times, order, ties, name, time)
    user_ids, starts = np.unique(users, return_index=True)
    item_ids, dense = np.unique(items, return_inverse=True)
    return Histories(dense, times, np.append(starts, len(users)), user_ids, item_ids)


def _read(path: Path, columns: list[str]) -> pa.Table:
    if not path.exists():
        raise FileNotFoundError(f"interactions file {path} does not exist")
    if not path.stat().st_size:
        raise ValueError(f"interactions file {path} is empty: pass a file with columns {columns}")
    try:
        if path.suffix in (".parquet", ".pq"):
            return pyarrow.parquet.read_table(path)
        return pyarrow.csv.read_csv(path)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ValueError(f"interactions file {path} cannot be read ({error}): is it truncated, or not CSV/Parquet?") from error


def _integers(table: pa.Table, column: str, name: str) -> NDArray[np.int64]:
    if column not in table.column_names:
        raise ValueError(f"{name} has no column {column!r}, only {table.column_names}: name yours with user=, item=, time=")
    values = table.column(column)
    if values.null_count:
        raise ValueError(f"column {column!r} of {name} has {values.null_count} missing values: drop or fill those rows")
    if not len(values):  # a CSV with a header alone has columns of type null
        return np.empty(0, dtype=np.int64)
    if pa.types.is_timestamp(values.type):
        values = pc.cast(values, pa.int64())
    if not pa.types.is_integer(values.type):
        raise ValueError(f"column {column!r} of {name} holds {values.type}, not integers: map its values to integers first")
    try:
        return np.asarray(pc.cast(values, pa.int64()).to_numpy(), dtype=np.int64)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {column!r} of {name} holds values beyond 64-bit integers ({error}): map them first"
        ) from error


def _check_times(users: NDArray[np.int64], times: NDArray[np.int64], order: str, ties: str, name: str, column: str) -> None:
    step, same_user = np.diff(times), np.diff(users) == 0
    backwards = np.flatnonzero(same_user & (step < 0))
    if order == "given" and backwards.size:
        raise ValueError(
            f"{name}: {column!r} goes back in time for user {users[backwards[0]]} and {backwards.size - 1} more places. "
            'Pass order="sort" to sort every history by time.'
        )
    equal = np.flatnonzero(same_user & (step == 0))
    if ties == "error" and equal.size:
        raise ValueError(
            f"{name}: user {users[equal[0]]} has several interactions at {column}={times[equal[0]]}, and so have "
            f'{equal.size - 1} more. Pass ties="keep" to leave them in file order.'
        )
