"""Data frames and data sets of other packages: every sample once, and a resume that loses and repeats none."""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.data import read_interactions
from lightning_freescale.testing import run_distributed
from tests.checkpoint.fits import Seen
from tests.helpers.recommender import REPEATS, Samples, StopAt, collate, trainer

pytestmark = pytest.mark.third_party
SIZE, STOP_AT = 75, 4
SAMPLES = Samples(SIZE)


def _row(index: int) -> dict[str, Any]:
    sample = SAMPLES[index]
    numbers = {name: int(sample[name]) for name in ("index", "candidate", "category")}
    return {**numbers, "history": sample["history"].numpy(), "label": float(sample["label"])}


def _write_litdata(folder: Path) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_size=10)
    for index in range(SIZE):
        cache[index] = _row(index)
    cache.done()
    cache.merge()


def _write_streaming(folder: Path) -> None:
    import streaming

    columns = dict.fromkeys(("index", "candidate", "category"), "int") | {"history": "ndarray:int64", "label": "float64"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=3000) as writer:
        for index in range(SIZE):
            writer.write(_row(index))


def _write_datasets(folder: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([_row(index) for index in range(SIZE)])
    folder.mkdir()
    for part in range(6):
        rows.shard(6, part, contiguous=True).to_parquet(str(folder / f"{part}.parquet"))


def _read(name: str, folder: Path) -> Any:
    library = import_module(name.partition(",")[0])
    if name == "litdata":
        return library.StreamingDataset(str(folder))
    if name == "streaming":
        return library.StreamingDataset(local=str(folder), batch_size=4)
    files = sorted(map(str, folder.glob("*.parquet")))
    if name == "datasets":
        return library.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{folder}.cache.{os.getpid()}")
    rows = library.load_dataset("parquet", data_files=files, split="train", streaming=True)
    ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return import_module("datasets.distributed").split_dataset_by_node(rows, *ranks)


LIBRARIES = {
    "litdata": _write_litdata,
    "streaming": _write_streaming,
    "datasets": _write_datasets,
    "datasets, streamed": _write_datasets,
}


def _length(row: dict[str, Any]) -> int:
    return len(row["history"])


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return collate(
        [{"index": row["index"], **{name: torch.tensor(row[name]) for name in row if name != "index"}} for row in rows]
    )


def _fit(name: str, folder: Path, path: str, stops: bool, resumes: bool, workers: int) -> list[list[int]]:
    torch.manual_seed(0)
    devices = int(os.environ["WORLD_SIZE"])
    data = FreeScaleDataModule(_read(name, folder), _length, 4, collate_fn=_collate, num_workers=workers, **REPEATS)
    module = Seen("sgd")

    fit = trainer(devices=devices, max_epochs=2, limit_val_batches=0, callbacks=[StopAt(STOP_AT, path)] if stops else [])
    fit.fit(module, data, ckpt_path=path if resumes else None)
    return module.seen


def _counted(ranks: list[list[list[int]]], first: int = 0, last: int | None = None) -> Counter[int]:
    return Counter(index for rank in ranks for step in rank[first:last] for index in step)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LIBRARIES)
def test_every_sample_once_also_where_a_run_stops_and_goes_on(name: str, workers: int, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(",")[0])
    folder, path = tmp_path / "written", str(tmp_path / "stopped.ckpt")
    LIBRARIES[name](folder)
    once = Counter(range(SIZE))
    whole = run_distributed(_fit, 2, name, folder, path, False, False, workers)
    steps = len(whole[0]) // 2
    assert _counted(whole, 0, steps) == _counted(whole, steps) == once
    before = run_distributed(_fit, 2, name, folder, path, True, False, workers)
    after = run_distributed(_fit, 2, name, folder, path, False, True, workers)
    assert [first + second for first, second in zip(before, after)] == whole
    if "streamed" not in name:
        on_three = run_distributed(_fit, 3, name, folder, path, False, True, workers)
        in_epoch = len(on_three[0]) - -(-SIZE // 12)
        assert _counted(before) + _counted(on_three, 0, in_epoch) == once
        assert _counted(on_three, in_epoch) == once


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_data_frames(name: str) -> None:
    times = np.array([3, 1, 2], "datetime64[ms]")
    frame = pytest.importorskip(name).DataFrame({"user": [7, 7, 8], "item": ["a", "b", "a"], "time": times})
    histories = read_interactions(frame, order="sort")
    assert (histories.lengths.tolist(), histories.num_items) == ([2, 1], 2)
