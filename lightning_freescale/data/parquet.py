"""Histories in Parquet files larger than memory: lengths are read first, values by row group when they are needed."""

from __future__ import annotations

import glob
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
    """One row a user with the history in list columns; :class:`~lightning_freescale.data.Histories` whose values stay on disk.

    ``items[start:end]``, ``times[start:end]`` and ``user_ids[user]`` read the row group that holds them; a slice lies in one
    history. The row groups used last are held. Making one reads one column of lists, the smaller of the two, row group by row
    group: Parquet has no shorter way to their lengths.

    Args:
        source: a Parquet file, a pattern such as ``"histories/*.parquet"``, or several of these. Users are numbered as the rows
            are, in the order of the files' names.
        user: column of user ids, integers.
        item: column of lists of item ids, integers, taken as they are.
        time: column of lists of time stamps, integers, each list in order.
        held_row_groups: how many row groups a process holds in memory at most.

    Attributes:
        offsets: user ``u`` owns ``items[offsets[u]:offsets[u + 1]]``, shape ``[users + 1]``.
        first_users: the first user of every row group, and the number of users, shape ``[row groups + 1]``.
        held_row_groups: as it was given.
        reads: how many row groups this process has read for their values.

    Raises:
        FileNotFoundError, ValueError: what is wrong, in which file and column, and what to pass instead.
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
            raise ValueError(f"held_row_groups={held_row_groups!r}: pass a number of row groups, at least 1")
        self._names, self.held_row_groups = {"user": user, "item": item, "time": time}, held_row_groups
        self._files = {path: _metadata(path, self._names) for path in _paths(source)}
        self._row_groups = [(path, number) for path, file in self._files.items() for number in range(file.num_row_groups)]
        rows = [self._files[path].row_group(number).num_rows for path, number in self._row_groups]
        if not sum(rows):
            raise ValueError(f"{source} holds no history: pass files with at least one row")
        self.first_users = np.append(0, np.cumsum(rows))
        self.offsets = np.append(0, np.cumsum(np.concatenate(list(self._read_lengths()))))
        self.reads = 0
        self._held: OrderedDict[int, dict[str, Ints]] = OrderedDict()
        first_interactions = self.offsets[self.first_users]
        self.items, self.times = (_OnDisk(self, name, first_interactions) for name in ("item", "time"))
        self.user_ids = _OnDisk(self, "user", self.first_users)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict()}  # a process that is started reads its own

    @property
    def lengths(self) -> Ints:
        """Interactions of every user, shape ``[users]``."""
        return np.diff(self.offsets)

    def row_groups_of(self, users: Ints) -> Ints:
        """Return the number of the row group that holds each user, same shape."""
        return np.searchsorted(self.first_users, users, side="right") - 1

    def holds(self, row_group: int) -> bool:
        """Return whether a row group is in memory."""
        return row_group in self._held

    def row_group(self, number: int) -> dict[str, Ints]:
        """Return the columns ``"user"``, shape ``[rows]``, ``"item"`` and ``"time"``, shape ``[interactions]``, of a row group.

        Raises:
            ValueError: values are missing, no integers, or not as many in both lists; or a history goes back in time.
        """
        if number not in self._held:
            while len(self._held) >= self.held_row_groups:
                self._held.popitem(last=False)
            self._held[number] = self._read(number)
        self._held.move_to_end(number)
        return self._held[number]

    def _read_lengths(self) -> Iterator[Ints]:
        """Yield the lengths of each row group's lists, shape ``[rows]``."""
        sizes = dict.fromkeys(("item", "time"), 0)
        for file in self._files.values():
            for name in sizes:
                sizes[name] += _bytes_of(file, self._names[name])
        name = min(sizes, key=sizes.__getitem__)
        for number in range(len(self._row_groups)):
            yield _lengths(self._column(number, name), self._where(number, name))

    def _read(self, number: int) -> dict[str, Ints]:
        first, end = self.first_users[number], self.first_users[number + 1]
        expected = np.diff(self.offsets[first : end + 1])
        read = {"user": _integers(self._column(number, "user"), self._where(number, "user"))}
        for name in ("item", "time"):
            lists, where = self._column(number, name), self._where(number, name)
            unequal = np.flatnonzero(_lengths(lists, where) != expected)
            if unequal.size:
                item, time = self._names["item"], self._names["time"]
                raise ValueError(
                    f"{where}: row {unequal[0]} has another number of values in {item!r} than in {time!r}: each interaction "
                    "needs both"
                )
            read[name] = _integers(lists.flatten(), where)
        ends = np.cumsum(expected)
        backwards = np.flatnonzero(np.diff(read["time"]) < 0)
        backwards = backwards[~np.isin(backwards + 1, ends)]  # from one history to the next
        if backwards.size:
            row = np.searchsorted(ends, backwards[0], side="right")
            raise ValueError(f"{self._where(number, 'time')}: row {row} goes back in time: sort every history by time")
        self.reads += 1
        return read

    def _column(self, number: int, name: str) -> Any:
        path, inside = self._row_groups[number]
        with pyarrow.parquet.ParquetFile(path, metadata=self._files[path]) as file:
            return file.read_row_group(inside, columns=[self._names[name]], use_threads=False).column(0).combine_chunks()

    def _where(self, number: int, name: str) -> str:
        path, inside = self._row_groups[number]
        return f"column {self._names[name]!r} of row group {inside} of {path}"


