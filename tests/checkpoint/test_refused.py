"""What is not saved, and what is not loaded: each said by name, and nothing lost."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, fixed_loader, trainer


class Diverges(Recommender):
    """A weight becomes no number after the first step: a dense one, or one of a table, on one rank's row."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if self.where == "dense":
            self.net.hidden[0].weight.data[0, 0] = float("inf")
        elif self.global_rank == 1:
            shard = next(iter(strategy.tables.shards()))
            shard.weight.data[0, 0] = float("nan")


def _save_diverged(path: Path, where: str, save_non_finite: bool, **options: Any) -> None:
    data = Samples(32)
    strategy = FreeScaleStrategy(save_non_finite=save_non_finite, overlap=False, **options)
    fit = trainer(devices=2, max_steps=1, strategy=strategy)
    fit.fit(Diverges(where), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS))
    fit.save_checkpoint(path)


@pytest.mark.parametrize("checkpoint", ["single", "sharded"])
@pytest.mark.parametrize(("where", "name"), [("dense", "net.hidden.0.weight"), ("table", "net.embeddings.embeddings.")])
def test_what_has_diverged_is_not_saved_over_what_is_good(where: str, name: str, checkpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"good")
    with pytest.raises(RankFailed, match=f"(?s)is not written: {name}.*not a number.*save_non_finite=True") as error:
        run_distributed(_save_diverged, 2, path, where, False, checkpoint=checkpoint)
    assert str(error.value).count("is not written") >= 2, "on every rank"
    assert path.read_bytes() == b"good"


def test_what_has_diverged_is_saved_if_asked_for(tmp_path: Path) -> None:
    run_distributed(_save_diverged, 2, tmp_path / "a.ckpt", "table", True)
    weights = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert any(value.isnan().any() for value in weights.values())


class Larger(Recommender):
    """Another model: a layer is missing, another one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.added = self.net.hidden[2]
        self.net.hidden = self.net.hidden[:1]


def _fit(
    path: Path | None, module: type[Recommender] = Recommender, loader: bool = False, save: Path | None = None
) -> list[str]:
    data = Samples(32)
    fit = trainer(devices=2, max_epochs=1 if save else 2, strategy="ddp" if save and loader else "freescale")
    batches: Any = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, balance=REPEATS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module(), fixed_loader(0, 4) if loader else batches, ckpt_path=path)
    if save:
        fit.save_checkpoint(save)
    return [str(each.message) for each in caught]


def _empty(path: Path) -> None:
    path.touch()


def _bare(path: Path) -> None:
    torch.save(Recommender().state_dict(), path)


def _text(path: Path) -> None:
    path.write_text("no checkpoint " * 100)


def _list(path: Path) -> None:
    torch.save([1, 2], path)


def _own_class(path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": Samples(2)}, path)


OTHER_FILES = {
    "empty": (_empty, "is damaged or incomplete.*it is empty"),
    "bare": (_bare, "is no checkpoint of the Trainer, and has a bare state dict: module.load_state_dict"),
    "text": (_text, "is damaged or incomplete.*it is no file of torch.save"),
    "list": (_list, "holds a list: pass a checkpoint that the Trainer has saved"),
    "own class": (_own_class, "holds more than tensors and numbers.*weights_only=False"),
    "none": (lambda path: None, "there is no checkpoint"),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_another_file_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = OTHER_FILES[kind]
    make(tmp_path / "a.ckpt")
    with pytest.raises(RankFailed, match=message):
        run_distributed(_fit, 2, tmp_path / "a.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    run_distributed(_fit, 2, None, save=path)
    return path


def test_another_model_is_refused_by_the_names_of_its_parameters(saved: Path) -> None:
    with pytest.raises(RankFailed, match=r"(?s)Missing key\(s\).*added.weight.*Unexpected key\(s\).*net.hidden.2.weight"):
        run_distributed(_fit, 2, saved, Larger)


def test_a_checkpoint_of_another_loop_is_told_what_starts_anew(saved: Path, tmp_path: Path) -> None:
    without_data = tmp_path / "loader.ckpt"
    run_distributed(_fit, 2, None, loader=True, save=without_data)
    said = run_distributed(_fit, 2, without_data)[0]
    assert any("has no state of FreeScaleDataModule" in each for each in said)
    assert any("not written by strategy 'freescale'" in each for each in said)
    assert not any("has no state of" in each or "not written by" in each for each in run_distributed(_fit, 2, saved)[0])
