"""Modules of TorchRec around collections, subclasses of collections and plain bags, and the features of fits with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_inference_model
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import DefaultMetricsConfig
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection

from lightning_freescale.embeddings.collection_kinds import LARGE_EMBEDDING
from tests.helpers.bags import SUM, BagModel, configs, jagged
from tests.helpers.overlap_training import EPOCHS, PLAIN, STEPS, Case, CountingModel, Run
from tests.helpers.recommender import RankBatches, tables
from tests.helpers.torchrec_features import DDP, Feature

LONGEST = 3
"""The largest number of ids in a bag."""


def bags(*names: str, rows: int = 20, kind: Any = EmbeddingBagCollection, **options: Any) -> Any:
    """Return a collection of tables of 4 columns, one for each of the first features."""
    named = zip(names, ("price", "place"))
    return kind(tables=configs({name: (rows, 4, [feature], SUM) for name, feature in named}), **options)


class Own(EmbeddingBagCollection):
    """Changes only how it is built."""

    def __init__(self, name: str) -> None:
        super().__init__(tables=configs({name: (20, 4, ["price"], SUM)}))
        self.width = 4


class Doubled(EmbeddingCollection):
    """Computes something else than its base class, but its tables are embeddings like others."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return {name: 2 * found.values() for name, found in super().forward(features).items()}


class DoubledBags(EmbeddingBagCollection):
    """Computes something else than its base class."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return 2 * super().forward(features).values()


class Values(nn.Module):
    """The interaction of a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, found: Any) -> Tensor:
        return self.linear(found.values())


def _tower(name: str) -> EmbeddingTower:
    return EmbeddingTower(bags(name), Values())


_POSITIONS = {"price": LONGEST, "place": LONGEST}
_LARGE = {"rows": LARGE_EMBEDDING // 4}
PARTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "processed": (
        lambda: FeatureProcessedEmbeddingBagCollection(
            bags("near", "far", is_weighted=True), PositionWeightedModuleCollection(_POSITIONS)
        ),
        8,
    ),
    "one": (
        lambda: FeatureProcessedEmbeddingBagCollection(
            bags("again", is_weighted=True), {"price": PositionWeightedModule(LONGEST)}
        ),
        4,
    ),
    "tower": (lambda: _tower("high"), 4),
    "towers": (lambda: EmbeddingTowerCollection([_tower("left"), _tower("right")]), 8),
    "own": (lambda: Own("own"), 4),
    "doubled": (lambda: bags("two", kind=DoubledBags, **_LARGE), 4),
    "pruned": (lambda: ITEPEmbeddingBagCollection(bags("few", **_LARGE), nn.Module()), 4),
    "fused": (
        lambda: bags("fused", kind=FusedEmbeddingBagCollection, optimizer_type=torch.optim.SGD, optimizer_kwargs={}, **_LARGE),
        4,
    ),
}
"""Functions that build a module around collections, or a subclass, and the number of columns of its results."""


class Around(CountingModel):
    """Pools bags by some of :data:`PARTS`."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.parts = parts
        for name in parts:
            self.add_module(name, PARTS[name][0]())
        self.over = nn.Linear(sum(PARTS[name][1] for name in parts), 1, bias=False)

    def scores(self, batch: dict[str, Any]) -> Tensor:
        assert "own" not in self.parts or self.own.width == 4
        found = [getattr(self, name)(batch["bags"]) for name in self.parts]
        hidden = torch.cat([each if isinstance(each, Tensor) else each.values() for each in found], dim=1)
        return self.net(batch["features"]) + self.over(torch.tanh(hidden)).squeeze(1)

    training_step, configure_optimizers = BagModel.training_step, BagModel.configure_optimizers


def around_loader() -> DataLoader:
    """Return this rank's batches for :class:`Around`."""
    rank = int(os.environ["RANK"])
    batches = enumerate(RankBatches(rank, STEPS, 5).batches, 1000 * rank)
    draws = [(batch, torch.Generator().manual_seed(seed)) for seed, batch in batches]
    return DataLoader([{**batch, "bags": jagged([*_POSITIONS], 5, draw, longest=LONGEST)} for batch, draw in draws], None)


def around(*parts: str, **more: Any) -> Case:
    """Return a case with some of :data:`PARTS`."""
    return Case(partial(Around, *parts), around_loader, notice=None, **more)


class Served(Case):
    """Compares the results of the plain module, with the weights of the fit, with those of its quantized tables."""

    def fit(self, way: Any) -> Run:
        run, model = super().fit(way), self.make()
        if dist.get_rank():
            return Run([0.0, 1.0])
        model.load_state_dict(run.weights)
        served, (batch, *_) = _Bags(model).eval(), around_loader()
        found = (served if way == DDP else quantize_inference_model(served))(batch["bags"])
        assert way == DDP or all(type(each).__module__.startswith("torchrec.quant.") for each in served.holder.children())
        return Run(found.flatten().tolist())


