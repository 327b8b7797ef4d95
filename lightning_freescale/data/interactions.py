"""Group interactions into histories, and create leave-one-out samples and jagged batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_freescale._torchrec import require_torchrec
from lightning_freescale.data.sources import as_int64, as_times, read_columns

Split = Literal["train", "validate", "test", "predict"]
_HELD_OUT: dict[Split, int] = {"train": 2, "validate": 1, "test": 0, "predict": 0}
_BLOCK = 1 << 20  # rows


@dataclass(frozen=True)
class Histories:
    """The interactions of all users in time order, concatenated.

    Attributes:
        items: dense item ids ``0 .. num_items - 1``, shape ``[interactions]``.
        times: times, shape ``[interactions]``, int64 or float64.

            - Numbers are as in the source.
            - Dates are seconds since 1970 in UTC.
            - Timestamps have the unit of their column. In a text file, this is seconds, or nanoseconds if any has a fraction.
            - Without a column of times, they are the positions in the histories, counted from 0.
        offsets: bounds of the histories, shape ``[users + 1]``. User ``u`` owns ``items[offsets[u]:offsets[u + 1]]``.
        user_ids: the source's id of each user, sorted, shape ``[users]``; int64 or objects of type str.
        item_ids: the source's id of each item, sorted, shape ``[num_items]``; int64 or objects of type str. Needed for serving.
    """

    items: NDArray[np.int64]
    times: NDArray[Any]
    offsets: NDArray[np.int64]
    user_ids: NDArray[Any]
    item_ids: NDArray[Any]

    @property
    def num_items(self) -> int:
        """The number of distinct items, which is the number of rows of their table."""
        return len(self.item_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of interactions of each user, shape ``[users]``."""
        return np.diff(self.offsets)


def read_interactions(
    source: str | Path | Any,
    *,
    user: int | str = "user",
    item: int | str = "item",
    time: int | str | None = "time",
    delimiter: str | None = None,
    header: bool | None = None,
    line: Literal["interaction", "user"] | None = None,
    order: Literal["given", "sort"] = "given",
    ties: Literal["error", "keep"] = "error",
) -> Histories:
    r"""Read interactions and group them by user.

    Rows and columns are counted from 0 without the header, also in errors.

    Args:
        source: interactions, one per row: a text file (also ``.gz``), a Parquet file or a folder of Parquet files, a pandas or
            polars DataFrame, a pyarrow table, or any object with ``__arrow_c_stream__``.
        user: column of user ids, by name or number. Ids are integers or strings. Ids in a text file are integers only if the
            text of each id in the column is that of an integer; ``007`` is a string.
        item: column of item ids, like ``user``.
        time: column of times, by name or number: numbers, dates or ISO 8601. Pass None if the rows of each user are in order.
        delimiter: text between two values in a text file, such as ``"\t"`` or ``"::"``. By default, the function chooses tab,
            comma, space or ``"::"`` so that each of the first lines has the same number of values.
        header: whether the first line of a text file contains names. By default, it does if it contains the given names, or
            words above columns of numbers or dates.
        line: content of a line of a text file: ``"interaction"``, or ``"user"`` for a user followed by all items of that user
            in order. The default is ``"user"`` if ``time=None`` and the first lines have different numbers of values and
            different first values, and ``"interaction"`` otherwise.
        order: ``"given"`` requires that the rows of each user are in time order; ``"sort"`` sorts them.
        ties: ``"error"`` refuses two interactions of a user at the same time; ``"keep"`` keeps them in the order of rows.

    Raises:
        FileNotFoundError: the file does not exist.
        TypeError: the source has no supported type.
        ValueError: an argument, a column or a row is invalid.

    Examples:
        >>> import pyarrow as pa
        >>> visits = pa.table({"user": ["ann", "ann", "bob", "ann"], "item": [7, 5, 7, 9], "time": [1, 2, 1, 3]})
        >>> histories = read_interactions(visits)
        >>> histories.num_items, histories.user_ids.tolist(), histories.item_ids.tolist()
        (3, ['ann', 'bob'], [5, 7, 9])
    """
    if order not in ("given", "sort") or ties not in ("error", "keep"):
        raise ValueError(
            f'read_interactions(order={order!r}, ties={ties!r}): pass order="given" or "sort", and ties="error" or "keep"'
        )
    if time is None and (order, ties) != ("given", "error"):
        raise ValueError(
            f"read_interactions(time=None, order={order!r}, ties={ties!r}): order= and ties= need times. Remove them"
        )
    name = str(source) if isinstance(source, (str, Path)) else "table"
    wanted: list[int | str] = [user, item] if time is None else [user, item, time]
    columns = read_columns(source, wanted, delimiter, header, line).columns
    if not len(columns[0]):
        raise ValueError(f"{name} has no interactions. Pass a source with at least one row")
    _refuse_missing(columns, wanted, name)
    times = None if time is None else as_times(columns.pop(), time, name)
    rows, counts, user_ids = _by_user(columns.pop(0), user, name, times if order == "sort" else None)
    offsets = np.append(0, np.cumsum(counts))
    item_of_row, item_ids = _dense(columns.pop(), item, name)
    items = (item_of_row if rows is None else item_of_row[rows]).astype(np.int64)
    del item_of_row
    pa.default_memory_pool().release_unused()  # frees the columns, unless other code uses them
    if times is None:
        times = np.arange(len(items))
        times -= np.repeat(offsets[:-1], counts)
    elif rows is not None:
        times = times[rows]
    histories = Histories(items, times, offsets, user_ids, item_ids)
    if time is not None:
        _check_times(histories, rows, order, ties, name, time)
    return histories


