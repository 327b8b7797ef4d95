"""Fits of other people's models, unsharded under "ddp" and sharded under "freescale", and what is compared of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.embedding_choice import LARGE_EMBEDDING
from tests.helpers.recommender import trainer

DIM, LENGTH, SAMPLES, STEPS, EPOCHS = 8, 10, 8, 50, 2
ITEMS = LARGE_EMBEDDING // DIM + 1
"""The fewest rows that ``shard="auto"`` shards a table for: nothing of it is changed for these tests."""
POPULAR = 1 + torch.randperm(ITEMS - 1, generator=torch.Generator().manual_seed(7))[:120]
"""The items that occur, anywhere in the table, so that batches have rows in common; 0 is padding."""
RATES = {"sgd": 0.2, "adagrad": 0.02, "adam": 0.003}
"""Low enough that training does not amplify rounding to anything: ``rounded`` below shows what it does to it."""


class LazyAdam(torch.optim.Adam):
    """Adam that updates of tables only the rows that any rank looks up in a step; the others keep their moments.

    Not those with a gradient: where dropout takes all of a row away its gradient is zero, and its moments still move it.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, tables: Sequence[nn.Embedding | nn.EmbeddingBag]) -> None:
        super().__init__(parameters, lr=lr)
        self._looked_up = {table.weight: torch.zeros(table.num_embeddings) for table in tables}
        self._moments = {weight: (torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self._looked_up}
        self._steps = {weight: torch.zeros(()) for weight in self._looked_up}
        for table in tables:
            table.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, table: nn.Embedding | nn.EmbeddingBag, arguments: tuple[Tensor], named: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():
            ids = arguments[0] if arguments else named["input"]
            self._looked_up[table.weight][ids.unique()] = 1

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        loss = torch.enable_grad()(closure)()
        gradients = {weight: weight.grad for weight in self._looked_up}
        for weight in gradients:
            weight.grad = None  # Adam's own step leaves it alone
        super().step()
        for weight, gradient in gradients.items():
            dist.all_reduce(self._looked_up[weight], dist.ReduceOp.MAX)
            rows = self._looked_up[weight].nonzero().squeeze(1)
            self._looked_up[weight].zero_()
            if gradient is not None:
                self._update(weight, gradient, rows)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, rows: Tensor) -> None:
        whole = (weight, *self._moments[weight])
        updated, *moments = ([each[rows]] for each in whole)
        names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
        options = {name: self.defaults[name] for name in names}
        beta1, beta2 = self.defaults["betas"]
        adam(updated, [gradient[rows]], *moments, [], [self._steps[weight]], beta1=beta1, beta2=beta2, **options)
        for each, (part,) in zip(whole, (updated, *moments)):
            each[rows] = part


