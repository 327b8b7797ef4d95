"""Data sets of other packages: every sample once, and a resume that loses and repeats none."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.testing import run_distributed
from tests.checkpoint.test_resume import Seen, StopAt
from tests.helpers.recommender import REPEATS, Samples, collate, trainer

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


def _litdata(folder: Path) -> Any:
    import litdata

    return litdata.StreamingDataset(str(folder))


def _write_streaming(folder: Path) -> None:
    import streaming

    columns = dict.fromkeys(("index", "candidate", "category"), "int") | {"history": "ndarray:int64", "label": "float64"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=3000) as writer:
        for index in range(SIZE):
            writer.write(_row(index))


def _streaming(folder: Path) -> Any:
    import streaming

    return streaming.StreamingDataset(local=str(folder), batch_size=4)


def _write_datasets(folder: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([_row(index) for index in range(SIZE)])
    folder.mkdir()
    for part in range(6):
        rows.shard(6, part, contiguous=True).to_parquet(str(folder / f"{part}.parquet"))


def _datasets(folder: Path) -> Any:
    import datasets

    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{folder}.cache.{os.getpid()}")


def _datasets_streamed(folder: Path) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    files = sorted(map(str, folder.glob("*.parquet")))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return split_dataset_by_node(rows, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


LIBRARIES = {"litdata": (_write_litdata, _litdata), "streaming": (_write_streaming, _streaming)}
LIBRARIES |= {"datasets": (_write_datasets, _datasets), "datasets, streamed": (_write_datasets, _datasets_streamed)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Where the samples of a library lie, written on first use."""
    parent = tmp_path_factory.mktemp("written")

    class Folders(dict[Any, Path]):
        def __missing__(self, write: Any) -> Path:
            self[write] = parent / write.__name__
            write(self[write])
            return self[write]

    return Folders()


def _length(row: dict[str, Any]) -> int:
    return len(row["history"])


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return collate(
        [{"index": row["index"], **{name: torch.tensor(row[name]) for name in row if name != "index"}} for row in rows]
    )


def _fit(name: str, folder: Path, path: str, stops: bool, resumes: bool, workers: int) -> list[list[int]]:
    torch.manual_seed(0)
    devices = int(os.environ["WORLD_SIZE"])
    data = FreeScaleDataModule(
        LIBRARIES[name][1](folder), _length, 4, collate_fn=_collate, num_workers=workers, balance=REPEATS
    )
    module = Seen("sgd")

    fit = trainer(devices=devices, max_epochs=2, limit_val_batches=0, callbacks=[StopAt(STOP_AT, path)] if stops else [])
    fit.fit(module, data, ckpt_path=path if resumes else None)
    return module.seen


def _run(ranks: int, *arguments: Any) -> list[Any]:
    return run_distributed(_fit, ranks, *arguments)


def _counted(ranks: list[list[list[int]]], first: int = 0, last: int | None = None) -> Counter[int]:
    return Counter(index for rank in ranks for step in rank[first:last] for index in step)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LIBRARIES)
def test_every_sample_once_also_where_a_run_stops_and_goes_on(
    name: str, workers: int, folders: dict[Any, Path], tmp_path: Path
) -> None:
    pytest.importorskip(name.partition(",")[0])
    folder, path = folders[LIBRARIES[name][0]], str(tmp_path / "stopped.ckpt")
    once = Counter(range(SIZE))
    whole = _run(2, name, folder, path, False, False, workers)
    steps = len(whole[0]) // 2
    assert _counted(whole, 0, steps) == _counted(whole, steps) == once
    before = _run(2, name, folder, path, True, False, workers)
    after = _run(2, name, folder, path, False, True, workers)
    assert [first + second for first, second in zip(before, after)] == whole
    if "streamed" not in name:
        on_three = _run(3, name, folder, path, False, True, workers)
        in_epoch = len(on_three[0]) - -(-SIZE // 12)
        assert _counted(before) + _counted(on_three, 0, in_epoch) == once
        assert _counted(on_three, in_epoch) == once
