"""The bytes of rows against those of pooled bags, the way TorchRec's own exchange moves them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.bag_traffic import DECIDING_STEPS, BagBytes, BagTraffic
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, configs, layouts_of

DIM, ROWS = 8, 400
STEPS = DECIDING_STEPS + 5


class _Place:
    """As much of a transport as is asked without an exchange."""

    def __init__(self, rank: int) -> None:
        self.rank, self.dim = rank, DIM


@pytest.mark.parametrize(
    ("row_wise", "rank", "expected"), [(False, 0, [0, 3, 0, 0]), (False, 2, [6, 3, 0, 0]), (True, 1, [9, 0, 9, 9])]
)
def test_who_would_send_pooled_rows(row_wise: bool, rank: int, expected: list[int]) -> None:
    """On four ranks; the first table has two features, so the owners of whole tables are ranks 0 and 1."""
    tables = {"first": (ROWS, DIM, ["a", "b"], SUM), "second": (ROWS, DIM, ["c"], SUM)}
    _, (layout,) = layouts_of(EmbeddingBagCollection(tables=configs(tables)), 4, row_wise)
    features = KeyedJaggedTensor(["c", "unused", "a", "b"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int32))
    assert BagTraffic(layout, _Place(rank), []).pooled_rows(features).tolist() == expected


def _features(ids_per_bag: int, bags: int) -> KeyedJaggedTensor:
    """Ids of a bag are different, and bags share none as long as there are rows."""
    lengths = torch.full((bags,), ids_per_bag, dtype=torch.int32)
    return KeyedJaggedTensor(["a"], torch.arange(bags * ids_per_bag) % ROWS, lengths=lengths)


SGD = TableOptimizer(torch.optim.SGD, {"lr": 0.5}, group=0)


def _overlapped(optimizer: TableOptimizer = SGD, **options: Any) -> tuple[Any, OverlapEngine]:
    root = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=configs({"t": (ROWS, DIM, ["a"], SUM)}))})
    sharding = TableSharding(root, torch.device("cpu"), overlap=True)
    how = dict.fromkeys(sharding.parameters, optimizer)
    tables = sharding.shard(group=dist.new_group(), local_world_size=2, optimizers=how)
    return root["bags"], OverlapEngine(tables, **options)


def _left(
    ids_per_bag: int, bags: int = 4, lookups: Callable[[int], int] = lambda step: 1, **options: Any
) -> tuple[list[dict[str, str]], list[str], list[str]]:
    module, engine = _overlapped(**options)
    features, left = _features(ids_per_bag, bags), []
    for step in range(STEPS):
        left.append(engine.leave_long_bags())
        engine.begin_step({"bags": features})
        if step:  # the first step looks nothing up
            loss = sum(module(features).values().square().sum() for _ in range(lookups(step)))
            if isinstance(loss, torch.Tensor):
                loss.backward()
        engine.end_backward()
    found = left, [*engine.modules], [*engine.plain]
    engine.drain()
    engine.close()
    return found


def test_one_id_a_bag_is_overlapped() -> None:
    for left, overlapped, plain in run_distributed(_left, 2, 1):
        assert not any(left) and overlapped == ["bags"] and not plain


def test_a_hundred_ids_a_bag_are_left_to_torchrec() -> None:
    """Rows: 400 of one rank, 32 floats and an id each. Bags: 4, ids of 8 bytes."""
    for left, overlapped, plain in run_distributed(_left, 2, 100):
        assert [step for step, reasons in enumerate(left) if reasons] == [1 + DECIDING_STEPS + 1]
        assert not overlapped and plain == ["bags"]
        assert f"{400 * (8 * DIM + 4)} bytes" in left[2 + DECIDING_STEPS]["bags"]
        assert f"sends them, {400 * 8 + 4 * (8 * DIM + 4)}" in left[2 + DECIDING_STEPS]["bags"]


def test_long_bags_of_few_different_ids_are_overlapped() -> None:
    for *_, plain in run_distributed(_left, 2, ids_per_bag=ROWS, bags=200):
        assert not plain


@pytest.mark.parametrize("options", [{"clip_value": 0.5}, {"hold_gradients": True}])
def test_what_torchrec_could_not_do_is_overlapped(options: dict[str, float]) -> None:
    for left, overlapped, _ in run_distributed(_left, 2, 100, **options):
        assert not any(left) and overlapped == ["bags"]


def _twice(step: int) -> int:
    return 1 + (step == 3)


def _on_one_rank(step: int) -> int:
    return int(step != 3 or dist.get_rank() == 0)


@pytest.mark.parametrize("lookups", [_twice, _on_one_rank])
def test_what_torchrec_would_not_do_exactly_is_overlapped(lookups: Callable[[int], int]) -> None:
    for left, overlapped, _ in run_distributed(_left, 2, 100, lookups=lookups):
        assert not any(left) and overlapped == ["bags"]


def test_steps_without_lookups_do_not_count() -> None:
    for left, overlapped, _ in run_distributed(_left, 2, 100, lookups=lambda step: int(step != 3)):
        assert [step for step, reasons in enumerate(left) if reasons] == [3 + DECIDING_STEPS] and not overlapped


def _restored() -> tuple[dict[str, str], list[str], bool]:
    """Adam on CPU, where a checkpoint's run on a GPU had left the bags; and whether its rows move."""
    module, engine = _overlapped(TableOptimizer(torch.optim.Adam, {"lr": 0.5}, group=0, sparse_adam=True))
    engine.bag_decisions["bags"] = "its rows are more bytes"
    before, features = engine.tables.full_weight("bags.embedding_bags.t"), _features(100, 4)
    left = engine.leave_long_bags()
    engine.begin_step()
    module(features).values().square().sum().backward()
    engine.end_backward()
    engine.drain()
    overlapped, moved = [*engine.modules], not torch.equal(engine.tables.full_weight("bags.embedding_bags.t"), before)
    engine.close()
    return left, overlapped, moved


