"""The creation and the checks of sharding plans, also for a simulated GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.embeddings import planning
from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.planning import check_plan, memory_for_tables, padded_plan, row_wise_planner
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed
from tests.helpers.gpu_random_state import gpu_random_states
from tests.helpers.managed_tables import managed_collection
from tests.helpers.recommender import tables
from tests.helpers.sequences import Sequences

GIB, RANKS, DIM = 2**30, 8, 128
GPU = torch.device("cuda", 1)
ADAM = TableOptimizer(torch.optim.Adam, sparse_adam=True)
BY_ROW = TableOptimizer(RowWiseAdagrad)
FROZEN = TableOptimizer(torch.optim.SGD)


class Tables(nn.Module):
    def __init__(self, gib_per_rank: int) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="item", num_embeddings=gib_per_rank * GIB * RANKS // DIM // 4, embedding_dim=DIM, feature_names=["item"]
        )
        self.items = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.dense = nn.Linear(1000, 1000, bias=False)
        self.register_buffer("seen", torch.zeros(10))


def test_what_fits_the_gpu_is_planned_and_nothing_else() -> None:
    module = Tables(100)
    found = [collection for collection, _ in find_collections(module)]
    for memory in (141 * GIB, 80 * GIB, None):  # None: what TorchRec takes for granted
        planner = row_wise_planner(found, torch.device("cuda"), RANKS, RANKS, memory)
        if memory == 141 * GIB:
            planner.plan(module, [collection.sharder for collection in found])
        else:
            with pytest.raises(PlannerError):
                planner.plan(module, [collection.sharder for collection in found])


def _gpu_of(total_bytes: int) -> None:
    planning.torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=total_bytes)
    tensor = torch.tensor
    planning.torch.tensor = lambda value, device: tensor(value)  # no such device here


def _memory() -> list[int | None]:
    _gpu_of((80 if dist.get_rank() else 141) * GIB)
    module = Tables(1)
    return [
        memory_for_tables(module, module.items.parameters(), torch.device(kind), dist.group.WORLD) for kind in ("cuda", "cpu")
    ]


def test_the_smallest_gpu_counts_and_the_dense_part_has_its_place() -> None:
    assert run_distributed(_memory, 2) == [[80 * GIB - 5 * 4 * 1000**2 - 40, None]] * 2


def _planned(total_bytes: int) -> None:
    _gpu_of(total_bytes)
    TableSharding._shard_collection = lambda *args: (_ for _ in ()).throw(InterruptedError("planned"))
    gpu_random_states(2)
    sharding = TableSharding(Sequences(), torch.device("cpu"))
    sharding.device = GPU
    expected: Any = {10**9: InterruptedError, 20_000: PlannerError, 10**3: ValueError}[total_bytes]
    with pytest.raises(expected, match="plan=" if expected is ValueError else ""):
        sharding.shard(group=dist.group.WORLD, local_world_size=1)


@pytest.mark.parametrize("total_bytes", [10**9, 20_000, 10**3])
def test_tables_are_planned_with_the_memory_of_the_gpu(total_bytes: int) -> None:
    """Plan for three GPUs. The second has no memory for tables, and the third has no memory for the dense part."""
    run_distributed(_planned, 1, total_bytes)


def _sharded() -> tuple[dict[int, list[int]], bool]:
    states, shard_collection = gpu_random_states(2), TableSharding._shard_collection
    drawn: list[str] = []

    def draw(self: TableSharding, place: Any, *args: Any) -> Any:
        states[0] = states[1] = torch.ones(1, dtype=torch.uint8)
        drawn.append(place.collection.path)
        self.device = torch.device("cpu")  # TorchRec makes its shards here
        return shard_collection(self, place, *args)

    TableSharding._shard_collection = draw
    sharding = TableSharding(Sequences(), torch.device("cpu"))
    planner = row_wise_planner([place.collection for place in sharding._places], torch.device("cpu"), 1, 1)
    sharding.device = GPU
    sharding.shard(group=dist.group.WORLD, local_world_size=1, plan=planner)
    return {index: state.tolist() for index, state in states.items()}, drawn == ["items", "tags"]


def test_the_rank_draws_on_its_own_gpu_what_it_would_without_sharding() -> None:
    assert run_distributed(_sharded, 1) == [({0: [1], 1: [0]}, True)]


def _table_plan(kind: str, kernel: str, *widths: int) -> Any:
    starts = [sum(widths[:index]) for index in range(len(widths))]
    shards = [SimpleNamespace(shard_offsets=[0, start], shard_sizes=[9, width]) for start, width in zip(starts, widths)]
    spec = SimpleNamespace(shards=shards)
    return SimpleNamespace(sharding_type=kind, compute_kernel=kernel, sharding_spec=spec, output_dtype=None)


@pytest.mark.parametrize(
    ("managed", "kind", "kernel", "first", "parts"),
    [
        (True, "table_wise", "fused", FROZEN, "'user'.*'table_wise'.*row_wise"),
        (True, "row_wise", "fused_uvm_caching", FROZEN, "'user'.*'fused_uvm_caching'"),
        (False, "data_parallel", "dense", FROZEN, r"'cat'.*'data_parallel'.*'dense'.*planner\.plan\("),
        (False, "row_wise", "key_value", FROZEN, "'cat'.*'x'.*'key_value'.*'fused_uvm'"),
        (False, "row_wise", "dense", FROZEN, ""),
        (False, "column_wise", "fused", ADAM, ""),
        (False, "table_row_wise", "dense", FROZEN, "'cat'.*'x'.*'table_row_wise'.*EmbeddingCollection.*column_wise"),
        (False, "table_column_wise", "fused", ADAM, "'cat'.*'x'.*'table_column_wise'.*EmbeddingCollection"),
        (False, "row_wise", "fused_uvm_caching", ADAM, ""),
        (False, "grid_shard", "fused", FROZEN, "'cat'.*'x'.*'grid_shard'.*EmbeddingCollection"),
        (False, "column_wise", "fused", BY_ROW, "'cat'.*'column_wise'.*RowWiseAdagrad"),
        (False, "column_wise", "fused_uvm_caching", FROZEN, ""),
        (False, "table_wise", "fused_uvm", ADAM, ""),
        (True, "row_wise", "fused_uvm", FROZEN, ""),
    ],
)
def test_plans_that_cannot_be_trained_are_refused(
    managed: bool, kind: str, kernel: str, first: TableOptimizer, parts: str
) -> None:
    """Check plans of the second table. ``first`` is the optimizer of the first table, or of both if it is row-wise."""
    module = nn.ModuleDict({"x": managed_collection() if managed else EmbeddingCollection(tables=tables())})
    ((collection, _),) = find_collections(module)
    one, other = collection.tables
    plan = {one.name: _table_plan("row_wise", "fused", one.dim), other.name: _table_plan(kind, kernel, other.dim)}
    optimizers = {one.key: first, other.key: first if first is BY_ROW else FROZEN}
    with pytest.raises(ValueError, match=parts) if parts else nullcontext():
        check_plan(collection, padded_plan(collection, plan), optimizers)


def test_small_tables_are_whole_or_refused() -> None:
    ((plain, module),) = find_collections(EmbeddingCollection(tables=tables()))
    planner = row_wise_planner([plain], torch.device("cpu"), 10, 10)
    plan = planner.plan(module, [plain.sharder]).plan[""]
    assert {name: each.sharding_type for name, each in plan.items()} == {"item": "row_wise", "cat": "table_wise"}
    ((managed, _),) = find_collections(nn.ModuleDict({"x": managed_collection()}))
    row_wise_planner([managed], torch.device("cpu"), 5, 5)
    with pytest.raises(ValueError, match=r"'user'.*'x'.*num_embeddings=20.*6 ranks"):
        row_wise_planner([managed], torch.device("cpu"), 6, 6)


def _weighted_means() -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="mean", num_embeddings=9, embedding_dim=8, feature_names=["f"], pooling=PoolingType.MEAN)
    return EmbeddingBagCollection(tables=[config], is_weighted=True)


def _of_width(dim: int, rows: int = 9, **options: Any) -> EmbeddingConfig:
    return EmbeddingConfig(name="item", num_embeddings=rows, embedding_dim=dim, feature_names=["item"], **options)


@pytest.mark.parametrize(
    ("dim", "widths", "optimizer", "parts"),
    [
        (12, [8, 4], FROZEN, r"'item'.*\[4, 8\]"),
        (12, [6, 6], FROZEN, r"'item'.*\[6\]"),
        (6, [4, 2], FROZEN, r"'item'.*\[2, 4\]"),
        (6, [6], BY_ROW, "'item'.*embedding_dim=6.*padded to 8.*RowWiseAdagrad"),
        (6, [6], FROZEN, ""),
        (6, [8], FROZEN, ""),
        (12, [4, 4, 4], FROZEN, ""),
    ],
)
def test_columns_that_cannot_be_trained_are_refused(dim: int, widths: list[int], optimizer: TableOptimizer, parts: str) -> None:
    ((collection, _),) = find_collections(EmbeddingCollection(tables=[_of_width(dim)]))
    given = {"item": _table_plan("column_wise" if len(widths) > 1 else "row_wise", "fused", *widths)}
    with pytest.raises(ValueError, match=parts) if parts else nullcontext():
        check_plan(collection, padded_plan(collection, given), {collection.tables[0].key: optimizer})
    assert [shard.shard_sizes[1] for shard in given["item"].sharding_spec.shards] == widths, "it is the caller's"


@pytest.mark.parametrize(
    ("rows", "owners", "parts"),
    [
        (9, [(5, 0), (4, 2)], "does not place the rows of table 'item' in equal blocks"),  # skips rank 1
        (9, [(3, 0), (6, 1)], "does not place the rows of table 'item' in equal blocks"),
        (2**31, [(2**31, 0)], "2147483648 rows of width 8 on one rank"),
        (9, [(5, 1), (4, 2)], ""),
    ],
)
def test_rows_that_the_exchange_cannot_number_are_refused(rows: int, owners: list[tuple[int, int]], parts: str) -> None:
    ((collection, _),) = find_collections(EmbeddingCollection(tables=[_of_width(8, rows)], device=torch.device("meta")))
    plan, start = _table_plan("row_wise", "fused", *[8] * len(owners)), 0
    for shard, (count, owner) in zip(plan.sharding_spec.shards, owners):
        shard.shard_offsets, shard.shard_sizes = [start, 0], [count, 8]
        shard.placement, start = SimpleNamespace(rank=lambda owner=owner: owner), start + count
    with pytest.raises(ValueError, match=parts) if parts else nullcontext():
        RowLayout.from_plan(collection, {"item": plan}, {"item": RowOrder(rows)}, 3, torch.device("cpu"))


def _collection_of(data_type: DataType) -> EmbeddingCollection:
    return EmbeddingCollection(tables=[_of_width(8, data_type=data_type)])


@pytest.mark.parametrize(
    ("make", "overlap", "parts"),
    [
        (lambda: _collection_of(DataType.INT8), True, ("'item'", "data_type=INT8", "FP32, FP16 or BF16")),
        (lambda: _collection_of(DataType.BF16), False, ("'item'", "data_type=BF16", "CPU", 'overlap="torchrec"')),
        (lambda: managed_collection([_of_width(8, data_type=DataType.BF16)]), True, ("'item'", "BF16", "managed collisions")),
        (lambda: EmbeddingCollection(tables=[_of_width(50)]), False, ("'item'", "=50", 'overlap="torchrec"', "=52")),
        (lambda: managed_collection([_of_width(6)]), True, ("'item'", "=6", "managed collisions", "=8")),
        (_weighted_means, True, ("'mean'", "pool by the sum")),
    ],
)
def test_tables_that_the_kernels_do_not_train_as_unsharded(make: Any, overlap: bool, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="table") as raised:
        TableSharding(nn.ModuleDict({"tables": make()}), torch.device("cpu"), overlap)
    assert all(part in str(raised.value) for part in parts), raised.value
