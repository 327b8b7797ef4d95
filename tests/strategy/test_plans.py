"""Fits by plans of TorchRec's functions, unchanged: they have the results of "ddp", overlapped and with TorchRec's exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.data_parallel import without_data_parallel
from lightning_freescale.embeddings.shards import kernels
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, TABLES, BagModel, Batch, bag_loader, configs
from tests.helpers.overlap_training import PLAIN, Case, continued, departures, fit_all, not_refused
from tests.helpers.recommender import tables

STEPS = 4
KINDS: dict[str, Callable[[], Any]] = {
    "row": row_wise,
    "column": lambda: column_wise(ranks=[0, 1]),
    "table_row": lambda: table_row_wise(host_index=0),
    "grid": lambda: grid_shard(host_indexes=[0]),
    "table": lambda: table_wise(rank=1),
    "data": data_parallel,
}
CLOSE = {"losses": (1e-6, 1e-7), "weights": (1e-6, 1e-6), "states": (1e-6, 1e-6)}


class Sums(BagModel):
    """Has no bags that are pooled by the mean: TorchRec divides those of shared features by other counts."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.bags = EmbeddingBagCollection(tables=[config for config in configs(TABLES) if config.pooling == SUM])
        self.over = nn.Linear(48, 1, bias=False)

    def scores(self, batch: Batch) -> Tensor:
        columns = torch.cat([self.bags(batch["bags"]).values(), self.weighted(batch["weighted"]).values()], dim=1)
        return self.net(batch["features"]) + self.over(columns.float()).squeeze(1)


def planned(module: Sums, others: str, fields: dict[str, Any], **kinds: str) -> ShardingPlan:
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


def case(others: str, optimizer: str = "adagrad", fields: Any = (), **more: Any) -> Case:
    """Return a case with a plan by kinds of sharding; ``more`` are kinds by table, and options of the Trainer."""
    make = partial(Sums, optimizer)
    kinds = {name: more.pop(name) for name in [*more] if more[name] in KINDS}
    overlap = {"plan": lambda: planned(make(), others, dict(fields), **kinds)}
    return Case(make, lambda: bag_loader(STEPS), {"max_epochs": 1, **more}, overlap, notice=None)


SEQUENCES = {"item": "row", "cat": "row"}
ALL_KINDS = {"all kinds": case("column", cat="data", brand="data", word="grid", price="data", place="table_row")}
ALONE = {
    "data": case("data", word="row"),
    "rows": case("row", "rowwise_adagrad"),
    "columns": case("column", brand="table", cat="table"),
    "table_rows": case("table_row", "rowwise_adagrad", **SEQUENCES),
    "grid": case("grid", "sgd", brand="table_row", **SEQUENCES),
}
WITH_DATA = {
    "sgd": case("data", "sgd", word="row"),
    "adam": case("data", "adam"),
    "by norm": case("data", word="row", gradient_clip_val=0.05),
    "by value": case("row", cat="data", brand="data", gradient_clip_val=0.002, gradient_clip_algorithm="value"),
    "windows": case("column", cat="data", price="data", accumulate_grad_batches=2),
    "validation": replace(case("row", cat="data", brand="data"), validation=lambda: bag_loader(2, salt=7)),
}
DDP, OVERLAPPED = "ddp_find_unused_parameters_true", {"find_unused_parameters": True}
BY_TORCHREC = {**PLAIN, **OVERLAPPED}


@pytest.mark.parametrize("cases", [ALL_KINDS, pytest.param(ALONE, marks=pytest.mark.slow)])
def test_as_under_ddp(cases: dict[str, Case]) -> None:
    results = run_distributed(fit_all, 2, cases, DDP, OVERLAPPED, BY_TORCHREC)
    for run in (run for runs in results for name in cases for run in runs[name]):
        run.threads = []  # TorchRec's exchange keeps its thread for later fits
    assert departures(cases, results, **CLOSE) == []


# -- data-parallel tables


