"""Atomic writing of checkpoints to one file, or to a folder that all ranks write."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_freescale import BubbleProfiler
from lightning_freescale.checkpoint import partial_files, sharded_folder, single_file
from lightning_freescale.checkpoint.conversion import open_checkpoint, read_checkpoint, write_file, write_folder
from lightning_freescale.checkpoint.spread_tensors import Piece, SpreadTensors
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.testing import RankFailed, run_distributed
from tests.checkpoint.conftest import Saved
from tests.checkpoint.fits import TABLE, Large, SaveAt, fit
from tests.helpers.comm_groups import make_group
from tests.helpers.fake_cuda import pretend_cuda
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import Recommender

SHORT = {"max_epochs": 1, "samples": 24}


def _gathered_where_ranks_share_a_gpu() -> list[float] | None:
    pretend_cuda("one")
    group, rank = make_group(transport="host"), dist.get_rank()
    rows = torch.arange(4.0).reshape(2, 2) + 10 * rank
    piece = Piece(("table",), (4, 2), rows.dtype, (slice(2 * rank, 2 * rank + 2), slice(0, 2)), RowOrder(4))
    tables: Any = SimpleNamespace(group=group, device=torch.device("cuda", 0))
    whole = SpreadTensors([(piece, rows)], group, ShardedTables.message_device(tables)).gather(("table",))
    return None if whole is None else whole.flatten().tolist()


def test_ranks_that_share_a_gpu_send_their_pieces_from_host_memory() -> None:
    """Check that messages use host memory: NCCL does not support such ranks, and gloo does not send CUDA tensors."""
    assert run_distributed(_gathered_where_ranks_share_a_gpu, 2) == [[0, 1, 2, 3, 10, 11, 12, 13], None]


# -- the folder


@pytest.mark.parametrize(("ranks", "checkpoint"), [(1, "sharded"), (3, "sharded"), (1, "single"), (3, "single")])
def test_another_number_of_ranks_resumes_from_a_folder(ranks: int, checkpoint: str, saved: Saved) -> None:
    """Check also tables that are divided in another way."""
    strategy = {"checkpoint": checkpoint}
    found = run_distributed(fit, ranks, Large, resume=saved.folder / "sharded4.ckpt", strategy=strategy)[0]
    assert_same(found.weights, saved.whole.weights, rtol=1e-5, atol=1e-6)
    assert_same(found.states[0]["state"], saved.whole.states[0]["state"], rtol=1e-5, atol=1e-6)


def _save_over(path: Path) -> list[tuple[bool, list[str]]]:
    """Return after each save under one name whether it is a folder, and all names beside it."""
    found = []
    for kind in ("single", "single", "sharded", "sharded", "single"):
        fit(save=path, strategy={"checkpoint": kind}, **SHORT)
        torch.distributed.barrier()
        found.append((path.is_dir(), sorted(entry.name for entry in path.parent.iterdir())))
        torch.distributed.barrier()
    fit(resume=path, samples=24)
    return found


def _save_after_a_profiled_fit(path: Path) -> bool:
    profiler = BubbleProfiler(path.parent / "report", verbose=False)
    fit(save=path, strategy={"checkpoint": "sharded"}, callbacks=[profiler], **SHORT)
    return path.is_dir()


def test_a_profiler_leaves_the_way_of_saving_as_it_was(tmp_path: Path) -> None:
    assert run_distributed(_save_after_a_profiled_fit, 1, tmp_path / "end.ckpt") == [True]


def test_a_later_one_of_either_kind_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    """Check a run that resumes with another ``checkpoint=`` and saves under the same names."""
    expected = [(folder, ["last.ckpt"]) for folder in (False, False, True, True, False)]
    assert run_distributed(_save_over, 2, tmp_path / "last.ckpt") == [expected] * 2


def test_a_folder_whose_files_were_removed_meanwhile_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write_pieces = tmp_path / "last.ckpt", sharded_folder.write_pieces

    def lose_pieces(folder: Path, *rest: Any, **options: Any) -> Any:
        sums = write_pieces(folder, *rest, **options)
        next(folder.glob("*.distcp")).unlink()
        return sums

    write_folder({"state_dict": {"table": torch.ones(1024, 1024)}, "step": 1}, path)
    monkeypatch.setattr(sharded_folder, "write_pieces", lose_pieces)
    with pytest.raises(RuntimeError, match=r"last\.ckpt could not be written: .*No such file .*distcp"):
        write_folder({"state_dict": {"table": torch.ones(1024, 1024)}, "step": 2}, path)
    assert read_checkpoint(path)["step"] == 1 and [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_files_and_their_names_are_on_the_disk_before_they_replace_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a folder, one file, whose parts are synced as they are written, and a temporary file, which is not synced."""
    synced: list[int] = []
    fsync = os.fsync

    def record(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(single_file, "_PART_BYTES", 1 << 20)
    table = {"state_dict": {"table": torch.ones(1024, 1024)}}
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    write_folder(table, folder)
    assert {path.stat().st_ino for path in (folder, *folder.iterdir())} < {*synced}
    assert synced[-2:] == [folder.stat().st_ino, tmp_path.stat().st_ino]
    write_file(table, file)
    assert synced.count(file.stat().st_ino) == 5
    synced.clear()
    open_checkpoint(folder).close()
    assert not synced


def _refuses_to_exchange(*_: Any) -> int:
    ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.mark.parametrize("in_one_step", [True, False])
@pytest.mark.parametrize("was", ["file", "folder", "link to a file", "link to a folder", "nothing"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_what_is_new_takes_the_place_of_what_was_there(
    new: str, was: str, in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a link is replaced and its target is kept."""
    if not in_one_step:
        monkeypatch.setattr(partial_files.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=_refuses_to_exchange))
    place = tmp_path / "place"
    place.mkdir()
    path, led_to, beside = place / "last.ckpt", tmp_path / "led to", place / "new"
    there = led_to if "link" in was else path
    if was.endswith("folder"):
        there.mkdir()
        (there / "kept").touch()
    elif was != "nothing":
        there.touch()
    if "link" in was:
        path.symlink_to(led_to)
    beside.mkdir() if new == "folder" else beside.touch()
    inode = beside.stat().st_ino
    partial_files.replace_path(beside, path)
    assert [entry.name for entry in place.iterdir()] == ["last.ckpt"]
    assert path.lstat().st_ino == inode and led_to.exists() == ("link" in was)


# -- interrupted


class Interrupted:
    """A file whose n-th write kills the process."""

    def __init__(self, file: Any) -> None:
        self.file, self.writes = file, 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 8:
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _save_twice(path: Path) -> None:
    fit(save=path, **SHORT)
    replacing = partial_files.replacing

    @contextmanager
    def interrupted(path: Path) -> Iterator[Any]:
        with replacing(path) as file:
            yield Interrupted(file)

    partial_files.replacing = interrupted
    fit(save=path, **SHORT)


@pytest.mark.usefixtures("patient")
def test_a_killed_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankFailed, match=r"rank 0: died with exit code -9"):
        run_distributed(_save_twice, 2, path)
    assert "state_dict" in torch.load(path, weights_only=True)
    (left,) = [entry.name for entry in tmp_path.iterdir() if entry != path]
    assert left.startswith(".freescale-")


# -- contents


class Looks(Recommender):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if hasattr(self, "seen"):
            return
        table = checkpoint["state_dict"][TABLE]
        self.seen = tuple(table.shape), table.dtype, table.dim(), table.device.type, repr(table)
        with pytest.raises(RuntimeError, match=rf"(?s){TABLE}.*full_weight"):
            table.sum()


def test_a_hook_sees_the_shape_of_a_table_and_no_values(tmp_path: Path) -> None:
    for found in run_distributed(fit, 2, Looks, save=tmp_path / "a.ckpt", **SHORT):
        shape, dtype, dim, device, text = found.seen
        assert shape == (50, 8) and dtype == torch.float32 and dim == 2 and device == "cpu"
        assert TABLE in text and "(50, 8)" in text


class Diverges(L.Callback):
    """A callback that sets a weight to NaN after the first step: a dense one, or one of a table on the last rank."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if self.where == "dense":
            module.net.hidden[0].weight.data[0, 0] = float("inf")
        elif trainer.global_rank == 1:
            next(iter(trainer.strategy.tables.shards())).weight.data[0, 0] = float("nan")


DIVERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("net.hidden.0.weight", {"checkpoint": "sharded"}),
    "dense later": ("net.hidden.0.weight", {"checkpoint": "async"}),
    "table": (TABLE.rsplit(".", 2)[0], {"checkpoint": "single"}),
    "table later": (TABLE.rsplit(".", 2)[0], {"checkpoint": "async"}),
}
"""The kind of weight, its name, and the options of the strategy. A background save raises at the end of the fit."""


def _save_diverged(folder: Path) -> dict[str, str]:
    found = {}
    for case, (_, strategy) in DIVERGED.items():
        saving = [Diverges(case.split()[0]), SaveAt(folder / f"{case}.ckpt", 1)]
        try:
            fit(Recommender, strategy={"overlap": False, **strategy}, callbacks=saving, max_steps=1)
        except ValueError as error:
            found[case] = str(error)
    return found


def test_what_has_diverged_is_not_saved_over_what_is_good(tmp_path: Path) -> None:
    for case in DIVERGED:
        (tmp_path / f"{case}.ckpt").write_bytes(b"good")
    for errors in run_distributed(_save_diverged, 2, tmp_path):
        for case, (name, _) in DIVERGED.items():
            assert name in errors[case] and f"{case}.ckpt" in errors[case], case
            assert (tmp_path / f"{case}.ckpt").read_bytes() == b"good", case
