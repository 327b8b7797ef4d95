"""The bytes of rows against those of pooled bags, the way TorchRec's own exchange moves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.bag_traffic import DECIDING_STEPS, BagTraffic
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import SUM, configs, layouts_of

DIM, ROWS = 8, 400
STEPS = DECIDING_STEPS + 5


class _Place:
    """As much of a transport as is asked without an exchange."""

    def __init__(self, rank: int) -> None:
        self.rank, self.dim = rank, DIM


@pytest.mark.parametrize(("row_wise", "rank", "expected"), [(False, 0, 3 * 1), (False, 2, 3 * 3), (True, 1, 3 * 3 * 3)])
def test_who_would_send_pooled_rows(row_wise: bool, rank: int, expected: int) -> None:
    """On four ranks; the first table has two features, so the owners of whole tables are ranks 0 and 1."""
    tables = {"first": (ROWS, DIM, ["a", "b"], SUM), "second": (ROWS, DIM, ["c"], SUM)}
    _, (layout,) = layouts_of(EmbeddingBagCollection(tables=configs(tables)), 4, row_wise)
    features = KeyedJaggedTensor(["c", "unused", "a", "b"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int32))
    assert BagTraffic(layout, _Place(rank)).pooled_rows(features) == expected


def _features(ids_per_bag: int, bags: int) -> KeyedJaggedTensor:
    """Ids of a bag are different, and bags share none as long as there are rows."""
    lengths = torch.full((bags,), ids_per_bag, dtype=torch.int32)
    return KeyedJaggedTensor(["a"], torch.arange(bags * ids_per_bag) % ROWS, lengths=lengths)


def _left(
    ids_per_bag: int, bags: int = 4, lookups: Callable[[int], int] = lambda step: 1, **options: Any
) -> tuple[list[dict[str, str]], list[str], list[str]]:
    root = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=configs({"t": (ROWS, DIM, ["a"], SUM)}))})
    sharding = TableSharding(root, torch.device("cpu"), overlap=True)
    sgd = TableOptimizer(torch.optim.SGD, {"lr": 0.5}, group=0)
    tables = sharding.shard(group=dist.new_group(), local_world_size=2, optimizers=dict.fromkeys(sharding.parameters, sgd))
    engine = OverlapEngine(tables, **options)
    features, left = _features(ids_per_bag, bags), []
    for step in range(STEPS):
        left.append(engine.leave_long_bags())
        engine.begin_step({"bags": features})
        if step:  # the first step looks nothing up
            loss = sum(root["bags"](features).values().square().sum() for _ in range(lookups(step)))
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


def test_two_levels_decide_as_one() -> None:
    """All ranks alike, by rows each once per rank."""
    flat = run_distributed(_left, 4, 100)
    assert any(any(left) for left, *_ in flat)
    assert run_distributed(_left, 4, 100, exchange="two_level", ranks_per_node=2) == flat
