"""Reading interactions: sorted histories, dense ids, and a clear error for every bad file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import HistoryDataset, collate_histories, read_interactions

ROWS = "user,item,time\n7,100,1\n7,300,2\n3,300,5\n7,200,3\n3,100,6\n"


def _csv(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_text(text)
    return path


def test_histories_and_maps(tmp_path: Path) -> None:
    histories = read_interactions(_csv(tmp_path, ROWS))
    assert histories.user_ids.tolist() == [3, 7]
    assert histories.item_ids.tolist() == [100, 200, 300]
    assert histories.lengths.tolist() == [2, 3]
    assert histories.item_ids[histories.items].tolist() == [300, 100, 100, 300, 200]
    assert histories.times.tolist() == [5, 6, 1, 2, 3]


def test_other_formats_give_the_same(tmp_path: Path) -> None:
    expected = read_interactions(_csv(tmp_path, ROWS))
    table = pa.table({"user": [7, 7, 3, 7, 3], "item": [100, 300, 300, 200, 100], "time": [1, 2, 5, 3, 6]})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    with gzip.open(tmp_path / "rows.csv.gz", "wt") as file:
        file.write(ROWS)
    for source in (table, tmp_path / "rows.parquet", str(tmp_path / "rows.csv.gz")):
        np.testing.assert_array_equal(read_interactions(source).items, expected.items)


@pytest.mark.parametrize("order", ["given", "sort"])
@pytest.mark.parametrize("scale", [1, 10**13, 0.5], ids=["packed", "too large to pack", "floats"])
def test_any_order_of_rows(order: str, scale: float) -> None:
    """As a stable sort by user, and by time, groups them."""
    random = np.random.default_rng(0)
    users, items, times = random.integers(-50, 50, 3000), random.integers(0, 300, 3000), np.arange(3000) // 2 - 700
    if order == "sort":
        random.shuffle(times)
    expected = np.lexsort((times, users))
    table = pa.table({"user": users, "item": items, "time": times * scale})
    half = pa.concat_tables([table.slice(0, 1000), table.slice(1000)])  # in chunks
    for source in (table, half):
        histories = read_interactions(source, order=order, ties="keep")
        assert histories.user_ids.tolist() == np.unique(users).tolist()
        np.testing.assert_array_equal(histories.item_ids[histories.items], items[expected])
        np.testing.assert_array_equal(histories.times, (times * scale)[expected])
        np.testing.assert_array_equal(np.repeat(histories.user_ids, histories.lengths), users[expected])


def test_errors_name_rows(tmp_path: Path) -> None:
    rows = "user,item,time\n1,10,5\n2,10,9\n2,11,8\n1,12,5\n"
    with pytest.raises(ValueError, match=r"'time' goes back in time for user 2 between rows \[1, 2\] and 0 more"):
        read_interactions(_csv(tmp_path, rows))
    with pytest.raises(ValueError, match=r"user 1 has several interactions at time=5, in rows \[0, 3\], and so have 0"):
        read_interactions(_csv(tmp_path, rows), order="sort")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sorted"}, r"order='sorted', ties='error'\): pass"),
        ({"ties": "drop"}, r"order='given', ties='drop'\): pass"),
        ({"time": None, "order": "sort"}, "there are no times, leave both out"),
        ({"time": None, "ties": "keep"}, "there are no times, leave both out"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_interactions(pa.table({"user": [1], "item": [2], "time": [3]}), **options)


def test_no_times_but_an_order() -> None:
    histories = read_interactions(pa.table({"user": [7, 3, 7, 7], "item": [5, 5, 4, 5]}), time=None)
    assert histories.item_ids[histories.items].tolist() == [5, 5, 4, 5]
    assert histories.times.tolist() == [0, 0, 1, 2]
    assert histories.offsets.tolist() == [0, 1, 4]


def test_sort_and_ties(tmp_path: Path) -> None:
    path = _csv(tmp_path, "u,i,t\n1,10,5\n1,11,3\n1,12,3\n2,10,1\n")
    named = {"user": "u", "item": "i", "time": "t"}
    with pytest.raises(ValueError, match=r"'t' goes back in time for user 1.*order=\"sort\""):
        read_interactions(path, **named)
    with pytest.raises(ValueError, match=r"user 1 has several interactions at t=3.*ties=\"keep\""):
        read_interactions(path, **named, order="sort")
    histories = read_interactions(path, **named, order="sort", ties="keep")
    assert histories.item_ids[histories.items].tolist() == [11, 12, 10, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,item\n1,2\n", r"no column 'time', only \['user', 'item'\]"),
        ("user,item,time\n1,7,3\n1,2.5,4\n", r"'item' .* fraction, not integers or strings, such as 2.5 in row 1"),
        ("user,item,time\n1,2,4\n1,,3\n", r"'item' .* has 1 missing values, the first in row 1"),
        ("user,item,time\n", "holds no interaction"),
        ("", "is empty"),
    ],
)
def test_bad_csv(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_interactions(_csv(tmp_path, text))


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.csv does not exist"):
        read_interactions(tmp_path / "none.csv")
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"user": [1] * 1000, "item": [2] * 1000, "time": range(1000)}), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot be read .* truncated"):
        read_interactions(path)
    with gzip.open(tmp_path / "rows.csv.gz", "wt") as file:
        file.write(ROWS * 1000)
    (tmp_path / "rows.csv.gz").write_bytes((tmp_path / "rows.csv.gz").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"cannot be read .* truncated"):
        read_interactions(tmp_path / "rows.csv.gz")


def _module(**options: object) -> FreeScaleDataModule:
    users, items, times = np.repeat([1, 2, 3], [6, 4, 3]), np.arange(13) % 5, np.arange(13)
    return FreeScaleDataModule.from_interactions(pa.table({"user": users, "item": items, "time": times}), **options)


def test_leave_one_out() -> None:
    module = _module()
    train, validate, test = module.train.dataset, module.val_dataset, module.test_dataset
    assert isinstance(train, HistoryDataset)
    assert len(train) == 2, "three interactions leave no training target"
    assert train[0]["item"].tolist() == [0, 1, 2]
    assert train[0]["target"].tolist() == [1, 2, 3]
    assert (validate[0]["item"].tolist(), validate[0]["target"].tolist()) == ([0, 1, 2, 3], [4])
    assert (test[0]["item"].tolist(), test[0]["target"].tolist()) == ([0, 1, 2, 3, 4], [0])
    predict = module.predict_dataset
    assert (predict[0]["item"].tolist(), predict[0]["target"].tolist()) == ([0, 1, 2, 3, 4, 0], [])
    for dataset in (train, validate, test, predict):
        assert dataset.lengths.tolist() == [len(dataset[index]["item"]) for index in range(2)]
    assert module.feature_rows == {"item": 5}
    assert module.histories.item_ids.tolist() == [0, 1, 2, 3, 4]


def test_jagged_batches() -> None:
    train = _module().train.dataset
    batch = collate_histories([train[0], train[1]])
    assert batch["features"].keys() == ["item"]
    assert batch["features"]["item"].lengths().tolist() == [3, 1]
    assert batch["features"].values().tolist() == [0, 1, 2, 1]
    assert batch["target"].tolist() == [1, 2, 3, 2]
    assert batch["time"].tolist() == [0, 1, 2, 6]
    assert batch["user"].tolist() == [1, 2]
    assert batch["time"].dtype == torch.int64


def test_users_of_string_ids_are_their_places() -> None:
    users = np.repeat(["zoe", "ann", "bob"], [6, 4, 3])
    table = pa.table({"user": users, "item": [f"i{number % 5}" for number in range(13)]})
    module = FreeScaleDataModule.from_interactions(table, time=None)
    train, histories = module.train.dataset, module.histories
    assert histories.user_ids.tolist() == ["ann", "bob", "zoe"]
    assert histories.item_ids.tolist() == ["i0", "i1", "i2", "i3", "i4"]
    batch = collate_histories([train[0], train[1]])
    assert batch["user"].tolist() == [0, 2] and batch["user"].dtype == torch.int64
    assert batch["time"].tolist() == [0, 0, 1, 2]
    assert module.feature_rows == {"item": 5}


def test_no_user_long_enough() -> None:
    with pytest.raises(ValueError, match=r"no user .* has 4 interactions"):
        FreeScaleDataModule.from_interactions(pa.table({"user": [1], "item": [2], "time": [3]}))


def test_ids_beyond_64_bits() -> None:
    table = pa.table({"user": [1], "item": pa.array([2**63 + 5], pa.uint64()), "time": [1]})
    with pytest.raises(ValueError, match="'item' of table holds values beyond 64-bit integers"):
        read_interactions(table)