@dataclass(frozen=True)
class _OnDisk:
    """A column of all files, by place: of users one after the other, or of interactions in slices of one history."""

    histories: ParquetHistories
    name: str
    starts: Ints  # of the row groups

    @property
    def dtype(self) -> np.dtype[np.int64]:
        """Of the values."""
        return np.dtype(np.int64)

    def __getitem__(self, place: Any) -> Any:
        begin = place.start if isinstance(place, slice) else place
        number = int(np.searchsorted(self.starts, begin, side="right")) - 1
        values, start = self.histories.row_group(number)[self.name], self.starts[number]
        return values[place.start - start : place.stop - start] if isinstance(place, slice) else values[place - start]


class ParquetHistoryDataset(HistoryDataset):
    """Samples of :class:`ParquetHistories`; those of one batch are read row group by row group."""

    histories: Any

    @property
    def samples_in_memory(self) -> int:
        """How many samples that follow each other lie in row groups that are held at once, on average."""
        return len(self.users) * (self.histories.held_row_groups - 1) // (len(self.histories.first_users) - 1)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples of these numbers, in their order."""
        row_groups = self.histories.row_groups_of(self.users[indices]).tolist()
        # those in memory first: reading another may push them out
        order = sorted(range(len(indices)), key=lambda place: (not self.histories.holds(row_groups[place]), row_groups[place]))
        samples = {place: self[indices[place]] for place in order}
        return [samples[place] for place in range(len(indices))]


def _paths(source: str | Path | Sequence[str | Path]) -> list[str]:
    paths = []
    for each in [source] if isinstance(source, (str, Path)) else source:
        found = glob.glob(str(each), recursive=True)
        if not found:
            raise FileNotFoundError(f"no Parquet file is at {each}: pass a path, or a pattern such as 'histories/*.parquet'")
        paths += found
    return sorted(set(paths))


def _metadata(path: str, names: dict[str, str]) -> Any:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"Parquet file {path} cannot be read ({error}): is it truncated, or no Parquet?") from error
    for name, column in names.items():
        if column not in schema.names:
            raise ValueError(f"{path} has no column {column!r}, only {schema.names}: name yours with user=, item=, time=")
        kind = schema.field(column).type
        if name != "user" and not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise ValueError(
                f"column {column!r} of {path} holds {kind}, not lists: from_parquet takes one row a user; for one row an "
                "interaction there is from_interactions"
            )
    return metadata


def _bytes_of(file: Any, column: str) -> int:
    chunks = [file.row_group(number).column(leaf) for number in range(file.num_row_groups) for leaf in range(file.num_columns)]
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)


def _lengths(lists: Any, where: str) -> Ints:
    if lists.null_count:
        raise ValueError(f"{where} has {lists.null_count} missing values: drop or fill those rows")
    return np.asarray(pc.list_value_length(lists).to_numpy(zero_copy_only=False), dtype=np.int64)


def _integers(values: Any, where: str) -> Ints:
    if values.null_count:
        raise ValueError(f"{where} has {values.null_count} missing values: drop or fill those rows")
    if pa.types.is_timestamp(values.type):
        values = pc.cast(values, pa.int64())
    if not pa.types.is_integer(values.type):
        raise ValueError(f"{where} holds {values.type}, not integers: map its values to integers first")
    return np.asarray(pc.cast(values, pa.int64()).to_numpy(zero_copy_only=False), dtype=np.int64)
