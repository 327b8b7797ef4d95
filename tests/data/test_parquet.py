"""Histories in Parquet files: the batches equal those of from_interactions, and the number of row groups read is bounded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import ParquetHistories

USERS, FILES, ROWS = 960, 4, 20
ROW_GROUPS, WINDOW = USERS // ROWS, 4
DRAW = np.random.RandomState(0)
LENGTHS = DRAW.randint(0, 25, USERS)
LENGTHS[:3] = 0
OFFSETS = np.append(0, np.cumsum(LENGTHS))
ITEMS = DRAW.randint(0, 7, OFFSETS[-1])
TIMES = np.concatenate([np.sort(DRAW.randint(0, 10**6, length)) for length in LENGTHS])
IDS = 10_000 + np.arange(USERS)


def _lists(values: np.ndarray, first: int = 0, end: int = USERS, kind: Any = pa.ListArray) -> Any:
    offsets = OFFSETS[first : end + 1] - OFFSETS[first]
    return kind.from_arrays(
        offsets.astype(np.int32 if kind is pa.ListArray else np.int64), values[OFFSETS[first] : OFFSETS[end]]
    )


def _table(first: int = 0, end: int = USERS, **columns: Any) -> pa.Table:
    whole = {"user": IDS[first:end], "item": _lists(ITEMS, first, end), "time": _lists(TIMES, first, end, pa.LargeListArray)}
    return pa.table({"label": np.zeros(end - first), **whole, **columns})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("histories")
    for part, first in enumerate(range(0, USERS, USERS // FILES)):
        pq.write_table(_table(first, first + USERS // FILES), path / f"{part}.parquet", row_group_size=ROWS)
    return path


def _data(folder: Path, **options: Any) -> FreeScaleDataModule:
    return FreeScaleDataModule.from_parquet(folder / "*.parquet", **{"batch_size": 8, "row_group_window": WINDOW, **options})


def _same(one: Any, other: Any) -> None:
    for name in ("time", "target", "user"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    torch.testing.assert_close(one["features"].lengths(), other["features"].lengths(), rtol=0, atol=0)
    torch.testing.assert_close(one["features"].values(), other["features"].values(), rtol=0, atol=0)


@pytest.mark.parametrize("max_length", [None, 5])
def test_batches_are_those_of_interactions(folder: Path, max_length: int | None) -> None:
    flat = pa.table({"user": np.repeat(IDS, LENGTHS), "item": ITEMS, "time": TIMES})
    options: dict[str, Any] = {"shuffle": False, "max_length": max_length}
    expected = FreeScaleDataModule.from_interactions(flat, ties="keep", batch_size=8, **options)
    data = _data(folder, **options)
    np.testing.assert_array_equal(data.train.lengths, expected.train.lengths)
    for name in ("train", "val", "test", "predict"):
        mine, theirs = (list(getattr(module, f"{name}_dataloader")()) for module in (data, expected))
        assert len(mine) == len(theirs) > 50
        for one, other in zip(mine, theirs):
            _same(one, other)


def _epochs(data: FreeScaleDataModule, rank: int, ranks: int) -> list[list[list[int]]]:
    sampler = data.sampler(rank, ranks)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_reads_every_row_group_once_and_holds_a_window(folder: Path, ranks: int) -> None:
    seen: list[list[int]] = [[], []]
    for rank in range(ranks):
        data = _data(folder)
        dataset: Any = data.train.dataset
        for epoch, batches in enumerate(_epochs(data, rank, ranks), 1):
            for indices in batches:
                seen[epoch - 1] += indices
                samples = dataset.__getitems__(indices)
                assert [sample["user"] for sample in samples] == IDS[dataset.users[indices]].tolist()
                assert sum(map(dataset.histories.holds, range(ROW_GROUPS))) <= WINDOW
            # those of the window that the epoch before has ended with may still be there
            assert (ROW_GROUPS - WINDOW) * epoch < dataset.histories.reads <= ROW_GROUPS * epoch
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(int((LENGTHS >= 4).sum()))) and seen[0] != seen[1]


def test_workers_load_the_same(folder: Path) -> None:
    alone, workers = (_data(folder, num_workers=number).train_dataloader() for number in (0, 2))
    for one, other in zip(alone, workers, strict=True):
        _same(one, other)


def test_goes_on_inside_an_epoch_on_other_ranks(folder: Path) -> None:
    seen = [index for rank in range(2) for step in _epochs(_data(folder), rank, 2)[1][:5] for index in step]
    first, rest = _data(folder), _data(folder)
    first.train.resumed_sampler(0, 2, 1)
    state = first.train.state_dict(1, 5, 2)
    left = []
    for rank in range(3):
        rest.train.load_state_dict(state, rank, 3)
        left += [index for step in rest.train.resumed_sampler(rank, 3, 1) for index in step]
    assert sorted(seen + left) == list(range(len(rest.train.dataset)))
    for other in (_data(folder, row_group_window=5), _data(folder, shuffle=False)):
        with pytest.raises(ValueError, match=r"shuffle=BlockShuffle\(window=4\).* shuffle="):
            other.train.load_state_dict(state, 0, 2)


def test_lengths_come_from_the_items_alone(tmp_path: Path) -> None:
    path = tmp_path / "histories.parquet"
    pq.write_table(_table(item=pa.array([[1]] * USERS)), path, row_group_size=ROWS, compression="none")
    histories = ParquetHistories(str(path))
    assert histories.lengths.tolist() == [1] * USERS and histories.reads == 0


def test_a_copy_for_another_process_holds_nothing(folder: Path) -> None:
    histories = ParquetHistories([folder / "1.parquet", folder / "0.parquet"])
    assert histories.user_ids[3] == IDS[3] and histories.holds(0)
    other = pickle.loads(pickle.dumps(histories))
    assert not other.holds(0) and other.user_ids[300] == IDS[300]


def _swapped() -> np.ndarray:
    times, where = TIMES.copy(), OFFSETS[25]
    times[where : where + 2] = [7, 6]
    return times


def _read_two_row_groups(path: Path) -> None:
    histories = ParquetHistories(path)
    histories.row_group(0)
    histories.row_group(1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (lambda: {"item": pa.array([[1]] * USERS)}, "'time' of row group 0 .* row 0"),
        (lambda: {"time": _lists(_swapped())}, "'time' of row group 1 .* row 5"),
        (lambda: {"item": _lists(ITEMS.astype(float))}, "'item' of row group 0 .* double"),
        (lambda: {"item": IDS}, "'item' .* int64"),
        (lambda: {"user": pa.array([None, *IDS[1:]])}, "'user' of row group 0 .* 1 missing values"),
        (lambda: {"item": pa.array([None] * USERS, pa.list_(pa.int64()))}, "'item' of .* 20 missing values"),
    ],
)
def test_what_does_not_fit_is_named(columns: Callable[[], dict[str, Any]], message: str, tmp_path: Path) -> None:
    path = tmp_path / "histories.parquet"
    pq.write_table(_table(**columns()), path, row_group_size=ROWS)
    with pytest.raises(ValueError, match=message):
        _read_two_row_groups(path)


def test_missing_files_and_columns(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        ParquetHistories(tmp_path / "absent*.parquet")
    with pytest.raises(ValueError, match=r"0\.parquet.*'when'"):
        ParquetHistories(folder / "0.parquet", time="when")
    (tmp_path / "cut.parquet").write_bytes((folder / "0.parquet").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cut\.parquet"):
        ParquetHistories(tmp_path / "cut.parquet")
    pq.write_table(_table(0, 0), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none\.parquet"):
        ParquetHistories(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="held_row_groups=0"):
        ParquetHistories(folder / "0.parquet", held_row_groups=0)
    pq.write_table(_table(0, 3), tmp_path / "short.parquet")
    with pytest.raises(ValueError, match=r"short\.parquet.* 4 interactions"):
        FreeScaleDataModule.from_parquet(tmp_path / "short.parquet")
