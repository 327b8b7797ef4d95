"""Sharded collections in TorchRec's lookups, and the order of rows."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
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

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.testing import run_distributed

FEATURES, OTHER_ORDER = ["a", "b", "shared"], ["shared", "other", "a", "b"]
TABLES = {"first": (50, 8, ["a"]), "second": (31, 4, ["b", "shared"]), "third": (67, 16, ["shared"]), "whole": (20, 8, ["b"])}
KINDS = {"first": row_wise(), "second": row_wise(), "third": row_wise(), "whole": table_wise(rank=1)}
SGD = TableOptimizer(torch.optim.SGD, {"lr": 1.0}, group=0)
IN_BLOCKS = patch.object(RowOrder, "hashed", RowOrder)
"""Row-wise tables keep the order of their ids in this context."""


class Module(nn.Module):
    """A module whose features look up one or two tables of different sizes; bags have several widths."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if pooled else (EmbeddingCollection, EmbeddingConfig)
        configs = [
            config(name=name, num_embeddings=rows, embedding_dim=dim if pooled else 8, feature_names=features)
            for name, (rows, dim, features) in TABLES.items()
        ]
        self.tables = kind(tables=configs, **{} if pooled else {"need_indices": True})

    def weights(self) -> dict[str, nn.Parameter]:
        held = getattr(self.tables, "embeddings", None) or self.tables.embedding_bags
        return {name: held[name].weight for name in TABLES}


def shard(module: Module, kinds: dict[str, Any], pooled: bool) -> ShardedTables:
    sharder = EmbeddingBagCollectionSharder() if pooled else EmbeddingCollectionSharder()
    world = dist.get_world_size()
    sizes = {"local_size": world, "world_size": world, "device_type": "cpu"}
    plan = construct_module_sharding_plan(module.tables, {name: kinds[name] for name in TABLES}, sharder=sharder, **sizes)
    for each in plan.values():
        each.compute_kernel = "fused"
    sharding = TableSharding(module, torch.device("cpu"))
    return sharding.shard(
        group=dist.new_group(),
        local_world_size=world,
        plan=ShardingPlan({"tables": plan}),
        optimizers=dict.fromkeys(sharding.parameters, SGD),
    )


