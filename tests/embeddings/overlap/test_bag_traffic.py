"""The bytes of rows against those of pooled bags, as TorchRec moves them; and bags pooled of rows as by it, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.bag_traffic import DECIDING_STEPS, BagBytes, BagTraffic
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.overlap.pooling import BagOutput, without_weights
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import COLUMNS, KEYS, SUM, TABLES, WEIGHTED, configs, jagged, layouts_of

DIM, ROWS = 8, 400
STEPS = DECIDING_STEPS + 5
SGD = TableOptimizer(torch.optim.SGD, {"lr": 0.5}, group=0)
TWO_LEVEL = {"exchange": "two_level", "ranks_per_node": 2}


@pytest.mark.parametrize(
    ("row_wise", "rank", "expected"), [(False, 0, [0, 3, 0, 0]), (False, 2, [6, 3, 0, 0]), (True, 1, [9, 0, 9, 9])]
)
def test_who_would_send_pooled_rows(row_wise: bool, rank: int, expected: list[int]) -> None:
    """On four ranks; the first table has two features, so the owners of whole tables are ranks 0 and 1."""
    tables = {"first": (ROWS, DIM, ["a", "b"], SUM), "second": (ROWS, DIM, ["c"], SUM)}
    _, (layout,) = layouts_of(EmbeddingBagCollection(tables=configs(tables)), 4, row_wise)
    features = KeyedJaggedTensor(["c", "unused", "a", "b"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int32))
    assert BagTraffic(layout, SimpleNamespace(rank=rank, dim=DIM), []).pooled_rows(features).tolist() == expected


def _features(ids_per_bag: int, bags: int) -> KeyedJaggedTensor:
    """Ids of a bag are different, and bags share none as long as there are rows."""
    lengths = torch.full((bags,), ids_per_bag, dtype=torch.int32)
    return KeyedJaggedTensor(["a"], torch.arange(bags * ids_per_bag) % ROWS, lengths=lengths)


def _overlapped(optimizer: TableOptimizer = SGD, **options: Any) -> tuple[Any, OverlapEngine]:
    root = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=configs({"t": (ROWS, DIM, ["a"], SUM)}))})
    sharding = TableSharding(root, torch.device("cpu"), overlap=True)
    how = dict.fromkeys(sharding.parameters, optimizer)
    tables = sharding.shard(group=dist.new_group(), local_world_size=2, optimizers=how)
    return root["bags"], OverlapEngine(tables, **options)


class Left(NamedTuple):
    """Steps in which bags were left to TorchRec, the reason, and whether they are left at the end."""

    steps: list[int]
    reason: str
    plain: bool


def _left(
    ids_per_bag: int = 100, bags: int = 4, lookups: Callable[[int], int] = lambda step: int(step > 0), **options: Any
) -> Left:
    module, engine = _overlapped(**options)
    features, steps, reason = _features(ids_per_bag, bags), [], ""
    for step in range(STEPS):
        if left := engine.leave_long_bags():
            steps.append(step)
            reason = left["bags"]
        engine.begin_step({"bags": features})
        loss = sum(module(features).values().square().sum() for _ in range(lookups(step)))
        if isinstance(loss, torch.Tensor):
            loss.backward()
        engine.end_backward()
    assert [*engine.modules, *engine.plain] == ["bags"]
    engine.drain()
    engine.close()
    return Left(steps, reason, "bags" in engine.plain)


def _restored() -> tuple[dict[str, str], bool]:
    """Adam on CPU, where a checkpoint's run on a GPU had left the bags; and whether its rows move."""
    module, engine = _overlapped(TableOptimizer(torch.optim.Adam, {"lr": 0.5}, group=0, sparse_adam=True))
    engine.bag_decisions["bags"] = "its rows are more bytes"
    before, features = engine.tables.full_weight("bags.embedding_bags.t"), _features(100, 4)
    left = engine.leave_long_bags()
    engine.begin_step()
    module(features).values().square().sum().backward()
    engine.end_backward()
    engine.drain()
    moved = not torch.equal(engine.tables.full_weight("bags.embedding_bags.t"), before)
    engine.close()
    return left, moved


def _counted_steps() -> list[int | None]:
    """Before a step, in it, after it; after the first micro-batch of the next, after its second."""
    module, engine = _overlapped()
    found = []

    def note() -> None:
        found.append(engine.bag_state()["counted"].get("bags", {}).get("steps"))

    note()
    for updates in (True, False, True):
        engine.begin_step(updates=updates)
        module(_features(2, 4)).values().sum().backward()
        if len(found) == 1:
            note()
        engine.end_backward()
        engine.drain()
        note()
    engine.close()
    return found


