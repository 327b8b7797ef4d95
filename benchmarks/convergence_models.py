"""Models of examples/, data and strategies that benchmarks/convergence.py compares.

The loss of SASRec is a softmax over all items, which uses the weight of its table. Each row therefore has a gradient in each
step, and Adam on the sharded table equals Adam without sharding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "examples")]

import demo
import lightning as L
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from hstu import CollateWithNegatives, HSTURecommender
from lightning.pytorch.strategies import DDPStrategy, Strategy
from numpy.typing import NDArray
from sasrec import PADDING, SASRec
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import HistoryDataset
from lightning_freescale.metrics import RankingMetrics, target_ranks

UNSEEN = 100
"""Items that the user has never seen, among which papers of SASRec rank the target."""
Batch = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """The settings of a training.

    Attributes:
        epochs: number of epochs, independent of validation.
        samples: histories per rank and step.
        max_length: number of last items that are kept of a history.
        model: arguments of the model.
        wire: types of rows and gradients in the messages of ``"freescale"``, as in its option.
    """

    epochs: int
    samples: int
    max_length: int
    model: dict[str, Any] = field(default_factory=dict)
    wire: str | dict[str, str] = "float32"


# -- data


class RatedHistories(HistoryDataset):
    """Adds the items that ranking leaves out to each history: ``seen``, also beyond ``max_length``, and ``unseen``, a draw."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample with both sets of items; the draw follows from the user."""
        sample, user = super().__getitem__(index), self.users[index]
        ever = self.histories.items[self.histories.offsets[user] : self.histories.offsets[user + 1]]
        others = np.setdiff1d(np.arange(self.histories.num_items), ever)
        drawn = np.random.default_rng(user).choice(others, UNSEEN)  # some of them twice, as in SASRec's own evaluation
        return {**sample, "seen": ever[: -2 if self.split == "validate" else -1], "unseen": drawn}


class SameNegatives(CollateWithNegatives):
    """Draws negatives for each step, equal on all ranks, so they do not depend on the rank of a sample."""

    def __init__(self, num_items: int, negatives: int, seed: int) -> None:
        super().__init__(num_items, negatives)
        self._seed, self._steps = seed, 0

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        """Return the batch of the example, and in evaluation the items that were seen."""
        rated = {"seen": _pairs(samples)} if "seen" in samples[0] else {}
        return {**super().__call__(samples), **rated}

    def draw(self, items: Tensor) -> Tensor:
        """Return the negatives of the next step."""
        self._steps += 1
        drawn = np.random.default_rng((self._seed, self._steps)).integers(self.num_items, size=self.negatives)
        return torch.from_numpy(drawn)


def side_by_side(samples: list[dict[str, Any]]) -> Batch:
    """Return padded ``history`` and ``target``, with items from 1 on."""
    history, target = (_padded([sample[name] for sample in samples]) for name in ("item", "target"))
    batch = {"history": history, "target": target}
    if "seen" not in samples[0]:
        return batch
    unseen = torch.from_numpy(np.stack([sample["unseen"] for sample in samples])) + 1
    return {**batch, "seen": _pairs(samples) + torch.tensor([[0], [1]]), "unseen": unseen}


def _padded(items: Sequence[NDArray[np.int64]]) -> Tensor:
    return pad_sequence([torch.from_numpy(each) + 1 for each in items], batch_first=True, padding_value=PADDING)


def _pairs(samples: list[dict[str, Any]]) -> Tensor:
    """Return the rows and columns of the items that each sample has seen, shape ``[2, seen in all]``."""
    rows = np.repeat(np.arange(len(samples)), [len(sample["seen"]) for sample in samples])
    return torch.from_numpy(np.stack([rows, np.concatenate([sample["seen"] for sample in samples])]))


MODELS = ("hstu", "sasrec")
RECIPES = {
    "ml-1m": {
        "hstu": Recipe(12, 32, 50, {"lr": 1e-3, "item_lr": 0.05}),
        "sasrec": Recipe(20, 8, 200, {"dim": 64, "lr": 2e-3, "warm_up": 400, "cool_down": 4500, "position_std": 0.05}),
    },
    "ml-latest-small": {
        "hstu": Recipe(20, 16, 100, {"lr": 1e-3, "item_lr": 0.05}),
        "sasrec": Recipe(27, 16, 100, {"dim": 64, "lr": 2e-3, "warm_up": 200}),
    },
}
"""From a few trials with seed 0, of one strategy alone; epochs are as many as there was time for."""


