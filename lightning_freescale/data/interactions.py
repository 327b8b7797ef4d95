"""Group interactions into one history per user, in time order, and make leave-one-out samples and jagged batches of them."""

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
from lightning_freescale.data.sources import as_times, read_columns

Split = Literal["train", "validate", "test", "predict"]
_HELD_OUT: dict[Split, int] = {"train": 2, "validate": 1, "test": 0, "predict": 0}
_BLOCK = 1 << 20  # rows


@dataclass(frozen=True)
class Histories:
    """Every user's interactions in time order, back to back.

    Attributes:
        items: dense item ids ``0 .. num_items - 1``, shape ``[interactions]``.
        times: shape ``[interactions]``. Numbers as in the source, float64 if they are floats; dates in seconds since 1970, in
            UTC, and times in the unit of their column: of a text file seconds, or nanoseconds if any has a fraction. Without
            times, the place of each interaction in its history, from 0.
        offsets: user ``u`` owns ``items[offsets[u]:offsets[u + 1]]``, shape ``[users + 1]``.
        user_ids: the source's id of user ``u``, int64 or str (as objects), sorted, shape ``[users]``.
        item_ids: the source's id of item ``i``, likewise, shape ``[num_items]``; keep it for serving.
    """

    items: NDArray[np.int64]
    times: NDArray[Any]
    offsets: NDArray[np.int64]
    user_ids: NDArray[Any]
    item_ids: NDArray[Any]

    @property
    def num_items(self) -> int:
        """The number of different items, which is the number of rows that their table needs."""
        return len(self.item_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Interactions of every user, shape ``[users]``."""
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

    Rows and columns are counted from 0, the header aside, also in errors.

    Args:
        source: a text file (also ``.gz``), a Parquet file or a folder of such, a pandas or polars DataFrame, a pyarrow table
            or anything else with an Arrow C stream (``__arrow_c_stream__``), one row an interaction.
        user: column of user ids, by name or number; integers or strings. Ids of a text file are integers where each of the
            column is written as one, and else strings, so that ``007`` is not ``7``.
        item: column of item ids, likewise.
        time: column of times, by name or number: numbers, dates or ISO 8601. None if the rows of each user are in order.
        delimiter: between the values of a line of a text file, such as ``"\t"`` or ``"::"``. By default tab, comma, space or
            ``"::"``, whichever gives each of the first lines as many values.
        header: whether the first line of a text file holds names. By default it does if the names asked for stand there, or
            words where all lines below have numbers or dates.
        line: what a line of a text file holds: ``"interaction"``, or ``"user"``: a user and then all items of that user in
            order. By default the latter if ``time=None``, the first lines hold different numbers of values, and each begins
            with another one.
        order: ``"given"`` demands that each user's rows come in time order; ``"sort"`` sorts them.
        ties: ``"error"`` refuses two interactions of a user at the same time; ``"keep"`` leaves them in the order of rows.

    Raises:
        FileNotFoundError, TypeError, ValueError: what is wrong, in which column or row, and what to pass instead.

    Examples:
        >>> import pyarrow as pa
        >>> visits = pa.table({"user": ["ann", "ann", "bob", "ann"], "item": [7, 5, 7, 9], "time": [1, 2, 1, 3]})
        >>> histories = read_interactions(visits)
        >>> histories.num_items, histories.user_ids.tolist(), histories.item_ids.tolist()
        (3, ['ann', 'bob'], [5, 7, 9])
    """
    if order not in ("given", "sort") or ties not in ("error", "keep"):
        raise ValueError(f'read_interactions(order={order!r}, ties={ties!r}): pass "given" or "sort", and "error" or "keep"')
    if time is None and (order, ties) != ("given", "error"):
        raise ValueError(f"read_interactions(time=None, order={order!r}, ties={ties!r}): there are no times, leave both out")
    name = str(source) if isinstance(source, (str, Path)) else "table"
    wanted: list[int | str] = [user, item] if time is None else [user, item, time]
    columns = read_columns(source, wanted, delimiter, header, line).columns
    if not len(columns[0]):
        raise ValueError(f"{name} holds no interaction: pass a source with at least one row")
    _refuse_missing(columns, wanted, name)
    times = None if time is None else as_times(columns.pop(), time, name)
    rows, counts, user_ids = _by_user(columns.pop(0), user, name, times if order == "sort" else None)
    offsets = np.append(0, np.cumsum(counts))
    item_of_row, item_ids = _dense(columns.pop(), item, name)
    items = (item_of_row if rows is None else item_of_row[rows]).astype(np.int64)
    del item_of_row
    pa.default_memory_pool().release_unused()  # memory of the columns, unless other code holds them
    if times is None:
        times = np.arange(len(items))
        times -= np.repeat(offsets[:-1], counts)
    else:
        times = times if rows is None else times[rows]
        _check_times(times, offsets, rows, user_ids, order, ties, name, wanted[2])
    return Histories(items, times, offsets, user_ids, item_ids)


class HistoryDataset(Dataset[dict[str, Any]]):
    """One sample per user: the history up to a held-out item.

    The last item of a user is for ``"test"``, the one before for ``"validate"``; ``"train"`` predicts every next item of
    the rest; ``"predict"`` has the whole history and no target. Users with fewer than ``min_interactions`` have no
    training target and must have been left out. With ``max_length`` only the last so many items of a history go in.
    """

    min_interactions = 4

    def __init__(self, histories: Histories, users: NDArray[np.int64], split: Split, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length!r}: pass a number of items, at least 1, or None for whole histories")
        self.histories, self.users, self.split, self.max_length = histories, users, split, max_length

    @property
    def lengths(self) -> NDArray[np.int64]:
        """History length of every sample, what its compute time depends on; shape ``[samples]``."""
        whole = self.histories.lengths[self.users] - _HELD_OUT[self.split] - (self.split != "predict")
        return whole if self.max_length is None else np.minimum(whole, self.max_length)

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``item`` and ``time`` of shape ``[length]``; ``target`` of shape ``[length]`` (train), ``[0]`` or ``[1]``.

        ``user`` is the source's id if that is an integer; of string ids their place in ``histories.user_ids``.
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
    """Return the data set of each split, with the users that have enough interactions.

    Raises:
        ValueError: no user has.
    """
    users = np.flatnonzero(histories.lengths >= dataset_type.min_interactions)
    if not len(users):
        name = "the table" if hasattr(source, "__arrow_c_stream__") else source
        raise ValueError(f"no user of {name} has {dataset_type.min_interactions} interactions or more")
    return {split: dataset_type(histories, users, split, max_length) for split in get_args(Split)}


def collate_histories(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A jagged batch.

    Returns:
        ``features``, a KeyedJaggedTensor of feature ``"item"``; ``time``, int64 or float64 ``[total length]``, as
        ``Histories.times``; ``target``, int64, ``[total length]`` in training, ``[samples]`` in evaluation, empty in
        prediction; ``user``, int64 ``[samples]``, the source's ids, or of string ids their places in ``Histories.user_ids``.
    """
    require_torchrec()
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([len(sample["item"]) for sample in samples], dtype=torch.int32)
    joined = {key: torch.from_numpy(np.concatenate([s[key] for s in samples])) for key in ("item", "time", "target")}
    return {
        # first: Lightning takes the size of the first tensor for the number of samples
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
                f"column {column!r} of {name} has {values.null_count} missing values, the first in row {row}: drop or fill "
                "those rows"
            )


def _dense(values: pa.ChunkedArray, column: int | str, name: str) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Return each row's index into the sorted unique ids, and these ids."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (pa.types.is_integer(kind) or str(kind) in ("string", "large_string", "string_view")):
        raise ValueError(
            f"column {column!r} of {name} holds {kind}, not integers or strings, such as {values[0]} in row 0: pass the "
            "column of ids, or convert it"
        )
    if str(values.type) == "string_view":  # as polars has them; Arrow's kernels want offsets
        values = values.cast(pa.large_string())
    values = values.unify_dictionaries() if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    ids = values.chunk(0).dictionary
    ids = _as_int64(ids, column, name) if pa.types.is_integer(kind) else ids.cast(pa.large_string())
    codes = [chunk.indices.to_numpy() for chunk in values.chunks]
    is_used = np.zeros(len(ids), dtype=bool)  # a category may be there without a row
    for of_chunk in codes:
        is_used[of_chunk] = True
    used = np.flatnonzero(is_used)
    by_id = used[pc.array_sort_indices(ids.take(pa.array(used))).to_numpy()]
    places = np.empty(len(ids), dtype=np.int32)
    places[by_id] = np.arange(len(by_id), dtype=np.int32)
    return np.concatenate([places[of_chunk] for of_chunk in codes]), ids.take(pa.array(by_id)).to_numpy(zero_copy_only=False)


def _as_int64(ids: pa.Array, column: int | str, name: str) -> pa.Array:
    try:
        return ids.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {column!r} of {name} holds values beyond 64-bit integers ({error}): map them first"
        ) from error


def _by_user(
    values: pa.ChunkedArray, column: int | str, name: str, times: NDArray[Any] | None
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64], NDArray[Any]]:
    """Return the rows ordered by user and time, None if they are in order; the rows of each user; and the users' ids.

    Without times, the rows of a user keep their order.
    """
    users, user_ids = _dense(values, column, name)
    counts = np.bincount(users, minlength=len(user_ids))
    by_time = None if times is None or _ascending(times) else _stable_order(times)
    if by_time is not None:
        users = users[by_time]
    if _ascending(users):
        return by_time, counts, user_ids
    by_user = _stable_order(users)
    del users  # the most that is held at a time are the next three
    return by_user if by_time is None else by_time[by_user], counts, user_ids


def _ascending(values: NDArray[Any]) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _stable_order(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return indices that sort ``keys`` stably.

    Row numbers are packed below the keys for one sort of integers. It takes a third of the time of a stable sort, in less
    memory.
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
    times: NDArray[Any],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64] | None,
    user_ids: NDArray[Any],
    order: str,
    ties: str,
    name: str,
    column: int | str,
) -> None:
    def where(place: np.intp) -> tuple[Any, list[int]]:
        """Return the user, and the rows of a place and the one before."""
        user = user_ids[np.searchsorted(offsets, place, side="right") - 1]
        return user, [int(place) - 1, int(place)] if rows is None else rows[place - 1 : place + 1].tolist()

    same_user = np.ones(len(times) - 1, dtype=bool)
    same_user[offsets[1:-1] - 1] = False
    backwards = 1 + np.flatnonzero((times[1:] < times[:-1]) & same_user)
    if order == "given" and backwards.size:
        user, between = where(backwards[0])
        raise ValueError(
            f"{name}: {column!r} goes back in time for user {user} between rows {between} and {backwards.size - 1} more "
            'places. Pass order="sort" to sort every history by time.'
        )
    equal = 1 + np.flatnonzero((times[1:] == times[:-1]) & same_user)
    if ties == "error" and equal.size:
        user, both = where(equal[0])
        raise ValueError(
            f"{name}: user {user} has several interactions at {column}={times[equal[0]]}, in rows {both}, and so have "
            f'{equal.size - 1} more. Pass ties="keep" to leave them in the order of rows.'
        )
