"""Hashed rows in TorchRec's own lookups: each table has its positions, and the caller's ids stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from lightning_freescale.embeddings.collections import Table
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.placement import _hashed
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.testing import run_distributed

FEATURES = ["a", "b", "shared"]
TABLES = {"first": (50, ["a"]), "second": (31, ["b", "shared"]), "third": (67, ["shared"]), "whole": (20, ["b"])}
KINDS = {"first": row_wise(), "second": row_wise(), "third": row_wise(), "whole": table_wise(rank=1)}
SGD = TableOptimizer(torch.optim.SGD, {"lr": 1.0}, group=0)


class Module(nn.Module):
    """A collection whose features look up one table or two, of different sizes."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if pooled else (EmbeddingCollection, EmbeddingConfig)
        options = {} if pooled else {"need_indices": True}
        configs = [
            config(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features)
            for name, (rows, features) in TABLES.items()
        ]
        self.tables = kind(tables=configs, **options)

    def weights(self) -> dict[str, nn.Parameter]:
        """The unsharded tables by name."""
        held = getattr(self.tables, "embeddings", None) or self.tables.embedding_bags
        return {name: held[name].weight for name in TABLES}


def shard(module: Module, kinds: dict[str, Any], pooled: bool, placement: Any = "hash") -> ShardedTables:
    """Shard it as told, in place."""
    sharder = EmbeddingBagCollectionSharder() if pooled else EmbeddingCollectionSharder()
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module.tables,
        {name: kinds[name] for name in TABLES},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    for each in plan.values():
        each.compute_kernel = "fused"
    sharding = TableSharding(module, torch.device("cpu"))
    return sharding.shard(
        group=dist.new_group(),
        local_world_size=world,
        plan=ShardingPlan({"tables": plan}),
        optimizers=dict.fromkeys(sharding.parameters, SGD),
        placement=placement,
    )


