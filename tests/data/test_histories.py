"""Data sets of histories: the samples of training, validation, test and prediction, and their batches."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import HistoryDataset, collate_histories


def test_leave_one_out_in_jagged_batches() -> None:
    users, items, times = np.repeat([1, 2, 3], [6, 4, 3]), np.arange(13) % 5, np.arange(13)
    module = FreeScaleDataModule.from_interactions(pa.table({"user": users, "item": items, "time": times}))
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
    histories = module.histories
    assert histories.item_ids.tolist() == [0, 1, 2, 3, 4] and histories.user_ids.tolist() == [1, 2, 3]
    assert histories.lengths.tolist() == [6, 4, 3]
    batch = collate_histories([train[0], train[1]])
    assert batch["features"].keys() == ["item"]
    assert batch["features"]["item"].lengths().tolist() == [3, 1]
    assert batch["features"].values().tolist() == [0, 1, 2, 1]
    assert batch["target"].tolist() == [1, 2, 3, 2]
    assert (batch["time"].tolist(), batch["time"].dtype) == ([0, 1, 2, 6], torch.int64)
    assert batch["user"].tolist() == [1, 2]


def test_users_of_string_ids_are_their_places() -> None:
    users = np.repeat(["zoe", "ann", "bob"], [6, 4, 3])
    table = pa.table({"user": users, "item": [f"i{number % 5}" for number in range(13)]})
    module = FreeScaleDataModule.from_interactions(table, time=None)
    train = module.train.dataset
    assert module.histories.user_ids.tolist() == ["ann", "bob", "zoe"]
    batch = collate_histories([train[0], train[1]])
    assert batch["user"].tolist() == [0, 2] and batch["user"].dtype == torch.int64
    assert batch["time"].tolist() == [0, 0, 1, 2]


def test_no_user_long_enough() -> None:
    with pytest.raises(ValueError, match="4 interactions"):
        FreeScaleDataModule.from_interactions(pa.table({"user": [1], "item": [2], "time": [3]}))