class HistoryDataset(Dataset[dict[str, Any]]):
    """A data set with one sample per user: the history before a held-out item.

    ``"test"`` holds out the last item of each user, and ``"validate"`` the one before. ``"train"`` predicts each next item of
    the rest. ``"predict"`` has the whole history and no target. ``users`` must have at least ``min_interactions`` interactions,
    because others have no training target. ``max_length`` limits samples to the last items of a history.
    """

    min_interactions = 4

    def __init__(self, histories: Histories, users: NDArray[np.int64], split: Split, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length!r}: pass a number of items of at least 1, or None for whole histories")
        self.histories, self.users, self.split, self.max_length = histories, users, split, max_length

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The history length of every sample, shape ``[samples]``."""
        whole = self.histories.lengths[self.users] - _HELD_OUT[self.split] - (self.split != "predict")
        return whole if self.max_length is None else np.minimum(whole, self.max_length)

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample of a user.

        ``item`` and ``time`` have shape ``[length]``. ``target`` has shape ``[length]`` (train), ``[1]``, or ``[0]`` (predict).
        ``user`` is the source's id if it is an integer, and otherwise its index in ``histories.user_ids``.
        """
        user = self.users[index]
        start, end = self.histories.offsets[user], self.histories.offsets[user + 1] - _HELD_OUT[self.split]
        if self.max_length is not None:
            start = max(start, end - self.max_length - (self.split != "predict"))
        items, times = self.histories.items[start:end], self.histories.times[start:end]
        last = len(items) - (self.split != "predict")
        target = items[1:] if self.split == "train" else items[last:]
        ids = self.histories.user_ids
        name = ids[user] if ids.dtype.kind == "i" else user
        return {"item": items[:last], "time": times[:last], "target": target, "user": name}


def leave_one_out(
    dataset_type: type[HistoryDataset], histories: Any, source: Any, max_length: int | None
) -> dict[Split, HistoryDataset]:
    """Return the data set of each split. Raise a ValueError if no user has enough interactions."""
    users = np.flatnonzero(histories.lengths >= dataset_type.min_interactions)
    if not len(users):
        name = "the table" if hasattr(source, "__arrow_c_stream__") else source
        raise ValueError(f"no user of {name} has at least {dataset_type.min_interactions} interactions. Pass longer histories")
    return {split: dataset_type(histories, users, split, max_length) for split in get_args(Split)}