def recipe_of(model: str, path: Path | None) -> Recipe:
    """Return the recipe of ml-latest-small, or that of ml-1m for other data."""
    return RECIPES["ml-latest-small" if path is None else "ml-1m"][model]


# -- models


class SoftmaxSASRec(SASRec):
    """Predicts the next item among all items instead of comparing it with one negative.

    The learning rate rises over the first ``warm_up`` steps and falls over the last ``cool_down``. With the full rate from the
    start, rounding grows by a sixth in each step once the model knows which items are popular, after 100 to 200 steps.
    ``position_std`` is the size of the initial positions. If they are as large as the items, as in the example, training on
    long histories takes one epoch more.
    """

    def __init__(
        self,
        num_items: int,
        max_length: int,
        lr: float = 1e-3,
        warm_up: int = 1,
        cool_down: int = 1,
        position_std: float = 1.0,
        **model: Any,
    ) -> None:
        super().__init__(num_items, max_length, **model)
        nn.init.normal_(self.positions.weight, std=position_std)
        self.lr, self.warm_up, self.cool_down = lr, warm_up, cool_down
        self.scores = nn.ModuleDict(
            {
                name: RankingMetrics(top_k=10, prefix=f"{name}_")
                for name in (f"{stage}{among}" for stage in ("val", "test") for among in ("", f"_of_{UNSEEN}"))
            }
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy, averaged over the targets of the rank."""
        known = batch["history"] != PADDING
        predicted = self(self.items(batch["history"]), known)[known]
        return nn.functional.cross_entropy(predicted @ self.items.weight[1:].T, batch["target"][known] - 1)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Rank the held-out item among those not seen before, and among a draw of those never seen."""
        self._score("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Rank the held-out item among those not seen before, and among a draw of those never seen."""
        self._score("test", batch)

    def on_test_epoch_start(self) -> None:
        """Compute the states of all items once."""
        self.on_validation_epoch_start()

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the example with another learning rate."""
        adam = torch.optim.Adam(self.parameters(), lr=self.lr, betas=(0.9, 0.98))
        # loss curves are of the first steps of such a fit, not of a short one
        steps = self.trainer.estimated_stepping_batches if self.trainer.max_epochs != -1 else float("inf")
        rate = torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: min(1.0, (1 + step) / self.warm_up, (steps - step) / self.cool_down)
        )
        return {"optimizer": adam, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    def _score(self, stage: str, batch: Batch) -> None:
        rated, target = self.rate(batch["history"]), batch["target"][:, 0]
        some = torch.cat([target[:, None], batch["unseen"]], dim=1)
        names = (stage, f"{stage}_of_{UNSEEN}")
        masked = rated.index_put(tuple(batch["seen"]), rated.new_tensor(float("-inf")))
        self.scores[names[0]].update(target_ranks(masked, target))
        self.scores[names[1]].update(target_ranks(rated.gather(1, some), torch.zeros_like(target)))
        for name in names:
            self.log_dict(self.scores[name], on_epoch=True)


class WeighedSASRec(SoftmaxSASRec):
    """Weights its loss by the number of targets, because "ddp" takes the mean of the ranks' means."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean, times this rank's targets in units of a rank's mean."""
        mine = (batch["history"] != PADDING).sum()
        ours = mine.clone()
        dist.all_reduce(ours)
        return super().training_step(batch, batch_idx) * (mine * dist.get_world_size() / ours)


class HSTU(HSTURecommender):
    """Begins with larger rows, and ranks among the items that the user has not seen, including those before the input.

    The rows of the example begin smaller than the first steps of Adagrad, and the layer norm divides by their size. This
    amplifies rounding a thousandfold in the first twenty steps.
    """

    def __init__(self, num_items: int, std: float = 0.3, **model: Any) -> None:
        super().__init__(num_items, **model)
        nn.init.normal_(self.items.embeddings["item"].weight, std=std)

    def _rate(self, batch: Batch) -> Tensor:
        return super()._rate(batch).index_put(tuple(batch["seen"]), torch.tensor(float("-inf")))


# -- runs

PLAIN, FREESCALE, ELSEWHERE = "plain", "freescale", "elsewhere"
"""What a user has without us; our defaults; and plain once more, each step's samples on other ranks, by random costs."""


class GlobalLosses(L.Callback):
    """Records the mean loss over all targets of each step's global batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Weight the losses of the ranks, unless the module has done so."""
        weight = 1.0 if isinstance(module, WeighedSASRec) else trainer.train_dataloader.sampler.loss_weight(batch_idx)
        loss = outputs["loss"].detach().double() * weight
        dist.all_reduce(loss)
        self.losses.append(float(loss) / trainer.world_size)


def read(path: Path | None) -> dict[str, Any]:
    """Return the arguments of ``from_interactions`` for ml-latest-small, or an ``.npz`` of histories without times."""
    if path is None:
        return {"source": demo.RATINGS, **demo.COLUMNS}
    with np.load(path) as file:
        users = np.repeat(file["users"], np.diff(file["offsets"]))
        return {"source": pa.table({"user": users, "item": file["items"]}), "time": None}


def data_module(model: str, recipe: Recipe, interactions: dict[str, Any], way: str, seed: int) -> FreeScaleDataModule:
    options: dict[str, Any] = {"balance": way != PLAIN}
    if way == ELSEWHERE:
        options["cost"] = lambda lengths: np.random.default_rng(seed).random(len(lengths))
    if model == "sasrec" and way != FREESCALE:
        options["loss_reduction"] = "unweighted"  # "ddp" does not weight, so the model does
    data = FreeScaleDataModule.from_interactions(
        **interactions, max_length=recipe.max_length, batch_size=recipe.samples, seed=seed, **options
    )
    users, items = data.val_dataset.users, data.histories.num_items
    data.val_dataset = RatedHistories(data.histories, users, "validate", recipe.max_length)
    data.test_dataset = RatedHistories(data.histories, users, "test", recipe.max_length)
    data.collate_fn = SameNegatives(items, 512, seed) if model == "hstu" else side_by_side
    return data


def new_model(model: str, recipe: Recipe, num_items: int, way: str, **changed: Any) -> L.LightningModule:
    arguments = {**recipe.model, **changed}
    if model == "hstu":
        return HSTU(num_items, **arguments)
    return (SoftmaxSASRec if way == FREESCALE else WeighedSASRec)(num_items, recipe.max_length, **arguments)


def new_strategy(model: str, recipe: Recipe, way: str) -> Strategy:
    if way == FREESCALE:
        return FreeScaleStrategy(shard=["items"] if model == "sasrec" else None, wire=recipe.wire)
    return DDPStrategy() if model == "sasrec" else FreeScaleStrategy(overlap="torchrec", dedup=False)


def losses_of(model: str, recipe: Recipe, path: Path | None, way: str, seed: int, steps: int) -> list[float]:
    """Return the losses of the first steps, without dropout."""
    recorded = GlobalLosses()
    fitting = {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "callbacks": [recorded]}
    _fit(model, recipe, path, way, seed, fitting, dropout=0.0)
    return recorded.losses


def scores_of(model: str, recipe: Recipe, path: Path | None, way: str, seed: int) -> dict[str, float]:
    """Train, and return the scores for the held-out items after the last epoch."""
    trainer, module, data = _fit(model, recipe, path, way, seed, {"max_epochs": recipe.epochs, "limit_val_batches": 0})
    found = trainer.test(module, data, verbose=False)[0]
    ours = {"NDCG@10": "ndcg", "HR@10": "hit_rate", "MRR@10": "mrr"}
    among = {name: name.removeprefix("test").rpartition("_") for name in found}
    return {ours[metric] + of: float(found[name]) for name, (of, _, metric) in among.items()}


def _fit(
    model: str, recipe: Recipe, path: Path | None, way: str, seed: int, fitting: dict[str, Any], **changed: Any
) -> tuple[L.Trainer, L.LightningModule, FreeScaleDataModule]:
    demo.quiet()
    L.seed_everything(seed, verbose=False)
    data = data_module(model, recipe, read(path), way, seed)
    module = new_model(model, recipe, data.histories.num_items, way, **changed)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        strategy=new_strategy(model, recipe, way), accelerator="cpu", devices=2, num_sanity_val_steps=0, **quiet, **fitting
    )
    trainer.fit(module, data)
    return trainer, module, data
