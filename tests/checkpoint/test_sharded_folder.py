"""The checkpoint in a folder, to which every rank writes its part: resumed from by any number of ranks, or refused."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint.exchange_names import take_place
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, StopAt, collate, trainer


class Trained(Recommender):
    """Also by Adam; keeps which samples it saw."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters()) if self.optimizer == "adam" else super().configure_optimizers()


def _fit(
    ranks: int,
    optimizer: str = "rowwise_adagrad",
    resume: Path | None = None,
    stop: Path | None = None,
    checkpoint: str = "sharded",
    workers: int = 0,
    global_batch: int = 12,
    step: int = 4,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    data, module = Samples(72), Trained(optimizer)
    loader = FreeScaleDataModule(
        data, data.lengths, global_batch // ranks, collate_fn=collate, num_workers=workers, balance=REPEATS
    )
    strategy = FreeScaleStrategy(checkpoint=checkpoint, **options)  # type: ignore[arg-type]
    callbacks: list[L.Callback] = [StopAt(step, str(stop))] if stop is not None else []
    fit = trainer(devices=ranks, max_epochs=2, callbacks=callbacks, strategy=strategy)
    fit.fit(module, loader, ckpt_path=resume)
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "losses": module.losses,
        "weights": state["state_dict"],
        "states": state["optimizer_states"][0]["state"],
        "seen": module.seen,
    }