def test_what_a_checkpoint_says_does_not_take_tables_from_their_optimizer() -> None:
    for left, overlapped, moved in run_distributed(_restored, 2):
        assert not left and overlapped == ["bags"] and moved


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


def _saved_in_a_step() -> list[dict[str, Any]]:
    module, engine = _overlapped()
    states = [engine.bag_state()]
    engine.begin_step()
    module(_features(2, 4)).values().sum().backward()
    states.append(engine.bag_state())
    engine.end_backward()
    engine.drain()
    states.append(engine.bag_state())
    engine.close()
    return states


def test_counts_are_kept_between_steps_only() -> None:
    for before, inside, after in run_distributed(_saved_in_a_step, 2):
        assert before["counted"]["bags"]["steps"] == 0 and after["counted"]["bags"]["steps"] == 1
        assert inside["counted"] == {}


def _in_parts() -> tuple[int, bool]:
    """Two micro-batches a step, then undivided steps."""
    module, engine = _overlapped()
    counted = []
    for updates in [False, True] * DECIDING_STEPS + [True, True]:
        assert not engine.leave_long_bags()
        engine.begin_step(updates=updates)
        module(_features(100, 4)).values().sum().backward()
        engine.end_backward()
        engine.drain()
        counted.append(engine.bag_state()["counted"]["bags"]["steps"])
    engine.close()
    return counted[-3:]


def test_micro_batches_do_not_count() -> None:
    assert run_distributed(_in_parts, 2) == [[0, 1, 2]] * 2


TWO_LEVEL = {"exchange": "two_level", "ranks_per_node": 2}


def test_two_levels_count_what_crosses_between_nodes() -> None:
    """One proxy fetches the 400 rows for its node. Of TorchRec both of its ranks would get 4 bags each, for 400 ids."""
    results = run_distributed(_left, 4, 100, **TWO_LEVEL)
    (told,) = [reasons["bags"] for reasons in results[0][0] if reasons]
    assert f"{400 * (8 * DIM + 4)} bytes between nodes in a step" in told
    assert f"sends them, {2 * (400 * 8 + 4 * (8 * DIM + 4))}" in told
    assert results == results[:1] * 4, "all ranks alike"


def test_rows_that_a_node_shares_are_overlapped_in_two_levels() -> None:
    """Straight to every rank these are more bytes than the bags; through proxies fewer."""
    flat = run_distributed(_left, 4, ids_per_bag=2, bags=200)
    assert [plain for *_, plain in flat] == [["bags"]] * 4
    by_proxies = run_distributed(_left, 4, ids_per_bag=2, bags=200, **TWO_LEVEL)
    assert [plain for *_, plain in by_proxies] == [[]] * 4


def _counted_by_another(**options: Any) -> list[int]:
    """The steps that are counted when two have been by the flat exchange."""
    _, engine = _overlapped(**options)
    state = engine.bag_state()
    state["counted"]["bags"]["steps"] = 2
    steps = []
    for nodes in (1, 2):
        engine.restore_bag_state({**state, "nodes": nodes})
        steps.append(engine.bag_state()["counted"]["bags"]["steps"])
    engine.close()
    return steps


def test_counts_of_another_exchange_are_no_use() -> None:
    assert run_distributed(_counted_by_another, 4, **TWO_LEVEL) == [[0, 2]] * 4
