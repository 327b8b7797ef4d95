"""``micro_batches="auto"`` in fits: it decides once, is one where nothing is overlapped, and follows any loader."""

from __future__ import annotations

import io
import logging
import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import IterableDataset

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.micro_batch_training import SIZE, Model, data
from tests.helpers.recommender import Samples, collate, trainer


def _auto(folder: str) -> Any:
    module = Model()
    fitting = trainer(devices=2, strategy="freescale", max_epochs=30, logger=CSVLogger(folder), log_every_n_steps=1)
    module_data = data("auto", batch_size=4)
    fitting.fit(module, datamodule=module_data)
    schedule = module_data.train.micro_batches
    counts = Counter(step for step, *_ in module.seen)
    state = module_data.state_dict()
    again = data("auto", batch_size=4)
    again.load_state_dict(state)
    return schedule.chosen, [counts[step] for step in sorted(counts)], again.train.micro_batches.chosen


def test_auto_decides_once_and_alike(tmp_path: Any) -> None:
    found = run_distributed(_auto, 2, str(tmp_path))
    (chosen, counts, resumed), other = found
    assert found[0] == other
    assert chosen in (1, 2, 4)
    assert set(counts[:40]) == {1, 2, 4}, "they take turns"
    assert set(counts[-40:]) <= {chosen, min(chosen, 3)}
    assert resumed == chosen


def _auto_without_exchange() -> Any:
    chosen = []
    for strategy in (FreeScaleStrategy(overlap=False),):
        module_data = data("auto")
        trainer(devices=2, strategy=strategy, max_epochs=1).fit(Model(), datamodule=module_data)
        chosen.append(module_data.train.micro_batches.chosen)
    return chosen


def test_auto_is_one_where_nothing_is_overlapped() -> None:
    assert run_distributed(_auto_without_exchange, 2) == [[1], [1]]


class Plain(Model):
    """Has no embedding collection."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.global_step, batch_idx, len(batch["label"])))
        return self.net(batch["label"][:, None]).square().mean()


class AsksForTheLoader(Model):
    """In ``configure_optimizers``, which comes before anybody knows what is overlapped, and before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Stream(IterableDataset):
    """The samples, as they come."""

    def __iter__(self) -> Any:
        samples = Samples(SIZE)
        return (samples[index] for index in range(SIZE))


def _stream(**options: Any) -> FreeScaleDataModule:
    given = {"batch_size": 8, "collate_fn": collate, "micro_batches": "auto", **options}
    return FreeScaleDataModule(Stream(), lambda sample: len(sample["history"]), **given)


def _chose_four(path: str, make: Any, make_data: Any) -> None:
    """Write the checkpoint of a run that has found 4 micro-batches the quickest."""
    keep = ModelCheckpoint(os.path.dirname(path), every_n_train_steps=2, filename="two_steps")
    fitting = trainer(devices=1, strategy="freescale", max_steps=3, callbacks=[keep], enable_checkpointing=True)
    fitting.fit(make(), datamodule=make_data())
    saved = torch.load(keep.best_model_path, weights_only=False)
    saved["FreeScaleDataModule"]["micro_batches"] = 4
    torch.save(saved, path)


def _goes_on_without_exchange(path: str, make: Any, make_data: Any, strategy: Any) -> Any:
    _chose_four(path, make, make_data)
    told = io.StringIO()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(told))
    module, module_data = make(), make_data()
    fitting = trainer(devices=1, strategy=strategy, max_steps=5)
    fitting.fit(module, datamodule=module_data, ckpt_path=path)
    per_step = Counter(step for step, *_ in module.seen)
    return module_data.train.micro_batches.chosen, per_step, module_data.state_dict()["micro_batches"], told.getvalue()


@pytest.mark.parametrize(
    ("make", "make_data", "strategy"),
    [
        (Model, partial(data, "auto"), FreeScaleStrategy(overlap=False)),
        (AsksForTheLoader, partial(data, "auto"), FreeScaleStrategy(overlap=False)),
        (Plain, partial(data, "auto", val_dataset=None), "freescale"),
        (Model, _stream, FreeScaleStrategy(overlap=False)),
        (AsksForTheLoader, _stream, FreeScaleStrategy(overlap=False)),
    ],
)
def test_a_checkpoint_that_chose_four_goes_on_where_nothing_is_overlapped(
    tmp_path: Any, make: Any, make_data: Any, strategy: Any
) -> None:
    path = str(tmp_path / "chose_four.ckpt")
    ((chosen, per_step, saved, told),) = run_distributed(_goes_on_without_exchange, 1, path, make, make_data, strategy)
    assert chosen == 1
    assert per_step == {2: 1, 3: 1, 4: 1}
    assert saved == 4, "what was measured stays, for a run that overlaps again"
    assert "FreeScaleDataModule(micro_batches='auto'): 1, because " in told
    assert "not 4 as measured in the run that wrote the checkpoint" in told


def _loader_alone(strategy: Any, make_data: Any) -> Any:
    module, loader = Model(), make_data(batch_size=4, drop_last=True).train_dataloader()
    trainer(devices=1, strategy=strategy, max_epochs=40).fit(module, loader)
    counts = Counter(step for step, *_ in module.seen)
    return loader.sampler.micro_batches.chosen, set(counts.values()), [counts[step] for step in sorted(counts)][-20:]


@pytest.mark.parametrize(
    "make_data", [partial(data, "auto", batch_size=4, drop_last=True), partial(_stream, batch_size=4, drop_last=True)]
)
def test_auto_follows_a_loader_without_its_data_module(make_data: Any) -> None:
    ((chosen, tried, at_the_end),) = run_distributed(_loader_alone, 1, FreeScaleStrategy(), make_data)
    assert chosen in (1, 2, 4)
    assert tried == {1, 2, 4}
    assert set(at_the_end) == {chosen}
    assert run_distributed(_loader_alone, 1, FreeScaleStrategy(overlap=False), make_data)[0][:2] == (1, {1})