class _Bags(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.holder.tower, self.holder.processed = model.tower.embedding, model.processed

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.cat([self.holder.tower(features).values(), self.holder.processed(features).values()], dim=1)


class Metered(Around):
    """Updates metrics of TorchRec in each step."""

    def __init__(self) -> None:
        super().__init__("own")
        ranks = {"world_size": int(os.environ["WORLD_SIZE"]), "my_rank": int(os.environ["RANK"])}
        options: Any = {"batch_size": 5, "state_metrics_mapping": {}, "device": torch.device("cpu"), **ranks}
        self.metrics = generate_metric_module(RecMetricModule, metrics_config=DefaultMetricsConfig, **options)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        scores = self.scores(batch)
        values = {"prediction": scores.detach().sigmoid(), "label": batch["label"].round(), "weight": torch.ones_like(scores)}
        self.metrics.update({name: each.double().detach() for name, each in values.items()})
        loss = nn.functional.mse_loss(scores, batch["label"])
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        super().on_train_end()
        self.losses += [float(state.sum()) for state in self.metrics.state_dict().values()]


# -- plain bags

ROWS, DIM, SAMPLES = 40, 6, 4
SHARD = {"shard": ["sums", "means", "fixed", "weighted", "late", "most", "doubled.embeddings.cat"]}


class Bags(CountingModel):
    """Pools rows in all ways. Two modules share a weight, and one is frozen."""

    kind = nn.Identity

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.twice = twice
        self.sums = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.means = nn.EmbeddingBag(ROWS, DIM, include_last_offset=True)
        self.fixed = nn.EmbeddingBag(ROWS, DIM)
        self.weighted, self.again = (nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(2))
        self.again.weight = self.weighted.weight
        self.late = nn.EmbeddingBag.from_pretrained(torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM))
        self.most = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.doubled = Doubled(tables=tables()[1:])
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, ROWS))
        self.over = nn.Linear((6 + twice) * DIM + 8, 1, bias=False)

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        ids, offsets = batch["ids"], batch["offsets"]
        found = [
            self.sums(ids, offsets[:-1]),
            self.means(input=ids, offsets=offsets),
            self.fixed(batch["fixed"]),
            self.weighted(ids, offsets[:-1], per_sample_weights=self.factors[ids]),
            self.late(batch["fixed"].int()),
            self.most(ids, offsets[:-1]),
            self.doubled(batch["features"])["category"],
        ]
        if self.twice:
            found.append(self.again(batch["fixed"], per_sample_weights=self.factors[batch["fixed"]]))
        return self.over(torch.tanh(torch.cat(found, dim=1))).squeeze(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.scores(batch), batch["label"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05, eps=1e-2)


def plain_bag_loader() -> DataLoader:
    """Return this rank's batches for :class:`Bags`."""
    batches, draw = [], torch.Generator().manual_seed(100 + int(os.environ["RANK"]))
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (SAMPLES,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids, fixed = (torch.randint(0, ROWS, shape, generator=draw) for shape in ((int(lengths.sum()),), (SAMPLES, 3)))
        kinds, ones = torch.randint(0, 13, (SAMPLES,), generator=draw), torch.ones(SAMPLES, dtype=torch.int64)
        features = KeyedJaggedTensor(["category"], kinds, lengths=ones)
        label = torch.rand(SAMPLES, generator=draw)
        batches.append({"ids": ids, "offsets": offsets, "fixed": fixed, "features": features, "label": label})
    return DataLoader(batches, batch_size=None)


class Padded(Bags):
    """Has a bag that leaves out an id."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3)


PLAIN_BAGS = Case(Bags, plain_bag_loader, {"max_epochs": EPOCHS}, notice=None)
ONCE = replace(PLAIN_BAGS, make=partial(Bags, twice=False))
"""TorchRec updates a table once per lookup."""


# -- features of modules


def _refused(part: str, *error: str) -> Feature:
    named = f"'{part}' is", f"{LARGE_EMBEDDING} values", "cannot be sharded", "EmbeddingBagCollection itself"
    return Feature(around(part, error=(*named, *error)), [{}])


MODULE_FEATURES: dict[str, Feature] = {
    "feature processors": Feature(around("processed", "one"), [{}]),
    "feature processors, TorchRec's exchange": Feature(
        around("processed", error=("'processed._embedding_bag_collection'", "need a gradient", "overlap='torchrec'")), [PLAIN]
    ),
    "towers": Feature(around("tower", "towers"), [{}, PLAIN]),
    "subclass with its own __init__": Feature(around("own"), [{}, PLAIN]),
    "subclass with its own forward": _refused("doubled", "['forward']", "shard=['doubled.embedding_bags.two']"),
    "pruned collection": _refused("pruned"),
    "fused collection": _refused("fused"),
    "nn.EmbeddingBag": Feature(PLAIN_BAGS, [SHARD]),
    "nn.EmbeddingBag, TorchRec's exchange": Feature(ONCE, [{**SHARD, **PLAIN}]),
    "nn.EmbeddingBag with padding_idx": Feature(replace(PLAIN_BAGS, make=Padded, error=("'sums'", "padding_idx=3")), [SHARD]),
    "quantized tables": Feature(
        Served(partial(Around, "tower", "processed"), around_loader, notice=None), [{}], close={"losses": (0.0, 4e-3)}
    ),
    "RecMetricModule.update": Feature(Case(Metered, around_loader, notice=None), [{}]),
}
