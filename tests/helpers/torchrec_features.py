"""Features of TorchRec that fits use: each fit is that of the unsharded module or of plain TorchRec, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.testing import run_distributed
from tests.helpers.bags import MEAN, TABLES, BagModel, Batch, bag_loader, configs
from tests.helpers.overlap_training import PLAIN, Case, Run, departures
from tests.helpers.recommender import tables

STEPS = 4
DDP, OVERLAPPED = "ddp_find_unused_parameters_true", {"find_unused_parameters": True}
BY_TORCHREC = {**PLAIN, **OVERLAPPED}
CLOSE: dict[str, Any] = {"losses": (1e-6, 1e-7), "weights": (1e-6, 1e-6), "states": (1e-6, 1e-6)}


@dataclass
class Feature:
    """A case whose fits in several ways are those in the way ``against``, or are refused with the parts of ``case.error``."""

    case: Case
    ways: list[dict[str, Any]] = field(default_factory=lambda: [OVERLAPPED])
    against: str | dict[str, Any] = DDP
    close: dict[str, Any] = field(default_factory=lambda: CLOSE)  # tolerances


def outcome(feature: Feature) -> str:
    """Return "equal", "refused: ..." or "different: ..." for fits on two ranks."""
    ranks = run_distributed(_fits, 2, feature)
    if refused := [fit for fit in ranks[0] if isinstance(fit, str)]:
        return f"refused: {refused[0]}" if ranks == [[refused[0]]] * 2 else f"different: {ranks}"
    found = departures({"feature": feature.case}, [{"feature": fits} for fits in ranks], **feature.close)
    return f"different: {found[0]}" if found else "equal"


def _fits(feature: Feature) -> list[Run | str]:
    try:
        fits = [feature.case.fit(way) for way in feature.ways]
    except ValueError as error:
        return [" ".join(str(error).split())]
    # TorchRec's exchange keeps its thread for later fits
    return [replace(fit, threads=[]) for fit in (feature.case.fit(feature.against), *fits)]


# -- plans


class Planned(BagModel):
    """Has bags of every kind. ``mood`` pools features by the mean that ``item`` and ``brand`` pool by the sum."""

    def __init__(self, optimizer: str = "adagrad", data_type: DataType = DataType.FP32) -> None:
        super().__init__(optimizer)
        bags = configs({**TABLES, "mood": (40, 8, ["bought", "clicked"], MEAN)})
        self.bags = EmbeddingBagCollection(tables=[replace(config, data_type=data_type) for config in bags])
        self.net.embeddings = EmbeddingCollection(tables=[replace(config, data_type=data_type) for config in tables()])
        width = sum(config.embedding_dim * len(config.feature_names) for config in bags)
        self.over = nn.Linear(width + 16, 1, bias=False)

    def scores(self, batch: Batch) -> Tensor:
        columns = torch.cat([self.bags(batch["bags"]).values(), self.weighted(batch["weighted"]).values()], dim=1)
        return self.net(batch["features"]) + self.over(columns.float()).squeeze(1)


class WeightedMeans(Planned):
    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.weighted = EmbeddingBagCollection(tables=configs({"price": (20, 8, ["price"], MEAN)}), is_weighted=True)


KINDS: dict[str, Callable[[], Any]] = {
    "row": row_wise,
    "column": lambda: column_wise(ranks=[0, 1]),
    "table_row": lambda: table_row_wise(host_index=0),
    "grid": lambda: grid_shard(host_indexes=[0]),
    "table": lambda: table_wise(rank=1),
    "data": data_parallel,
}


def planned(module: BagModel, others: str, fields: dict[str, Any], **kinds: str) -> ShardingPlan:
    """Return a plan by kinds of sharding, by table, and ``others`` for the other tables. ``fields`` are those of bags."""
    found = {}
    for path in ("net.embeddings", "bags", "weighted"):
        collection = module.get_submodule(path)
        held = collection.embeddings if path == "net.embeddings" else collection.embedding_bags
        plan = {name: KINDS[kinds.get(name, others)]() for name in held}
        found[path] = construct_module_sharding_plan(collection, plan, local_size=2, world_size=2, device_type="cpu")
    for entry in found["bags"].values():
        for name, value in fields.items():
            setattr(entry, name, value)
    return ShardingPlan(found)


def case(others: str, optimizer: str = "adagrad", fields: Any = (), make: Any = Planned, **more: Any) -> Case:
    """Return a case with a plan by kinds of sharding; ``more`` are kinds by table, and options of the Trainer."""
    build = partial(make, optimizer)
    kinds = {name: more.pop(name) for name in [*more] if more[name] in KINDS}
    overlap = {"plan": lambda: planned(build(), others, dict(fields), **kinds)}
    return Case(build, lambda: bag_loader(STEPS), {"max_epochs": 1, **more}, overlap, notice=None)


def _planners_plan() -> ShardingPlan:
    kinds = dict.fromkeys(("cat", "brand", "price"), (["data_parallel"], ["dense"]))
    others = dict.fromkeys(("item", "word", "place"), (["row_wise", "table_wise"], ["fused"]))
    constraints = {
        name: ParameterConstraints(sharding_types=types, compute_kernels=kernels)
        for name, (types, kernels) in (kinds | others).items()
    }
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.plan(Planned(), [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()])


# -- features of tables


def _variable(batch: Batch) -> Batch:
    """Let samples share bags of every second feature."""
    bags, samples = batch["bags"], len(batch["label"])
    keys, lengths = bags.keys(), bags.lengths().view(-1, samples)
    strides = [samples - index % 2 for index in range(len(keys))]
    kept = torch.cat([each[:stride] for each, stride in zip(lengths, strides)])
    ids = torch.cat([bags[key].values()[: int(bags[key].lengths()[:stride].sum())] for key, stride in zip(keys, strides)])
    samples_of = torch.stack([torch.arange(samples) % stride for stride in strides])
    variable = KeyedJaggedTensor(
        keys, ids, lengths=kept, stride_per_key_per_rank=[[stride] for stride in strides], inverse_indices=(keys, samples_of)
    )
    return {**batch, "bags": variable}


def _variable_case(optimizer: str = "adagrad", **more: Any) -> Case:
    loader = lambda: DataLoader([_variable(batch) for batch in bag_loader(STEPS)], batch_size=None)  # noqa: E731
    validation = lambda: DataLoader([_variable(batch) for batch in bag_loader(2, salt=7)], batch_size=None)  # noqa: E731
    return replace(case("table", optimizer, max_epochs=2, **more), loader=loader, validation=validation)


BOTH = [OVERLAPPED, BY_TORCHREC]
SEQUENCES = {"item": "row", "cat": "row"}
HALF = {"output_dtype": DataType.FP16}
FIELDS = {
    "bounds_check_mode": BoundsCheckMode.IGNORE,
    "stochastic_rounding": False,
    "output_dtype": DataType.FP32,
    "cache_params": CacheParams(load_factor=0.5),
}
ROUNDED: dict[str, Any] = {"losses": (5e-3, 0.0), "weights": (5e-3, 5e-3), "states": (5e-3, 5e-3)}
ONLY_BAGS = ("net.embeddings", "EmbeddingCollection only")
TABLE_FEATURES: dict[str, Feature] = {
    "row_wise": Feature(case("row", "rowwise_adagrad"), BOTH),
    "column_wise": Feature(case("column", brand="table", cat="table"), BOTH),
    "table_row_wise": Feature(case("table_row", "rowwise_adagrad", **SEQUENCES), BOTH),
    "grid_shard": Feature(case("grid", "sgd", brand="table_row", **SEQUENCES), BOTH),
    "table_row_wise of sequences": Feature(replace(case("row", item="table_row"), error=("'item'", *ONLY_BAGS))),
    "grid_shard of sequences": Feature(replace(case("row", cat="grid"), error=("'cat'", *ONLY_BAGS))),
    "column_wise, RowWiseAdagrad": Feature(replace(case("column", "rowwise_adagrad"), error=("'item'", "RowWiseAdagrad"))),
    "data_parallel, Adagrad": Feature(case("data", word="row"), BOTH),
    "data_parallel, SGD": Feature(case("data", "sgd", word="column"), BOTH),
    "data_parallel, Adam": Feature(case("data", "adam")),
    "data_parallel, clipping by norm": Feature(case("data", word="row", gradient_clip_val=0.05)),
    "data_parallel, clipping by value": Feature(
        case("row", cat="data", brand="data", gradient_clip_val=0.002, gradient_clip_algorithm="value")
    ),
    "data_parallel, accumulation": Feature(case("column", brand="table", cat="data", price="data", accumulate_grad_batches=2)),
    "data_parallel, validation": Feature(
        replace(case("row", cat="data", brand="data"), validation=lambda: bag_loader(2, salt=7))
    ),
    "data_parallel, averages": Feature(
        case("row", cat="data", brand="data", callbacks=lambda: [EMAWeightAveraging(decay=0.7, update_starting_at_step=1)])
    ),
    "weighted means, TorchRec's exchange": Feature(
        replace(case("row", make=WeightedMeans), error=("'price'", "'weighted'", "PoolingType.SUM")), [BY_TORCHREC]
    ),
    "a planner's plan": Feature(replace(case("row"), overlap={"plan": _planners_plan}), BOTH),
    "tables of FP16": Feature(
        case("row", make=partial(Planned, data_type=DataType.FP16)), [{**OVERLAPPED, "dedup": False}], BY_TORCHREC, ROUNDED
    ),
    "fields of plans": Feature(case("row", fields=FIELDS), BOTH),
    "output_dtype=FP16": Feature(replace(case("row", fields=HALF), error=("'item'", "'bags'", "output_dtype=FP16", "wire="))),
    "output_dtype=FP16, TorchRec's exchange": Feature(case("row", fields=HALF), [BY_TORCHREC], close=ROUNDED),
    "variable batch sizes": Feature(_variable_case()),
    "variable batch sizes, TorchRec's exchange": Feature(_variable_case("rowwise_adagrad"), [BY_TORCHREC]),
    "variable batch sizes, TorchRec's exchange, Adagrad": Feature(
        replace(_variable_case(), error=("'bags'", "stride_per_key_per_rank", "Adagrad", "RowWiseAdagrad")), [BY_TORCHREC]
    ),
}
