"""Fits for the tests of the overlap: what a fit leaves behind, and modules that look ids up in their own ways."""

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
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy
from tests.helpers.recommender import DIM, FEATURES, ITEMS, Recommender, fixed_loader, trainer

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


# -- modules


class OfRecords(CountingModel):
    def training_step(self, batch: Record, batch_idx: int) -> Tensor:
        return super().training_step({"features": batch.features, "label": batch.label}, batch_idx)


class OfTuples(CountingModel):
    def training_step(self, batch: tuple[Tensor, list[KeyedJaggedTensor]]) -> Tensor:
        return super().training_step({"features": batch[1][0], "label": batch[0]}, 0)


class OfTensors(CountingModel):
    """Makes the KeyedJaggedTensor of tensors that stand in the batch."""

    def ids(self, batch: Batch) -> Tensor:
        return batch["ids"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=self.ids(batch), lengths=batch["lengths"])
        return super().training_step({"features": features, "label": batch["label"]}, batch_idx)


class Computes(OfTensors):
    """Its ids stand nowhere in the batch."""

    def ids(self: OfTensors, batch: Batch) -> Tensor:
        items = int(batch["lengths"].view(3, -1)[:2].sum())
        return torch.cat([(batch["ids"][:items] * 7) % ITEMS, batch["ids"][items:]])


class RewritesThroughNumpy(OfTensors):
    """Its ids are rewritten in the batch where torch does not see it."""

    def ids(self, batch: Batch) -> Tensor:
        ids = batch["ids"].numpy()
        ids[:] = (ids + 5) % 13
        return batch["ids"]


class Draws(OfTensors):
    """Its candidates are drawn at random, and it draws after the lookup as well."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.dropout = 0.3

    def ids(self, batch: Batch) -> Tensor:
        ids, sizes = batch["ids"].clone(), batch["lengths"].view(3, -1).sum(dim=1).tolist()
        ids[sizes[0] : sizes[0] + sizes[1]] = torch.randint(0, ITEMS, (sizes[1],))
        return ids


class DrawsUnforeseen(Draws):
    """Also draws before every step, where no trial run can know of it."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.rand(3)


class TwoCollections(CountingModel):
    """The second one holds a single tiny table."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        config = EmbeddingConfig(name="tag", num_embeddings=3, embedding_dim=DIM, feature_names=["tag"])
        self.tags = EmbeddingCollection(tables=[config])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        found = self.tags(batch["tags"])["tag"].values()
        self.losses[-1] = (loss + (found.mean(dim=1) - batch["label"]).square().mean()).item()
        return loss + (found.mean(dim=1) - batch["label"]).square().mean()


def with_tags(batch: Batch) -> Batch:
    count = len(batch["label"])
    tags = KeyedJaggedTensor(keys=["tag"], values=batch["index"] % 3, lengths=torch.ones(count, dtype=torch.int32))
    return {**batch, "tags": tags}


class Schedules(CountingModel):
    """Another learning rate in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Skips(CountingModel):
    """Some steps have no loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (2, 3) else loss


class Iterates(CountingModel):
    """Takes its batches out of the loader itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss = nn.functional.mse_loss(self.net(batch["features"]), batch["label"])
        self.losses.append(loss.item())
        return loss


class OfSeveralLoaders(CountingModel):
    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        return super().training_step(batch["main"], batch_idx)


class ChangesInPlace(OfTensors):
    """Its hooks change the batch in place, and count."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.seen = 0

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.seen += 1
        batch["ids"] = batch["ids"].clone()
        batch["ids"].add_(self.seen).remainder_(13)
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch["label"].add_(0.125)
        batch["ids"].mul_(3).remainder_(13)
        return batch


class StepsAfterClosure(CountingModel):
    """Calls the closure itself, and the optimizer without it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        optimizer.step()


class CutsShort(CountingModel):
    """Its epochs end before the loader does."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class LooksUpMore(TwoCollections):
    """Looks up without gradients before and after, and one collection in some steps only."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            before = self.net(batch["features"])
        loss = super().training_step(batch, batch_idx) if batch_idx % 3 else CountingModel.training_step(self, batch, batch_idx)
        with torch.no_grad():
            after = self.net(batch["features"])
        self.losses += [float(before.sum()), float(after.sum())]
        return loss


class DiffersByRank(DrawsUnforeseen):
    """The first rank's ids stand in the batch, the second one computes them, the third one draws them unforeseen."""

    def ids(self, batch: Batch) -> Tensor:
        if self.global_rank == 0:
            return batch["ids"]
        return Computes.ids(self, batch) if self.global_rank == 1 else super().ids(batch)


class Evaluates(CountingModel):
    """Looks up between steps."""

    gradients = False

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        with torch.set_grad_enabled(self.gradients):
            self.losses.append(float(self.net(batch["features"]).sum()))


class TrainsBetween(Evaluates):
    """TorchRec would update the tables if somebody called backward."""

    gradients = True


class Freezes(CountingModel):
    """One table stays as it is."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad([p for name, p in self.named_parameters() if "item" not in name], lr=0.1)
