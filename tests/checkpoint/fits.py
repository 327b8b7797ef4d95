"""Fits for the tests of checkpoints: a run that stops, a run that resumes, and an uninterrupted run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import IterableDataset, get_worker_info
from torchrec import EmbeddingCollection

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate, tables, trainer

SAMPLES, GLOBAL_BATCH, STEPS, EPOCHS = 72, 12, 6, 2
"""A fit has two epochs of six steps by default, on any number of ranks."""
TABLE = "net.embeddings.embeddings.item.weight"


class Seen(Recommender):
    """A model with dropout and a schedule that records its samples."""

    def __init__(self, optimizer: str = "adagrad", dropout: float = 0.2) -> None:
        super().__init__(optimizer)
        self.dropout = dropout
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters()) if self.optimizer == "adam" else super().configure_optimizers()
        assert self.trainer.estimated_stepping_batches  # builds the loader early, before the checkpoint is read
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Large(Seen):
    """A model without dropout. Its first table is a separate tensor in any folder, by default."""

    def __init__(self, rows: int = 40_000, item: Mapping[str, Any] | None = None, cat: Mapping[str, Any] | None = None) -> None:
        super().__init__("rowwise_adagrad", dropout=0.0)
        large, small = tables()
        vars(large).update({"num_embeddings": rows, **(item or {})})
        vars(small).update(cat or {})
        self.net.embeddings = EmbeddingCollection(tables=[large, small])


class Rereading(IterableDataset):
    """A rank's part of the samples, which always starts at the beginning."""

    def __init__(self, size: int, rank: int | None = None, world_size: int | None = None) -> None:
        self.samples, self.rank, self.world_size = Samples(size), rank, world_size

    def own(self) -> range:
        rank = int(os.environ["RANK"]) if self.rank is None else self.rank
        world_size = int(os.environ["WORLD_SIZE"]) if self.world_size is None else self.world_size
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(rank + worker * world_size, len(self.samples), workers * world_size)

    def __iter__(self) -> Any:
        yield from (self.samples[index] for index in self.own())

    def for_rank(self, rank: int, world_size: int) -> Rereading:
        return type(self)(len(self.samples), rank, world_size)


class Stream(Rereading):
    """A rank's part of the samples, which resumes at its last position."""

    place, fresh = 0, True

    def __iter__(self) -> Any:
        self.place, self.fresh = (0 if self.fresh else self.place), True
        own = self.own()
        while self.place < len(own):
            self.place += 1
            yield self.samples[own[self.place - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.fresh = state["place"], False


@dataclass
class Fitted:
    """The results of a fit on a rank; weights and states are whole on rank 0."""

    losses: list[float]
    seen: list[list[int]]
    weights: dict[str, Any]
    states: list[Any]
    steps: int
    warned: list[str]


def fit(
    make: Callable[[], L.LightningModule] = Seen,
    *,
    samples: int = SAMPLES,
    batch_size: int | None = None,
    data: Mapping[str, Any] | None = None,
    strategy: Mapping[str, Any] | str | None = None,
    stream: type[Rereading] | None = None,
    callbacks: Sequence[L.Callback] = (),
    resume: str | Path | None = None,
    save: str | Path | None = None,
    **options: Any,
) -> Fitted:
    """Fit on the ranks of ``run_distributed``.

    By default all ranks together have :data:`GLOBAL_BATCH` samples in a step. ``data`` has more options of the data module;
    ``strategy`` has options, or is the name of another strategy; ``stream`` replaces the map-style data set; ``options`` are
    options of the Trainer.
    """
    if options.get("num_nodes", 1) > 1:
        os.environ.update(LOCAL_RANK="0", GROUP_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="1")
    torch.manual_seed(0 if resume is None else 7)
    module, ranks, given = make(), int(os.environ["WORLD_SIZE"]), {"collate_fn": collate, **(data or {})}
    size = batch_size or GLOBAL_BATCH // ranks
    if stream is not None:
        loader = FreeScaleDataModule(stream(samples), lambda sample: len(sample["history"]), size, **given)
    else:
        dataset = Samples(samples)
        loader = FreeScaleDataModule(dataset, dataset.lengths, size, **{**REPEATS, **given})
    fitting = trainer(
        strategy=strategy if isinstance(strategy, str) else FreeScaleStrategy(**(strategy or {})),
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        **{"devices": ranks, "max_epochs": EPOCHS, **options},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(module, loader, ckpt_path=resume)
        if save is not None:
            fitting.save_checkpoint(save)
    assert fitting.reload_dataloaders_every_n_epochs == 0, "the Trainer's own setting is put back"
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    warned = [str(each.message) for each in caught]
    seen = getattr(module, "seen", [])
    return Fitted(module.losses, seen, state["state_dict"], state["optimizer_states"], fitting.global_step, warned)


class SaveAt(L.Callback):
    """A callback that saves after some steps without stopping; ``{step}`` in the path is the step."""

    def __init__(self, path: str | Path, *steps: int) -> None:
        self.path, self.steps = str(path), steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.path.format(step=trainer.global_step))


def assert_continued(first: list[Fitted], second: list[Fitted], whole: list[Fitted]) -> None:
    """Check that both parts of a run, by rank, are bitwise the uninterrupted run."""
    for before, after, straight in zip(first, second, whole, strict=True):
        assert before.losses and after.losses
        assert before.seen + after.seen == straight.seen
        assert before.losses + after.losses == straight.losses
    assert_same(second[0].weights, whole[0].weights)
    assert_same(second[0].states, whole[0].states)


def samples_by_step(ranks: list[Fitted]) -> list[list[int]]:
    return [[sample for rank in step for sample in rank] for step in zip(*(rank.seen for rank in ranks), strict=True)]