def ids_of(dtype: torch.dtype, order: list[str]) -> KeyedJaggedTensor:
    """Return ids that differ between ranks; some features have no ids in a sample."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    lengths = {name: torch.randint(0, 4, (3,), generator=draw) for name in order}
    counts = {name: int(length.sum()) for name, length in lengths.items()}
    rows = {"a": 50, "b": 20, "shared": 31, "other": 5}
    values = [torch.randint(0, rows[name], (counts[name],), generator=draw).to(dtype) for name in order]
    return KeyedJaggedTensor(order, torch.cat(values), lengths=torch.cat([lengths[name] for name in order]))


def _parts(found: Any, pooled: bool) -> dict[str, Tensor]:
    if pooled:
        return {" ".join(found.keys()): found.values()}
    parts = {name: (each.values(), each.lengths(), each.weights()) for name, each in found.items()}
    return {f"{kind} of {name}": part for name, of in parts.items() for kind, part in zip(("rows", "lengths", "ids"), of)}


def _lookup(pooled: bool, dtype: torch.dtype, order: list[str], overlap: bool) -> list[str]:
    """Return the differences to the plain module in a lookup and in the update after it."""
    torch.manual_seed(0)
    plain = Module(pooled)
    model = copy.deepcopy(plain)
    tables = shard(model, KINDS, pooled)
    engine = OverlapEngine(tables, dedup=False) if overlap else None
    ids = ids_of(dtype, order)
    before = ids.values().clone()
    if engine is not None:
        engine.begin_step({})
    expected, found = (_parts(module.tables(ids), pooled) for module in (plain, model))
    for parts in (expected, found):
        rows = [part for part in parts.values() if part.requires_grad]
        sum((row * torch.linspace(1, 2, row.numel()).view_as(row)).sum() for row in rows).backward()
    if engine is not None:
        engine.end_backward()
        engine.drain()
        engine.close()
    for weight in plain.weights().values():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(gradient)
        weight.data -= gradient / dist.get_world_size()
    expected |= {f"table {each.table.name}": plain.weights()[each.table.name][each.ids] for each in tables.shards()}
    found |= {f"table {each.table.name}": each.weight for each in tables.shards()}
    wrong = [name for name, part in expected.items() if not torch.allclose(found[name], part, rtol=1e-5, atol=1e-6)]
    held = {each.table.name: each.ids.tolist() for each in tables.shards()}
    blocks = [name for name in held.keys() - {"whole"} if held[name] == list(range(min(held[name]), max(held[name]) + 1))]
    wrong += [f"{name} is a block of rows" for name in blocks] + ["whole"] * (("whole" in held) != (dist.get_rank() == 1))
    return wrong + ["ids of the caller"] * (not torch.equal(before, ids.values()))


LOOKUPS = {
    "sequences": (False, torch.int64, FEATURES, False),
    "sequences, 32 bits": (False, torch.int32, OTHER_ORDER, False),
    "sequences, overlapped": (False, torch.int32, OTHER_ORDER, True),
    "bags": (True, torch.int64, OTHER_ORDER, False),
    "bags, 32 bits": (True, torch.int32, FEATURES, False),
}


def _lookups() -> dict[str, list[str]]:
    return {name: _lookup(*case) for name, case in LOOKUPS.items()}


def test_lookups_and_updates_are_those_of_the_plain_module() -> None:
    assert run_distributed(_lookups, 2) == [{name: [] for name in LOOKUPS}] * 2


def _loaded(pooled: bool) -> list[str]:
    """Return the modules into which a plain state dict does not load correctly."""
    model, other = Module(pooled), Module(pooled)
    tables = shard(model, {**KINDS, "first": column_wise(ranks=[1, 1])} if pooled else KINDS, pooled)
    with torch.no_grad():
        for weight in other.weights().values():
            weight.copy_(torch.arange(float(weight.numel())).view(weight.shape))
    given = other.state_dict()
    kept = {name: value.clone() for name, value in given.items()}
    model.load_state_dict(given, strict=True)
    assert all(torch.equal(given[name], kept[name]) for name in kept), "it is the caller's"
    model.load_state_dict(model.state_dict())  # TorchRec's own shards go where they came from
    return [table.name for table in tables.tables if not torch.equal(tables.full_weight(table.key), kept[table.key])]


def _loaded_in_all_ways() -> list[list[str]]:
    with IN_BLOCKS:
        in_blocks = _loaded(False)
    return [_loaded(False), _loaded(True), in_blocks]


def test_a_plain_state_dict_loads_into_the_sharded_module() -> None:
    assert run_distributed(_loaded_in_all_ways, 2) == [[[], [], []]] * 2


class Draws(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not args[0].is_meta:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def _initial(meta: bool) -> tuple[list[str], float]:
    """Return the tables that differ from those of rank 0, and the number of random values drawn for each value of a shard."""
    torch.manual_seed(0)
    module = Module(pooled=False)
    expected = {name: weight.detach().clone() for name, weight in module.weights().items()}
    first = module.weights()["first"]
    first.data = torch.cat([torch.zeros(1), first.detach().flatten()])[1:].view(first.shape)  # as vector_to_parameters does
    if dist.get_rank():
        with torch.no_grad():
            first.uniform_()
            module.weights()["second"][19, [1, 3]] *= -1.0  # rank 1 owns this row
            module.weights()["third"].copy_(expected["third"].roll(1, dims=0))
    with Draws() as draws:
        tables = shard(module.to("meta") if meta else module, KINDS, pooled=False)
    drawn = draws.count / sum(each.weight.numel() for each in tables.shards())
    return [t.name for t in tables.tables if not torch.equal(tables.full_weight(t.key), expected[t.name])], drawn


def test_initial_values_are_those_of_the_first_rank_and_drawn_only_for_tables_without_values() -> None:
    assert run_distributed(_initial, 2, False) == [([], 0.0)] * 2
    assert run_distributed(_initial, 2, True) == [([*TABLES], 3.0)] * 2, "fits from the same seed would get other tables"


def _held(kinds: dict[str, Any]) -> list[dict[str, list[int]]]:
    def held() -> dict[str, list[int]]:
        return {each.table.name: each.ids.tolist() for each in shard(Module(pooled=True), kinds, True).shards()}

    with IN_BLOCKS:
        in_blocks = held()
    return [held(), in_blocks]


def test_other_shardings_stay_as_they_are() -> None:
    others = {"first": column_wise(ranks=[0, 1]), "second": table_row_wise(host_index=0), "third": row_wise()}
    for hashed, blocks in run_distributed(_held, 2, {**others, "whole": table_wise(rank=0)}):
        assert hashed.pop("third") != blocks.pop("third") and hashed == blocks
    ((hashed, _),) = run_distributed(_held, 1, {**KINDS, "whole": table_wise(rank=0)})
    assert hashed == {name: list(range(rows)) for name, (rows, *_) in TABLES.items()}, "one rank has all rows in order"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 30, 64, 97, 1000, 30030, 65536])
def test_every_row_has_a_position_of_its_own(rows: int) -> None:
    order, ids = RowOrder.hashed(rows), torch.arange(rows)
    positions = order.positions(ids)
    assert torch.equal(positions.sort().values, ids)
    assert torch.equal(order.ids(0, rows)[positions], ids)
    assert torch.equal(order.ids(rows // 3, rows), order.ids(0, rows)[rows // 3 :])


@pytest.mark.parametrize(("rows", "owners"), [(1000, 8), (65536, 2), (5_000_000, 64), (2**31 - 1, 64)])
def test_any_run_of_ids_is_spread_evenly(rows: int, owners: int) -> None:
    order, block = RowOrder.hashed(rows), -(-rows // owners)
    for first in (0, rows // 7, rows // 2):
        for count in (owners, 10 * owners):
            ids = torch.arange(first, first + count).clamp(max=rows - 1)
            held = torch.bincount(order.positions(ids) // block, minlength=owners)
            assert held.max() <= count // owners + 3


def test_it_is_a_function_of_the_number_of_rows_and_does_not_overflow() -> None:
    """Check fixed values, because checkpoints of a window and other versions depend on them."""
    assert RowOrder.hashed(5_000_000) == RowOrder(5_000_000, 3_090_171, 4_715_853)
    rows = 3_037_000_499
    order = RowOrder.hashed(rows)
    for at in (0, 1, rows // 2, rows - 2, rows - 1):
        expected = (at * order.multiplier + order.offset) % rows
        assert int(order.positions(torch.tensor([at]))) == expected
        assert int(order.ids(expected, expected + 1)) == at
    assert RowOrder.hashed(rows + 1).by_id
    order, ids = RowOrder.hashed(2**31 - 1), torch.tensor([0, 1, 2**31 - 2])
    assert torch.equal(order.positions(ids.int()), order.positions(ids))


@pytest.mark.parametrize("order", [RowOrder(10), RowOrder.hashed(10)])
def test_parts_are_read_and_written_in_the_order_of_ids(order: RowOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_freescale.embeddings.row_order._ROWS_AT_ONCE", 2)
    whole = torch.arange(20.0).view(10, 2)
    again, states, sums = torch.zeros(10, 2), torch.zeros(10, 1), whole.sum(dim=1, keepdim=True)
    for start, stop in ((0, 4), (4, 9), (9, 10)):
        part, per_row = torch.zeros(stop - start, 2), torch.zeros(stop - start)
        order.read(whole, start, part)
        assert torch.equal(part, whole[order.ids(start, stop)])
        order.write(part, start, again)
        order.read(sums, start, per_row)  # a state of a row has no columns where it is kept
        order.write(per_row, start, states)
    assert torch.equal(again, whole) and torch.equal(states, sums)