def ids_of(dtype: torch.dtype, order: list[str]) -> KeyedJaggedTensor:
    """Other ids on every rank; some features have none in a sample."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    lengths = {name: torch.randint(0, 4, (3,), generator=draw) for name in order}
    counts = {name: int(length.sum()) for name, length in lengths.items()}
    rows = {"a": 50, "b": 20, "shared": 31, "other": 5}
    values = [torch.randint(0, rows[name], (counts[name],), generator=draw).to(dtype) for name in order]
    return KeyedJaggedTensor(order, torch.cat(values), lengths=torch.cat([lengths[name] for name in order]))


def _lookup(pooled: bool, dtype: torch.dtype, order: list[str], overlap: bool) -> tuple[Any, Any, Any, Any, bool]:
    torch.manual_seed(0)
    plain = Module(pooled)
    model = copy.deepcopy(plain)
    tables = shard(model, KINDS, pooled)
    engine = OverlapEngine(tables, dedup=False) if overlap else None
    ids = ids_of(dtype, order)
    before = ids.values().clone()
    if engine is not None:
        engine.begin_step({})
    expected, found = plain.tables(ids), model.tables(ids)
    _weighed(expected).backward()
    _weighed(found).backward()
    if engine is not None:
        engine.end_backward()
        engine.drain()
        engine.close()
    for weight in plain.weights().values():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(gradient)
        weight.data -= gradient / dist.get_world_size()
    rows = [(shard.weight.clone(), plain.weights()[shard.table.name][shard.ids].detach()) for shard in tables.shards()]
    held = {shard.table.name: shard.ids.tolist() for shard in tables.shards()}
    return _as_plain(expected), _as_plain(found), rows, held, torch.equal(before, ids.values())


def _weighed(found: Any) -> torch.Tensor:
    values = [each.values() if isinstance(each, JaggedTensor) else each for each in _parts(found)]
    return sum((value * (index + 1)).sum() for index, value in enumerate(values))


def _parts(found: Any) -> list[Any]:
    found = found if isinstance(found, dict) else found.to_dict()
    return [found[name] for name in sorted(found)]


def _as_plain(found: Any) -> list[Any]:
    return [
        (each.values().detach(), each.lengths(), each.weights()) if isinstance(each, JaggedTensor) else (each.detach(),)
        for each in _parts(found)
    ]


@pytest.mark.parametrize(
    ("pooled", "dtype", "order", "overlap"),
    [
        (False, torch.int64, FEATURES, False),
        (False, torch.int32, ["shared", "other", "a", "b"], False),
        (False, torch.int32, ["shared", "other", "a", "b"], True),
        (True, torch.int64, ["shared", "other", "a", "b"], False),
        pytest.param(True, torch.int32, FEATURES, False, marks=pytest.mark.slow),
        pytest.param(False, torch.int64, FEATURES, True, marks=pytest.mark.slow),
    ],
)
def test_lookups_and_updates_are_those_of_the_plain_module(
    pooled: bool, dtype: torch.dtype, order: list[str], overlap: bool
) -> None:
    for rank, (expected, found, rows, held, untouched) in enumerate(run_distributed(_lookup, 2, pooled, dtype, order, overlap)):
        assert untouched, "the ids are the caller's"
        for one, other in zip(found, expected):
            for mine, wanted in zip(one, other):
                if mine.is_floating_point():
                    torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)
                else:
                    assert torch.equal(mine, wanted), "lengths, and the ids that the user gave"
        for mine, wanted in rows:
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
        assert ("whole" in held) == (rank == 1)
        for name in ("first", "second", "third"):
            block = list(range(min(held[name]), min(held[name]) + len(held[name])))
            assert held[name] != block, "not a block of rows"


def _loaded(pooled: bool, placement: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    model, other = Module(pooled), Module(pooled)
    tables = shard(model, {**KINDS, "first": column_wise(ranks=[1, 1])} if pooled else KINDS, pooled, placement)
    with torch.no_grad():
        for weight in other.weights().values():
            weight.copy_(torch.arange(float(weight.numel())).view(weight.shape))
    given = other.state_dict()
    kept = {name: value.clone() for name, value in given.items()}
    model.load_state_dict(given, strict=True)
    assert all(torch.equal(given[name], kept[name]) for name in kept), "it is the caller's"
    model.load_state_dict(model.state_dict())  # TorchRec's own shards go where they came from
    return [(tables.full_weight(table.key), kept[table.key]) for table in tables.tables]


@pytest.mark.parametrize(("pooled", "placement"), [(False, "hash"), (True, "hash"), (False, "blocks")])
def test_a_plain_state_dict_loads_into_the_sharded_module(pooled: bool, placement: str) -> None:
    for loaded in run_distributed(_loaded, 2, pooled, placement):
        for found, expected in loaded:
            assert torch.equal(found, expected)


def _held(kinds: dict[str, Any], placement: str) -> dict[str, list[int]]:
    tables = shard(Module(pooled=True), kinds, True, placement)
    return {shard.table.name: shard.ids.tolist() for shard in tables.shards()}


def test_other_shardings_stay_as_they_are() -> None:
    others = {
        "first": column_wise(ranks=[0, 1]),
        "second": table_row_wise(host_index=0),
        "third": row_wise(),
        "whole": table_wise(rank=0),
    }
    kept, again = run_distributed(_held, 2, others, "hash"), run_distributed(_held, 2, others, "blocks")
    for mine, blocks in zip(kept, again):
        assert mine.pop("third") != blocks.pop("third") and mine == blocks


def test_a_table_that_is_too_large_is_named() -> None:
    table = Table("huge", "huge.weight", 2**32, 8, ("a",), nn.init.zeros_)
    with pytest.raises(ValueError, match=r"table 'huge': a table of 4294967296 rows is too large.*pass placement='blocks'"):
        _hashed(table)


def test_one_rank_has_all_rows_in_order() -> None:
    (held,) = run_distributed(_held, 1, {**KINDS, "whole": table_wise(rank=0)}, "hash")
    assert held == {name: list(range(rows)) for name, (rows, _) in TABLES.items()}