ON_TWO_RANKS: dict[str, Callable[[], Any]] = {
    "one id": lambda: _left(1),
    "a hundred ids": _left,
    "few different ids": lambda: _left(ROWS, 200),
    "clipped by value": lambda: _left(clip_value=0.5),
    "held": lambda: _left(hold_gradients=True),
    "looked up twice": lambda: _left(lookups=lambda step: int(step > 0) + (step == 3)),
    "on one rank": lambda: _left(lookups=lambda step: int(step > 0 and (step != 3 or dist.get_rank() == 0))),
    "a step without": lambda: _left(lookups=lambda step: int(step not in (0, 3))),
    "restored": _restored,
    "counted": _counted_steps,
}
ON_TWO_NODES: dict[str, Callable[[], Any]] = {
    "a hundred ids": lambda: _left(**TWO_LEVEL),
    "shared by a node, flat": lambda: _left(2, 200),
    "shared by a node": lambda: _left(2, 200, **TWO_LEVEL),
    "counted by another exchange": lambda: _counted_by_another(),
}


def _counted_by_another() -> list[int]:
    """The steps that are counted when two have been by the flat exchange, and by this one."""
    _, engine = _overlapped(**TWO_LEVEL)
    state = engine.bag_state()
    state["counted"]["bags"]["steps"] = 2
    steps = []
    for nodes in (1, 2):
        engine.restore_bag_state({**state, "nodes": nodes})
        steps.append(engine.bag_state()["counted"]["bags"]["steps"])
    engine.close()
    return steps


def _each(cases: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: case() for name, case in cases.items()}