@pytest.mark.slow
def test_data_parallel_tables_are_dense_parameters() -> None:
    assert departures(WITH_DATA, run_distributed(fit_all, 2, WITH_DATA, DDP, OVERLAPPED), **CLOSE) == []


MIXED = case("row", cat="data", brand="data", price="data", max_epochs=2)


def _continued_and_fitted_again(folder: Path) -> tuple[dict[str, list[Any]], str]:
    ways = {"ours": (OVERLAPPED, DDP), "by ddp": (DDP, OVERLAPPED)}
    runs = {name: continued(MIXED, str(folder / f"{name}.ckpt"), STEPS, *way) for name, way in ways.items()}
    module = Sums()
    again = [replace(each, make=lambda: module) for each in (MIXED, MIXED, case("row"))]
    for each in again[:2]:
        each.fit(OVERLAPPED)
    with pytest.raises(ValueError, match="already sharded by another plan") as raised:
        again[2].fit(OVERLAPPED)
    return runs, str(raised.value)


def test_checkpoints_and_later_fits_with_data_parallel_tables(tmp_path: Path) -> None:
    (runs, text), *others = run_distributed(_continued_and_fitted_again, 2, tmp_path)
    assert departures(dict.fromkeys(runs, MIXED), [runs, *(each for each, _ in others)], **CLOSE) == []
    assert "data-parallel" in text


def test_data_parallel_tables_on_the_meta_device_are_initialised() -> None:
    configs = [replace(config, init_fn=partial(nn.init.constant_, val=0.5)) for config in tables()]
    module = nn.ModuleDict({"x": EmbeddingCollection(tables=configs, device=torch.device("meta"))})
    plan = ShardingPlan({"x": {"cat": ParameterSharding("data_parallel", "dense")}})
    ((collection, _),) = without_data_parallel(find_collections(module), plan)
    assert [table.name for table in collection.tables] == ["item"]
    weights = {name: weight for name, weight in module.named_parameters() if not weight.is_meta}
    assert {name: set(weight.flatten().tolist()) for name, weight in weights.items()} == {"x.embeddings.cat.weight": {0.5}}


# -- fields of ParameterSharding


class Inspected(Sums):
    """Keeps the options of TorchRec's kernels, and the type of the results."""

    def scores(self, batch: Batch) -> Tensor:
        pooled = self.bags(batch["bags"]).values()
        made = [kernel.emb_module for kernel in kernels(self.bags)]
        self.seen = [(pooled.dtype, each.bounds_check_mode_int, each.optimizer_args.stochastic_rounding) for each in made]
        return super().scores(batch)


class Beyond(Sums):
    def scores(self, batch: Batch) -> Tensor:
        batch["bags"].values()[-1:] += 30  # of the last feature
        return super().scores(batch)


FIELDS = {
    "bounds_check_mode": BoundsCheckMode.IGNORE,
    "stochastic_rounding": False,
    "output_dtype": DataType.FP32,
    "cache_params": CacheParams(load_factor=0.5),
}
HALF = {"output_dtype": DataType.FP16}


def _inspected() -> list[Any]:
    found = []
    for fields, way in ((FIELDS, OVERLAPPED), (FIELDS, BY_TORCHREC), (HALF, BY_TORCHREC)):
        module = Inspected()
        replace(case("row", fields=fields), make=lambda module=module: module).fit(way)
        found.append(module.seen)
    return found


def test_kernels_receive_the_fields_of_a_plan() -> None:
    for overlapped, by_torchrec, half in run_distributed(_inspected, 2):
        expected = (torch.float32, BoundsCheckMode.IGNORE.value, False)
        assert set(overlapped) == set(by_torchrec) == {expected}
        assert {dtype for dtype, *_ in half} == {torch.float16}


REFUSED = {
    "output_dtype": replace(case("row", fields=HALF), error=("'item'", "'bags'", "output_dtype=FP16", "wire=")),
    "ids": replace(case("row", fields=FIELDS), make=Beyond, error=("feature 'word' has id", "num_embeddings=30")),
}


def test_fields_that_would_change_results_silently_are_refused() -> None:
    assert not_refused(2, REFUSED, OVERLAPPED) == []