@pytest.mark.parametrize("checkpoint", ["sharded", "single"])
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", pytest.param("adam", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resume_is_bitwise(checkpoint: str, ranks: int, optimizer: str, workers: int, tmp_path: Path) -> None:
    path, same = tmp_path / "half.ckpt", {"optimizer": optimizer, "checkpoint": checkpoint, "workers": workers}
    whole = run_distributed(_fit, ranks, ranks, **same)
    first = run_distributed(_fit, ranks, ranks, stop=path, **same)
    second = run_distributed(_fit, ranks, ranks, resume=path, **same)
    assert path.is_dir() == (checkpoint == "sharded")
    for before, after, straight in zip(first, second, whole):
        assert before["losses"] + after["losses"] == straight["losses"]
    for part in ("weights", "states"):
        torch.testing.assert_close(second[0][part], whole[0][part], rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("placement", ["hash", "blocks"])
@pytest.mark.parametrize("resumed_by", ["sharded", "single"])
def test_another_number_of_ranks_resumes_from_it(ranks: int, placement: str, resumed_by: str, tmp_path: Path) -> None:
    """Also with rows placed otherwise, and tables cut otherwise."""
    path = tmp_path / "half.ckpt"
    whole = run_distributed(_fit, 2, 2)[0]
    run_distributed(_fit, 2, 2, stop=path)
    second = run_distributed(_fit, ranks, ranks, resume=path, placement=placement, checkpoint=resumed_by)[0]
    for part in ("weights", "states"):
        torch.testing.assert_close(second[part], whole[part], rtol=1e-5, atol=1e-6)


def _steps(of_ranks: list[dict[str, Any]]) -> list[list[int]]:
    """Return the samples of each step."""
    return [sorted(chain.from_iterable(step)) for step in zip(*(rank["seen"] for rank in of_ranks))]


@pytest.mark.parametrize("checkpoint", ["sharded", "single"])
def test_a_run_changes_its_number_of_ranks_twice(checkpoint: str, tmp_path: Path) -> None:
    """From two to three in the first epoch, to one in the second; with the same global batches."""
    paths = [tmp_path / "a.ckpt", tmp_path / "b.ckpt"]
    whole = run_distributed(_fit, 2, 2)
    on_two = run_distributed(_fit, 2, 2, stop=paths[0], checkpoint=checkpoint)
    on_three = run_distributed(_fit, 3, 3, resume=paths[0], stop=paths[1], step=9, checkpoint=checkpoint)
    on_one = run_distributed(_fit, 1, 1, resume=paths[1], checkpoint=checkpoint)
    assert _steps(on_two) + _steps(on_three) + _steps(on_one) == _steps(whole)
    for part in ("weights", "states"):
        torch.testing.assert_close(on_one[0][part], whole[0][part], rtol=1e-6, atol=1e-6)


def _save(path: Path, ranks: int) -> None:
    _fit(ranks, stop=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    run_distributed(_save, 2, path, 2)
    return path


def _flip(folder: Path) -> None:
    (file,) = folder.glob("__1_*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def _truncate(folder: Path) -> None:
    (file,) = folder.glob("__1_*.distcp")
    file.write_bytes(file.read_bytes()[:-10])


def _lose(folder: Path) -> None:
    next(folder.glob("__0_*.distcp")).unlink()


def _never_ended(folder: Path) -> None:
    (folder / "freescale.json").unlink()


def _of_another_version(folder: Path) -> None:
    content = json.loads((folder / "freescale.json").read_text())
    (folder / "freescale.json").write_text(json.dumps({**content, "format": 99, "lightning_freescale": "7.0"}))


def _edited(folder: Path) -> None:
    text = (folder / "freescale.json").read_text()
    (folder / "freescale.json").write_text(text.replace('"float32"', '"float64"'))


DAMAGE = {
    "flipped": (_flip, r"rank \d: the file __1_0.distcp is not what was written"),
    "truncated": (_truncate, r"rank \d: the file __1_0.distcp has \d+ bytes instead of \d+"),
    "missing": (_lose, r"rank \d: the file __0_0.distcp is missing"),
    "never ended": (_never_ended, "rank 0: it has no freescale.json"),
    "another version": (_of_another_version, "rank 0: it has format 99 of lightning-freescale 7.0"),
    "edited": (_edited, "rank 0: its freescale.json is not what was written"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(damage: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    shutil.copytree(saved, path)
    how, message = DAMAGE[damage]
    how(path)
    with pytest.raises(RankFailed, match=f"is damaged or incomplete.*{message}.*Resume from an earlier one") as error:
        run_distributed(_fit, 2, 2, resume=path)
    assert str(error.value).count("is damaged or incomplete") >= 2, "on every rank"


class Malicious:
    """Makes a file when it is read."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("file", [".metadata", "meta.pt"])
def test_code_in_it_is_not_run(file: str, saved: Path, tmp_path: Path) -> None:
    import zlib

    path, made = tmp_path / "a.ckpt", tmp_path / "made"
    shutil.copytree(saved, path)
    if file == "meta.pt":
        torch.save({"state_dict": Malicious(made)}, path / file)
    else:
        (path / file).write_bytes(pickle.dumps(Malicious(made)))
    manifest = json.loads((path / "freescale.json").read_text())
    content = (path / file).read_bytes()
    manifest["files"][file] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (path / "freescale.json").write_text(json.dumps(manifest))
    with pytest.raises(RankFailed, match=r"is no checkpoint|holds more than tensors and numbers"):
        run_distributed(_fit, 2, 2, resume=path)
    assert not made.exists()


def _save_over_itself(path: Path) -> list[str]:
    for _ in range(2):
        _fit(2, stop=path)
    return sorted(entry.name for entry in path.parent.iterdir())


def test_a_later_one_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert run_distributed(_save_over_itself, 2, path)[0] == ["last.ckpt"]
    run_distributed(_fit, 2, 2, resume=path)


@pytest.mark.parametrize("kinds", [("single", "sharded"), ("sharded", "single")])
def test_one_of_the_other_kind_takes_its_place(kinds: tuple[str, str], tmp_path: Path) -> None:
    """Who resumes with another ``checkpoint=`` saves under the same names."""
    path = tmp_path / "last.ckpt"
    for kind in kinds:
        run_distributed(_fit, 2, 2, stop=path, checkpoint=kind)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"] and path.is_dir() == (kinds[1] == "sharded")
    run_distributed(_fit, 2, 2, resume=path)


@pytest.mark.parametrize("was", ["file", "folder"])
def test_a_link_gives_way_and_what_it_leads_to_stays(was: str, tmp_path: Path) -> None:
    led_to, path = tmp_path / was, tmp_path / "last.ckpt"
    led_to.mkdir() if was == "folder" else led_to.write_text("")
    path.symlink_to(led_to)
    new = tmp_path / "new"
    new.mkdir()
    take_place(new, path)
    assert path.is_dir() and not path.is_symlink() and led_to.exists() and not new.exists()


def _save_where_one_cannot(path: Path) -> None:
    import os

    if int(os.environ["RANK"]) == 1:
        from torch.distributed.checkpoint import filesystem

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        filesystem._write_item = full
    _fit(2, stop=path)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_cannot_write_is_named_and_leaves_the_last_one(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    shutil.copytree(saved, path)
    with pytest.raises(RankFailed, match=r"(?s)No space left on device") as error:
        run_distributed(_save_where_one_cannot, 2, path)
    assert "rank 0" in str(error.value) and "rank 1" in str(error.value)
    run_distributed(_fit, 2, 2, resume=path)


def _resume_last(folder: Path) -> tuple[int, list[str]]:
    import warnings

    torch.manual_seed(0)
    data, module = Samples(72), Trained("sgd")
    saving = L.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    fit = trainer(devices=2, max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module, FreeScaleDataModule(data, data.lengths, 6, collate_fn=collate, balance=REPEATS), ckpt_path="last")
    return len(module.losses), [str(each.message) for each in caught if "is damaged" in str(each.message)]


@pytest.mark.parametrize("checkpoint", ["single", "sharded"])
def test_a_damaged_last_one_gives_way_to_the_newest_whole_one(checkpoint: str, tmp_path: Path) -> None:
    """Which is before the end of the first epoch, so that all but four of its twelve steps are to be done."""
    for name in ("older.ckpt", "torn.ckpt", "last.ckpt"):
        run_distributed(_fit, 2, 2, "sgd", stop=tmp_path / name, checkpoint=checkpoint)
    for name in ("torn.ckpt", "last.ckpt"):
        if checkpoint == "sharded":
            _flip(tmp_path / name)
        else:
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-2000])
    steps, warned = run_distributed(_resume_last, 2, tmp_path)[0]
    assert steps == 12 - 4
    assert len(warned) == 1 and "last.ckpt is damaged" in warned[0] and "resumes from" in warned[0] and "older" in warned[0]
