"""The checkpoint in one file: ordinary, whole or not there, and checked before it is read."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.checkpoint import single_file
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, trainer

TABLE = "net.embeddings.embeddings.item.weight"


def _fit(path: Path, module: L.LightningModule, resume: bool = False, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    data = Samples(16)
    fit = trainer(devices=2, max_epochs=2 if resume else 1, **options)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
    fit.fit(module, loader, ckpt_path=path if resume else None)
    return fit


def _save(path: Path) -> dict[str, Any]:
    fit = _fit(path, Recommender("rowwise_adagrad"))
    fit.save_checkpoint(path)
    return fit._checkpoint_connector.dump_checkpoint(weights_only=False)


def _resume(path: Path) -> None:
    _fit(path, Recommender("rowwise_adagrad"), resume=True)


def test_the_file_is_what_an_unsharded_run_would_save(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.ckpt"
    state = run_distributed(_save, 2, path)[0]
    saved = torch.load(path, weights_only=True)
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(saved[part], state[part], rtol=0, atol=0)
    assert all(type(value) is torch.Tensor for value in saved["state_dict"].values())
    Recommender("rowwise_adagrad").load_state_dict(saved["state_dict"])
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ckpt"]


class Looks(Recommender):
    """Looks at a table when a checkpoint is saved."""

    def __init__(self, values: bool) -> None:
        super().__init__("sgd")
        self.values = values

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        table = checkpoint["state_dict"][TABLE]
        self.seen = tuple(table.shape), table.dtype, repr(table)
        if self.values:
            table.sum()


def _look(path: Path, values: bool) -> Any:
    module = Looks(values)
    _fit(path, module).save_checkpoint(path)
    return module.seen


def test_a_hook_sees_the_shape_of_a_table_on_every_rank(tmp_path: Path) -> None:
    for shape, dtype, text in run_distributed(_look, 2, tmp_path / "a.ckpt", values=False):
        assert shape[1] == 8 and dtype == torch.float32
        assert "DeferredTensor" in text


def test_a_hook_that_wants_its_values_is_told_the_way(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"(?s)finds no values in it.*full_weight"):
        run_distributed(_look, 2, tmp_path / "a.ckpt", values=True)


class Interrupted:
    """A file whose n-th write kills the process, or finds the disk full."""

    def __init__(self, file: Any, how: str) -> None:
        self.file, self.how, self.writes = file, how, 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 8:
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _save_twice(path: Path, how: str) -> None:
    fit = _fit(path, Recommender("sgd"))
    fit.save_checkpoint(path)
    replacing = single_file.replacing

    class Replacing:
        def __init__(self, path: Path) -> None:
            self.context = replacing(path)

        def __enter__(self) -> Any:
            return Interrupted(self.context.__enter__(), how)

        def __exit__(self, *error: Any) -> Any:
            return self.context.__exit__(*error)

    single_file.replacing = Replacing  # type: ignore[assignment]
    fit.save_checkpoint(path)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("how", "message"),
    [("killed", "rank 0: died with exit code -9"), ("full", r"(?s)No space left.*rank 0 could not write the checkpoint")],
)
def test_an_interrupted_save_leaves_the_last_checkpoint(how: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankFailed, match=message):
        run_distributed(_save_twice, 2, path, how)
    assert "state_dict" in torch.load(path, weights_only=True)
    left = [entry.name for entry in tmp_path.iterdir()]
    assert left == ["last.ckpt"] if how == "full" else sorted(left) == [".last.ckpt.part", "last.ckpt"]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    table = torch.load(path, weights_only=True)["state_dict"][TABLE]
    start = content.index(table.numpy().tobytes())
    content[start + 100] ^= 1
    path.write_bytes(bytes(content))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize("damage", [_flip, _truncate], ids=["flipped", "truncated"])
def test_a_damaged_file_is_refused(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_distributed(_save, 2, path)
    damage(path)
    with pytest.raises(
        RankFailed, match=r"(?s)is damaged or incomplete \(rank .*(Bad CRC-32|its end is missing).*Resume from an earlier one"
    ) as error:
        run_distributed(_resume, 2, path)
    assert str(error.value).count("is damaged or incomplete") >= 2, "on every rank"


def test_a_whole_file_is_resumed_from(tmp_path: Path) -> None:
    run_distributed(_save, 2, tmp_path / "a.ckpt")
    run_distributed(_resume, 2, tmp_path / "a.ckpt")