def collate_histories(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a jagged batch of samples of :class:`HistoryDataset`.

    Returns:
        A dictionary with

        - ``features``: KeyedJaggedTensor of feature ``"item"``.
        - ``time``: int64 or float64, shape ``[total length]``, as in ``Histories.times``.
        - ``target``: int64, shape ``[total length]`` in training, ``[samples]`` in evaluation, ``[0]`` in prediction.
        - ``user``: int64, shape ``[samples]``: the source's integer ids, or indices of string ids in ``Histories.user_ids``.
    """
    require_torchrec()
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([len(sample["item"]) for sample in samples], dtype=torch.int32)
    joined = {key: torch.from_numpy(np.concatenate([s[key] for s in samples])) for key in ("item", "time", "target")}
    return {
        # the first entry, because Lightning uses the size of the first tensor as the number of samples
        "user": torch.tensor([int(sample["user"]) for sample in samples]),
        "features": KeyedJaggedTensor(keys=["item"], values=joined["item"], lengths=lengths),
        "time": joined["time"],
        "target": joined["target"],
    }


def _refuse_missing(columns: list[pa.ChunkedArray], wanted: list[int | str], name: str) -> None:
    for column, values in zip(wanted, columns):
        if values.null_count:
            row = pc.index(pc.is_null(values), True).as_py()
            raise ValueError(
                f"column {column!r} of {name} has {values.null_count} missing values, the first in row {row}. Drop or fill "
                "these rows"
            )


def _dense(values: pa.ChunkedArray, column: int | str, name: str) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Return each row's index into the sorted unique ids, and these ids."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (pa.types.is_integer(kind) or str(kind) in ("string", "large_string", "string_view")):
        raise ValueError(
            f"column {column!r} of {name} has type {kind}, such as {values[0]} in row 0. Ids must be integers or strings. Pass "
            "the column of ids, or convert it"
        )
    if str(values.type) == "string_view":  # the type of polars, which Arrow's kernels do not support
        values = values.cast(pa.large_string())
    values = values.unify_dictionaries() if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    ids = values.chunk(0).dictionary
    ids = as_int64(ids, column, name) if pa.types.is_integer(kind) else ids.cast(pa.large_string())
    codes = [chunk.indices.to_numpy() for chunk in values.chunks]
    is_used = np.zeros(len(ids), dtype=bool)  # categories may have no row
    for of_chunk in codes:
        is_used[of_chunk] = True
    used = np.flatnonzero(is_used)
    by_id = used[pc.array_sort_indices(ids.take(pa.array(used))).to_numpy()]
    places = np.empty(len(ids), dtype=np.int32)
    places[by_id] = np.arange(len(by_id), dtype=np.int32)
    return np.concatenate([places[of_chunk] for of_chunk in codes]), ids.take(pa.array(by_id)).to_numpy(zero_copy_only=False)


def _by_user(
    values: pa.ChunkedArray, column: int | str, name: str, times: NDArray[Any] | None
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64], NDArray[Any]]:
    """Return the row order by user and time, None if it is ascending; the number of rows of each user; and the users' ids."""
    users, user_ids = _dense(values, column, name)
    counts = np.bincount(users, minlength=len(user_ids))
    by_time = None if times is None or _ascending(times) else _stable_order(times)
    if by_time is not None:
        users = users[by_time]
    if _ascending(users):
        return by_time, counts, user_ids
    by_user = _stable_order(users)
    del users  # limits the peak memory
    return by_user if by_time is None else by_time[by_user], counts, user_ids


def _ascending(values: NDArray[Any]) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _stable_order(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return indices that sort ``keys`` stably.

    Integer keys are packed with their row numbers. Sorting these takes a third of the time of a stable sort, and less memory.
    """
    low, bits = keys.min(), len(keys).bit_length()
    if keys.dtype.kind == "f" or (int(keys.max()) - int(low)).bit_length() + bits > 63:
        return np.argsort(keys, kind="stable")
    packed = np.subtract(keys, low, dtype=np.int64)
    packed <<= bits
    for start in range(0, len(keys), _BLOCK):
        part = packed[start : start + _BLOCK]
        part |= np.arange(start, start + len(part))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def _check_times(
    histories: Histories, rows: NDArray[np.int64] | None, order: str, ties: str, name: str, column: int | str
) -> None:
    def where(place: np.intp) -> tuple[Any, list[int]]:
        user = histories.user_ids[np.searchsorted(histories.offsets, place, side="right") - 1]
        return user, [int(place) - 1, int(place)] if rows is None else rows[place - 1 : place + 1].tolist()

    times = histories.times
    same_user = np.ones(len(times) - 1, dtype=bool)
    same_user[histories.offsets[1:-1] - 1] = False
    backwards = 1 + np.flatnonzero((times[1:] < times[:-1]) & same_user)
    if order == "given" and backwards.size:
        user, between = where(backwards[0])
        raise ValueError(
            f"{name}: {column!r} goes back in time for user {user} between rows {between} and {backwards.size - 1} more "
            'places. Pass order="sort" to sort every history by time'
        )
    equal = 1 + np.flatnonzero((times[1:] == times[:-1]) & same_user)
    if ties == "error" and equal.size:
        user, both = where(equal[0])
        raise ValueError(
            f"{name}: user {user} has several interactions at {column}={times[equal[0]]} in rows {both}, and there are "
            f'{equal.size - 1} more such pairs. Pass ties="keep" to keep them in the order of rows'
        )
