"""Fits for the tests of the overlap: what a fit leaves behind, and batches of all kinds."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from tests.helpers.recommender import Recommender, fixed_loader, trainer

Batch = dict[str, Any]

STEPS, EPOCHS = 6, 2
# lookups that were predicted, not predicted, mispredicted
TOLD = (STEPS * EPOCHS - EPOCHS, EPOCHS, 0)
"""All but the first of an epoch: a function tells the ids."""
KNOWN = (STEPS * EPOCHS - EPOCHS - 1, EPOCHS + 1, 0)
"""Nor the second one of all: then it has just been learned where they stand."""
NEVER = (0, STEPS * EPOCHS, 0)


@dataclass
class Run:
    """What a fit leaves behind; weights and optimizer states are whole, on rank 0."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)

    def looked_ahead(self) -> tuple[int, int, int]:
        """Return the numbers of lookups whose ids were predicted, not predicted, and mispredicted."""
        return tuple(
            int(self.statistics[name]) for name in ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups")
        )


class CountingModel(Recommender):
    """Keeps what the engine has counted."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.statistics: dict[str, float] = {}

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, FreeScaleStrategy) and strategy.overlap_controller is not None:
            self.statistics = strategy.overlap_controller.engine.statistics()


def exchange_threads() -> list[str]:
    """Names of the package's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("freescale")]


def fit(module: CountingModel, loader: Any, validation: Any = None, ckpt_path: Any = None, **options: Any) -> Run:
    """Fit on the ranks of ``run_distributed``."""
    fitting = trainer(**{"devices": int(os.environ["WORLD_SIZE"]), **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(module, loader, validation, ckpt_path=ckpt_path)
    if isinstance(fitting.strategy, FreeScaleStrategy):
        assert fitting.strategy.overlap_controller is None, "the engine ends with the fit"
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=False)
    told = [str(one.message) for one in caught]
    return Run(module.losses, state["state_dict"], state["optimizer_states"], module.statistics, told, exchange_threads())


def fit_overlapped(make: Callable[[], CountingModel], change: Callable[[Batch], Any], **options: Any) -> Run:
    """Fit on batches that are changed so, with these options of the strategy."""
    torch.manual_seed(0)
    strategy = FreeScaleStrategy(**{"dedup": False, **options})
    return fit(make(), changed_loader(STEPS, change), max_epochs=EPOCHS, strategy=strategy)


def against_plain(make: Callable[[], CountingModel], change: Callable[[Batch], Any], **options: Any) -> tuple[Run, Run]:
    """Fit with plain TorchRec, and overlapped with these options."""
    return fit_overlapped(make, change, overlap=False), fit_overlapped(make, change, **options)


def error_of(make: Callable[[], CountingModel], change: Callable[[Batch], Any], **options: Any) -> str:
    """Return the traceback with which such a fit ends."""
    try:
        fit_overlapped(make, change, **options)
    except Exception:
        return traceback.format_exc()
    return "nothing"


def notices(run: Run) -> list[str]:
    """Return what was said of lookups that are not overlapped."""
    return [text for text in run.warnings if "overlapped" in text]


def strategies(lookahead: str = "batch") -> list[FreeScaleStrategy]:
    """Plain TorchRec, and the overlapped exchange that has the same numbers bit by bit."""
    return [FreeScaleStrategy(overlap=False), FreeScaleStrategy(dedup=False, lookahead=lookahead)]


def my_loader(steps: int) -> DataLoader:
    """This rank's batches."""
    return fixed_loader(int(os.environ["RANK"]), steps)


def assert_bitwise(runs: list[tuple[Run, Run]]) -> None:
    """Both runs of every rank are the same, and have trained."""
    for one, other in runs:
        assert one.losses == other.losses
        assert len(set(one.losses)) > 1, "the loss must move, or equality means nothing"
    one, other = runs[0]
    assert_same(one.weights, other.weights)
    assert_same([state["state"] for state in one.states], [state["state"] for state in other.states])


def assert_same(one: Any, other: Any, **tolerance: float) -> None:
    """Nested tensors; bitwise if no tolerance is given."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], **tolerance)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other):
            assert_same(*pair, **tolerance)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))
    else:
        assert one == other


# -- batches


class Changed(Dataset):
    """Other batches, made of those of a loader."""

    def __init__(self, loader: DataLoader, change: Any) -> None:
        self.batches = [change(batch) for batch in loader]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def changed_loader(steps: int, change: Any) -> DataLoader:
    """This rank's batches, each as ``change`` makes it."""
    return DataLoader(Changed(my_loader(steps), change), batch_size=None)


class Stream(IterableDataset):
    """This rank's batches; nobody knows how many, so Lightning fetches the first when it makes the loader."""

    def __init__(self) -> None:
        self.batches = list(my_loader(STEPS))

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


class OneBuffer:
    """Makes every batch in the memory of the one before."""

    def __init__(self) -> None:
        self.batches = [as_tensors(batch) for batch in my_loader(STEPS)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        ids, label = np.zeros(max(len(batch["ids"]) for batch in self.batches), np.int64), np.zeros(4, np.float32)
        for batch in self.batches:
            count = len(batch["ids"])
            ids[:count], label[:] = batch["ids"], batch["label"]
            yield {**batch, "ids": torch.from_numpy(ids)[:count], "label": torch.from_numpy(label)}


@dataclass
class Record:
    """A batch that is no dict."""

    features: KeyedJaggedTensor
    label: Tensor


def as_record(batch: Batch) -> Record:
    return Record(batch["features"], batch["label"])


def as_tuple(batch: Batch) -> tuple[Tensor, list[KeyedJaggedTensor]]:
    return batch["label"], [batch["features"]]


def as_tensors(batch: Batch) -> Batch:
    return {"ids": batch["features"].values(), "lengths": batch["features"].lengths(), "label": batch["label"]}