def _as_rank_0(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(found == results[0] for found in results), "all ranks alike"
    return results[0]


def test_bags_are_left_to_torchrec_where_their_rows_are_more_bytes() -> None:
    found = _as_rank_0(run_distributed(_each, 2, ON_TWO_RANKS))
    overlapped = ("one id", "few different ids", "clipped by value", "held", "looked up twice", "on one rank")
    for name in overlapped:
        assert found[name] == Left([], "", False), name
    # rows: 400 of one rank, 32 floats and an id each; bags: 4, and ids of 8 bytes
    left = found["a hundred ids"]
    assert left.plain and left.steps == [1 + DECIDING_STEPS + 1]
    assert f"{400 * (8 * DIM + 4)} bytes" in left.reason and f"{400 * 8 + 4 * (8 * DIM + 4)}" in left.reason
    left = found["a step without"]
    assert left.plain and left.steps == [3 + DECIDING_STEPS], "it does not count"
    assert found["restored"] == ({}, True), "a checkpoint does not take tables from their optimizer"
    assert found["counted"] == [0, None, 1, 1, 1], "neither inside a step nor micro-batches"


def test_two_levels_count_what_crosses_between_nodes() -> None:
    """One proxy fetches the 400 rows for its node. From TorchRec both of its ranks would get 4 bags each, for 400 ids."""
    found = _as_rank_0(run_distributed(_each, 4, ON_TWO_NODES))
    left = found["a hundred ids"]
    assert left.plain and f"{400 * (8 * DIM + 4)} bytes between nodes" in left.reason
    assert f"{2 * (400 * 8 + 4 * (8 * DIM + 4))}" in left.reason
    assert found["shared by a node, flat"].plain and not found["shared by a node"].plain
    assert found["counted by another exchange"] == [0, 2]


class _FoundMeanwhile:
    """The worker finds the total of the step that has just ended while the training thread asks for the step of it."""

    total: BagBytes | None = None

    @property
    def decided_in(self) -> int:
        decided_in = 0 if self.total is None else 8
        self.total = BagBytes(3, 2, 0)
        return decided_in


def test_a_total_that_is_found_meanwhile_decides_a_step_later() -> None:
    """On a slower rank it is not there yet, and all have to leave the bags in the same step."""
    jobs = SimpleNamespace(prefetched=None, current=SimpleNamespace(number=8))
    collection = SimpleNamespace(_exchange=SimpleNamespace(bag_traffic=_FoundMeanwhile()), jobs=jobs)
    assert OverlappedCollection.bag_bytes(collection) is None
    collection._exchange.bag_traffic.total = BagBytes(3, 2, 0)  # found before it is asked for
    assert OverlappedCollection.bag_bytes(collection) is None
    jobs.current.number = 9
    assert OverlappedCollection.bag_bytes(collection) == BagBytes(3, 2, 0)


def _pooled(module: EmbeddingBagCollection, features: KeyedJaggedTensor) -> KeyedTensor:
    """What the engine returns once the row of every id has come."""
    collection, layouts = layouts_of(module, 2)
    tables = [[module.embedding_bags[table.name].weight for table in layout.tables] for layout in layouts]
    rows = [
        torch.cat([weights[index][features[feature].values()] for feature, index in layout.features])
        for layout, weights in zip(layouts, tables)
    ]
    return BagOutput(collection, layouts)(features, rows)


def _assert_same(module: EmbeddingBagCollection, features: KeyedJaggedTensor, weights: Tensor | None = None) -> None:
    """Values bit by bit; gradients to the order of summation."""
    found = []
    for pooled in (module(features), _pooled(module, features)):
        assert [*pooled.keys()] == [*module(features).keys()]
        scale = torch.linspace(-1, 1, pooled.values().numel()).view_as(pooled.values())
        (pooled.values() * scale).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        if weights is not None:
            gradients["weights"], weights.grad = weights.grad.clone(), None
        module.zero_grad()
        found.append((pooled, gradients))
    (expected, wanted), (mine, gradients) = found
    assert mine.length_per_key() == expected.length_per_key()
    assert torch.equal(mine.values(), expected.values()) and mine.values().is_contiguous()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keys", [KEYS, ["clicked", "bought", "category", "word", "brand", "tag"], [*KEYS, "price"]])
def test_widths_ways_of_pooling_and_columns(keys: list[str]) -> None:
    module = EmbeddingBagCollection(tables=configs(TABLES))
    assert list(module(jagged(keys, 3, torch.Generator())).keys()) == COLUMNS
    for seed in range(4):
        _assert_same(module, jagged(keys, 7, torch.Generator().manual_seed(seed), longest=9))


def test_weights_and_their_gradients() -> None:
    module = EmbeddingBagCollection(tables=configs(WEIGHTED), is_weighted=True)
    for keys in (["price", "place"], ["place", "tag", "price"]):
        features = jagged(keys, 7, torch.Generator().manual_seed(1), weighted=True, longest=9)
        weights = features.weights().clone().requires_grad_()
        given = KeyedJaggedTensor(keys, features.values(), weights, features.lengths())
        _assert_same(module, given, weights)


def test_weights_that_the_collection_has_no_use_for() -> None:
    features = jagged(KEYS, 7, torch.Generator().manual_seed(1), weighted=True)
    _assert_same(EmbeddingBagCollection(tables=configs(TABLES)), features)


def test_without_ids() -> None:
    lengths = torch.zeros(len(KEYS) * 3, dtype=torch.int32)
    _assert_same(
        EmbeddingBagCollection(tables=configs(TABLES)), KeyedJaggedTensor(KEYS, torch.empty(0).long(), lengths=lengths)
    )


def _deduplicated(weighted: bool) -> KeyedJaggedTensor:
    """Fewer bags than samples, another number for each feature."""
    draw, keys = torch.Generator().manual_seed(3), ["price", "place"]
    bags = [2, 3]
    lengths = torch.tensor([2, 0, 1, 3, 1])
    values = torch.randint(0, 10, (7,), generator=draw)
    inverse = torch.stack([torch.randint(0, count, (4,), generator=draw) for count in bags])
    weights = torch.rand(7, generator=draw) if weighted else None
    strides: Any = [[count] for count in bags]
    return KeyedJaggedTensor(keys, values, weights, lengths, stride_per_key_per_rank=strides, inverse_indices=(keys, inverse))


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_that_samples_share(weighted: bool) -> None:
    _assert_same(EmbeddingBagCollection(tables=configs(WEIGHTED), is_weighted=weighted), _deduplicated(weighted))


@pytest.mark.parametrize("features", [_deduplicated(True), jagged(KEYS, 5, torch.Generator(), weighted=True)])
def test_ids_without_their_weights(features: KeyedJaggedTensor) -> None:
    alone = without_weights(features)
    assert alone.weights_or_none() is None and features.weights_or_none() is not None
    assert alone.values() is features.values() and alone.keys() == features.keys()
    assert alone.stride_per_key() == features.stride_per_key() and torch.equal(alone.lengths(), features.lengths())
    assert without_weights(alone) is alone
