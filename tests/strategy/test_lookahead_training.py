"""One batch ahead of Lightning's training loop, with every kind of loader that it treats in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale.strategy.lookahead_loader import ENDED, LookaheadLoader


class Lookahead(SingleDeviceStrategy):
    """Writes down what it trains on, and what it is told comes next."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.loader: LookaheadLoader | None = None
        self.trained: list[list[float]] = []
        self.upcoming: list[Any] = []

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.training:
            self.loader = dataloader = LookaheadLoader(dataloader, limit=lambda: trainer.num_training_batches)
        return dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained.append(batch.flatten().tolist())
        upcoming = self.loader.start_batch()
        self.upcoming.append(upcoming.flatten().tolist() if isinstance(upcoming, Tensor) else upcoming)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(14.0).view(-1, 1)


class Resuming:
    """A loader of unknown length that goes on where it was."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.next %= self.size
        while self.next < self.size:
            self.next += 1
            yield torch.full((2, 1), float(self.next - 1))

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class ResumingSized(Resuming):
    def __len__(self) -> int:
        return self.size


def _sized() -> DataLoader:
    return DataLoader(torch.arange(14.0).view(-1, 1), batch_size=2, shuffle=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "sized": _sized,
    "workers": lambda: DataLoader(
        torch.arange(14.0).view(-1, 1), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "batches": lambda: DataLoader(torch.arange(14.0).view(-1, 2, 1), batch_size=None),
    "resuming": lambda: Resuming(7),
    "resuming sized": lambda: ResumingSized(7),
}


def _trainer(strategy: Any, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(strategy=strategy, **{"max_epochs": 2, "enable_checkpointing": False, **quiet, **options})


def _fit(strategy: Any, loader: Any, ckpt_path: Any = None, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    trainer = _trainer(strategy, **options)
    trainer.fit(Model(), loader, DataLoader(torch.arange(4.0).view(-1, 1)), ckpt_path=ckpt_path)
    return trainer


def _follows(trained: list[Any], steps: int) -> list[Any]:
    """What comes after each batch, in epochs of that many."""
    return [ENDED if (step + 1) % steps == 0 else trained[step + 1] for step in range(len(trained))]


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("kind", list(LOADERS))
def test_upcoming_is_the_batch_that_comes_next(kind: str, limit: int | None) -> None:
    strategy, steps = Lookahead(), limit or 7
    trainer = _fit(strategy, LOADERS[kind](), limit_train_batches=limit, val_check_interval=2)
    assert trainer.global_step == len(strategy.trained) == 2 * steps
    assert strategy.upcoming == _follows(strategy.trained, steps)


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.trained: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
        self.trained.append(batch.flatten().tolist())


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("kind", list(LOADERS))
def test_trains_on_what_it_would_train_on_without(kind: str, limit: int | None) -> None:
    recorder, strategy = Recorder(), Lookahead()
    _fit("auto", LOADERS[kind](), callbacks=[recorder], limit_train_batches=limit)
    _fit(strategy, LOADERS[kind](), limit_train_batches=limit)
    assert strategy.trained == recorder.trained


def test_an_epoch_that_is_cut_short() -> None:
    class Stops(Model):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    strategy = Lookahead()
    _trainer(strategy).fit(Stops(), LOADERS["batches"]())
    assert strategy.trained == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] * 2
    assert strategy.upcoming == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] * 2


class SaveAt(L.Callback):
    """The state that a checkpoint after that many steps holds."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6, 7, 10])
@pytest.mark.parametrize("kind", ["resuming", "resuming sized"])
def test_resumes_with_the_batch_after_the_checkpoint(kind: str, step: int, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    whole, rest = Lookahead(), Lookahead()
    _fit(whole, LOADERS[kind](), callbacks=[SaveAt(step, path)])
    _fit(rest, LOADERS[kind](), ckpt_path=path)
    assert rest.trained[: 14 - step] == whole.trained[step:]
    assert rest.upcoming[: 14 - step] == whole.upcoming[step:]