class Training(L.LightningModule):
    """What a user writes around a model: its loss is trained and validated, its scores are predicted.

    Attributes:
        package: the distribution that the model comes from.
        tables: the paths of the ``nn.Embedding`` and ``nn.EmbeddingBag`` modules that are sharded.
        options: what ``"ddp"`` needs to train it, and ``"freescale"`` as well.
        without_effect: parameters that the loss does not depend on, so that their gradients are rounding alone.
        rates: learning rates, by optimizer.
    """

    package: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[dict[str, Any]] = {}
    without_effect: ClassVar[tuple[str, ...]] = ()
    rates: ClassVar[dict[str, float]] = RATES

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def scores(self, batch: Any) -> Tensor:
        """Return the scores of a batch's samples."""
        raise NotImplementedError

    @staticmethod
    def batches(seed: int, count: int) -> list[Any]:
        """Return that many batches."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, batch_size=SAMPLES)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val"].item())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scores(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams["optimizer"]
        if optimizer == "lazy adam":
            return LazyAdam(self.parameters(), self.rates["adam"], [self.get_submodule(path) for path in self.tables])
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
        return kinds[optimizer](self.parameters(), lr=self.rates[optimizer])


def sequences(seed: int, count: int) -> list[dict[str, Tensor]]:
    """Return batches of histories, padded behind, with a positive and a negative item for each position, and lengths.

    Positives are among the first two thirds of the popular items and negatives among the last, so that there is something to
    learn, and no loss vanishes.
    """
    found = []
    for step in range(count):
        draw = torch.Generator().manual_seed(1000 * seed + step)
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=draw)
        there = torch.arange(LENGTH) < lengths[:, None]
        third = len(POPULAR) // 3
        drawn = {"items": (0, 3 * third), "positive": (0, 2 * third), "negative": (third, 3 * third)}
        ids = {name: POPULAR[torch.randint(*span, (SAMPLES, LENGTH), generator=draw)] * there for name, span in drawn.items()}
        found.append({**ids, "lengths": lengths})
    return found


def ranking_loss(states: Tensor, positive: Tensor, negative: Tensor, there: Tensor) -> Tensor:
    """Return the mean loss of preferring the negative rows to the positive ones, where there is an item."""
    return -nn.functional.logsigmoid((states * (positive - negative)).sum(dim=-1))[there].mean()


@dataclass
class Fit:
    """What a fit leaves behind on a rank; whole weights on rank 0 alone."""

    losses: list[float]
    weights: dict[str, Tensor]
    mispredicted: float = 0.0
    unpredicted: float = 0.0


def strategies(kind: type[Training], shard: Any = "auto") -> list[DDPStrategy]:
    """The two that are compared."""
    return [DDPStrategy(**kind.options), FreeScaleStrategy(shard=shard, **kind.options)]


def fit_both(kind: type[Training], optimizer: str, shard: Any = "auto") -> list[Fit]:
    """Fit on this rank of ``run_distributed``: under "ddp", with Adam the lazy one, and under "freescale"."""
    reference = "lazy adam" if optimizer == "adam" else optimizer
    return [fit(kind, each, strategy) for each, strategy in zip((reference, optimizer), strategies(kind, shard))]


def fit(kind: type[Training], optimizer: str, strategy: DDPStrategy, rounding: float = 0.0) -> Fit:
    """Fit on this rank of ``run_distributed``; every weight begins by the relative error ``rounding`` beside its own."""
    torch.manual_seed(0)
    module = kind(optimizer)
    if rounding:
        draw = torch.Generator().manual_seed(1)
        for weight in module.parameters():
            weight.data *= 1 + rounding * torch.randn(weight.shape, generator=draw).sign()
    fitting = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    fitting.fit(module, loader(kind, STEPS))
    weights = fitting._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    report = getattr(strategy, "overlap_report", None)
    told = {} if report is None else {"mispredicted": report.mispredicted_lookups, "unpredicted": report.unpredicted_lookups}
    return Fit(module.losses, weights if fitting.is_global_zero else {}, **told)


def loader(kind: type[Training], count: int, seed: int = 0) -> DataLoader:
    """This rank's batches.

    With a generator: else a DataLoader draws from the global state when an epoch begins, and in a run that resumes there it has
    done so before that state is restored, so that dropout is another.
    """
    batches = kind.batches(10 * seed + int(os.environ["RANK"]), count)
    return DataLoader(batches, batch_size=None, generator=torch.Generator())


def largest_difference(fits: list[list[Fit]]) -> float:
    """Return the largest relative difference of any loss of any rank."""
    pairs = [pair for ddp, mine in fits for pair in zip(ddp.losses, mine.losses, strict=True)]
    return max(abs(mine - expected) / abs(expected) for expected, mine in pairs)


@dataclass
class WholeRun:
    """What a run of all stages leaves behind on a rank.

    Attributes:
        losses: of all epochs.
        validated: the metric after each epoch.
        resumed: losses of a fit that began from the checkpoint after the first epoch.
        predicted: by the Trainer after training.
        loaded: predicted by the plain module, loaded from the last checkpoint.
    """

    losses: list[float]
    validated: list[float]
    resumed: list[float]
    predicted: list[Tensor]
    loaded: list[Tensor]


def run_both(kind: type[Training], optimizer: str, folder: Path) -> list[WholeRun]:
    """Train, validate, resume, predict and load on this rank of ``run_distributed``, under both strategies."""
    return [_whole_run(kind, optimizer, which, folder / str(which)) for which in (0, 1)]


def _whole_run(kind: type[Training], optimizer: str, which: int, folder: Path) -> WholeRun:
    def all_stages(**options: Any) -> L.Trainer:
        return trainer(
            strategy=strategies(kind)[which],
            devices=int(os.environ["WORLD_SIZE"]),
            max_epochs=EPOCHS,
            num_sanity_val_steps=0,
            **options,
        )

    train, validate = loader(kind, STEPS // EPOCHS), loader(kind, 3, seed=1)
    torch.manual_seed(0)
    module = kind(optimizer)
    keeper = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    fitting = all_stages(callbacks=[keeper], enable_checkpointing=True)
    fitting.fit(module, train, validate)
    predicted = fitting.predict(module, validate)
    torch.manual_seed(1)
    again = kind(optimizer)
    all_stages().fit(again, train, validate, ckpt_path=folder / "epoch=0.ckpt")
    plain = kind.load_from_checkpoint(folder / f"epoch={EPOCHS - 1}.ckpt", map_location="cpu").eval()
    with torch.no_grad():
        loaded = [plain.scores(batch) for batch in validate]
    return WholeRun(module.losses, module.validated, again.losses, predicted, loaded)
