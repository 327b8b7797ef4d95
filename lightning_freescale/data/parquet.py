"""Histories in Parquet files larger than memory, which are read by row group when they are needed."""

from __future__ import annotations

import glob
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from lightning_freescale.data.interactions import HistoryDataset

Ints = NDArray[np.int64]


class ParquetHistories:
    """Histories in Parquet files with one row per user and lists of items and times.

    The interface is that of :class:`~lightning_freescale.data.Histories`, but values stay on disk. ``items[start:end]``,
    ``times[start:end]`` and ``user_ids[user]`` read the row group of a user; a slice must be within one history. The row groups
    used last stay in memory. The constructor reads the lists of items, because Parquet does not store the lengths of lists.

    Args:
        source: a Parquet file, a pattern such as ``"histories/*.parquet"``, or several of these. Users are numbered by row, in
            the order of the files' names.
        user: column of user ids, integers.
        item: column of lists of item ids, integers, which are used unchanged.
        time: column of lists of times, integers in ascending order.
        held_row_groups: largest number of row groups in the memory of a process.

    Attributes:
        offsets: bounds of the histories, shape ``[users + 1]``. User ``u`` owns ``items[offsets[u]:offsets[u + 1]]``.
        first_users: first user of every row group, followed by the number of users, shape ``[row groups + 1]``.
        held_row_groups: largest number of row groups in the memory of a process.
        reads: number of row groups whose values this process has read.

    Raises:
        FileNotFoundError: no file matches ``source``.
        ValueError: a file or column is invalid.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        user: str = "user",
        item: str = "item",
        time: str = "time",
        held_row_groups: int = 8,
    ) -> None:
        if held_row_groups < 1:
            raise ValueError(f"held_row_groups={held_row_groups!r}: pass a number of row groups of at least 1")
        self._names, self.held_row_groups = {"user": user, "item": item, "time": time}, held_row_groups
        self._files = {path: _metadata(path, self._names) for path in _paths(source)}
        self._row_groups = [(path, number) for path, file in self._files.items() for number in range(file.num_row_groups)]
        rows = [self._files[path].row_group(number).num_rows for path, number in self._row_groups]
        if not sum(rows):
            raise ValueError(f"{source} has no histories. Pass files with at least one row")
        self.first_users = np.append(0, np.cumsum(rows))
        lengths = [_lengths(*self._column(number, "item")) for number in range(len(rows))]
        self.offsets = np.append(0, np.cumsum(np.concatenate(lengths)))
        self.reads = 0
        self._held: OrderedDict[int, dict[str, Ints]] = OrderedDict()
        first_interactions = self.offsets[self.first_users]
        self.items, self.times = (_OnDisk(self, name, first_interactions) for name in ("item", "time"))
        self.user_ids = _OnDisk(self, "user", self.first_users)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict()}  # a new process reads its own row groups

    @property
    def lengths(self) -> Ints:
        """The number of interactions of each user, shape ``[users]``."""
        return np.diff(self.offsets)

    def row_groups_of(self, users: Ints) -> Ints:
        """Return the row group of each user, in the shape of ``users``."""
        return np.searchsorted(self.first_users, users, side="right") - 1

    def holds(self, row_group: int) -> bool:
        """Return whether a row group is in memory."""
        return row_group in self._held

    def row_group(self, number: int) -> dict[str, Ints]:
        """Return the columns ``"user"``, shape ``[rows]``, ``"item"`` and ``"time"``, shape ``[interactions]``, of a row group.

        Raises:
            ValueError: values are missing or no integers, the lists of a user differ in length, or times are not ascending.
        """
        if number not in self._held:
            while len(self._held) >= self.held_row_groups:
                self._held.popitem(last=False)
            self._held[number] = self._read(number)
        self._held.move_to_end(number)
        return self._held[number]

    def _read(self, number: int) -> dict[str, Ints]:
        first, end = self.first_users[number], self.first_users[number + 1]
        expected = np.diff(self.offsets[first : end + 1])
        read = {"user": _integers(*self._column(number, "user"))}
        for name in ("item", "time"):
            lists, where = self._column(number, name)
            unequal = np.flatnonzero(_lengths(lists, where) != expected)
            if unequal.size:
                item, time = self._names["item"], self._names["time"]
                raise ValueError(
                    f"{where}: row {unequal[0]} has different numbers of values in {item!r} and {time!r}. Each "
                    "interaction needs both"
                )
            read[name] = _integers(lists.flatten(), where)
        ends = np.cumsum(expected)
        backwards = np.flatnonzero(np.diff(read["time"]) < 0)
        backwards = backwards[~np.isin(backwards + 1, ends)]  # except from one history to the next
        if backwards.size:
            row = np.searchsorted(ends, backwards[0], side="right")
            raise ValueError(f"{where}: row {row} goes back in time. Sort every history by time")
        self.reads += 1
        return read

    def _column(self, number: int, name: str) -> tuple[Any, str]:
        """Return a column of a row group, and its name in errors."""
        (path, inside), column = self._row_groups[number], self._names[name]
        with pyarrow.parquet.ParquetFile(path, metadata=self._files[path]) as file:
            values = file.read_row_group(inside, columns=[column], use_threads=False).column(0).combine_chunks()
        return values, f"column {column!r} of row group {inside} of {path}"


@dataclass(frozen=True)
class _OnDisk:
    """A column of all files, indexed by a user or by a slice of interactions within one history."""

    histories: ParquetHistories
    name: str
    starts: Ints  # of the row groups
    dtype = np.dtype(np.int64)

    def __getitem__(self, place: Any) -> Any:
        begin = place.start if isinstance(place, slice) else place
        number = int(np.searchsorted(self.starts, begin, side="right")) - 1
        values, start = self.histories.row_group(number)[self.name], self.starts[number]
        return values[place.start - start : place.stop - start] if isinstance(place, slice) else values[place - start]


class ParquetHistoryDataset(HistoryDataset):
    """Samples of :class:`ParquetHistories`, which are read row group by row group for each batch."""

    histories: Any

    @property
    def samples_in_memory(self) -> int:
        """The average number of consecutive samples in row groups that are held in memory at the same time."""
        return len(self.users) * (self.histories.held_row_groups - 1) // (len(self.histories.first_users) - 1)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        row_groups = self.histories.row_groups_of(self.users[indices]).tolist()
        # those in memory first, because reading another row group may evict them
        order = sorted(range(len(indices)), key=lambda place: (not self.histories.holds(row_groups[place]), row_groups[place]))
        samples = {place: self[indices[place]] for place in order}
        return [samples[place] for place in range(len(indices))]


def _paths(source: str | Path | Sequence[str | Path]) -> list[str]:
    paths = []
    for each in [source] if isinstance(source, (str, Path)) else source:
        found = glob.glob(str(each), recursive=True)
        if not found:
            raise FileNotFoundError(
                f"there is no Parquet file at {each}. Pass a path, or a pattern such as 'histories/*.parquet'"
            )
        paths += found
    return sorted(set(paths))


def _metadata(path: str, names: dict[str, str]) -> Any:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"cannot read Parquet file {path} ({error}). It may be truncated, or no Parquet file") from error
    for name, column in names.items():
        if column not in schema.names:
            raise ValueError(f"{path} has no column {column!r}. Pass names among {schema.names} as user=, item= and time=")
        kind = schema.field(column).type
        if name != "user" and not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise ValueError(
                f"column {column!r} of {path} has type {kind}, but from_parquet needs lists, with one row per user. Use "
                "from_interactions for files with one row per interaction"
            )
    return metadata


def _lengths(lists: Any, where: str) -> Ints:
    return _integers(pc.list_value_length(lists), where)


def _integers(values: Any, where: str) -> Ints:
    if values.null_count:
        raise ValueError(f"{where} has {values.null_count} missing values. Drop or fill these rows")
    if pa.types.is_timestamp(values.type):
        values = pc.cast(values, pa.int64())
    if not pa.types.is_integer(values.type):
        raise ValueError(f"{where} has type {values.type}, but must have integers. Map its values to integers")
    return np.asarray(pc.cast(values, pa.int64()).to_numpy(zero_copy_only=False), dtype=np.int64)
