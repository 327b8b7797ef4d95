"""Models whose ranks look up different collections, in different orders: no rank waits for one that waits for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import run_distributed

NAMES, ROWS, DIM, SAMPLES, STEPS, RATE = "abc", 13, 4, 3, 5, 0.05
TIMEOUT = timedelta(seconds=20)
Lookups = list[tuple[str, Tensor]]
ORDERS = {
    # the first rank hears next ids of "a" that the second does not know while it waits twice for "b"
    "2 ranks": (["aa", "bbba"], ["a", ""]),
    "in a circle": (["aaa", "bbb", "ccc"], ["ab", "bc", "ca"]),
    "3 collections": (["abcc", "ccbaabb", "bb"], ["a", "c", "ab"]),
    # the second rank has announced other ids of "a" when it comes to look it up, and gets no gradient of their rows
    "in vain": (["aaaa", "ba"], ["a", "A"]),
}
"""Of each rank the collections that it looks up, and those whose next ids it submits ahead; wrong ones where in capitals."""


class Several(nn.Module):
    """Looks up in the order that it is given."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        configs = [EmbeddingConfig(name=f"{n}s", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["id"]) for n in NAMES]
        self.collections = nn.ModuleDict({name: EmbeddingCollection(tables=[each]) for name, each in zip(NAMES, configs)})
        self.query = nn.Linear(DIM, DIM, bias=False)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw))

    def forward(self, lookups: Lookups) -> Tensor:
        hidden = torch.ones(SAMPLES, DIM)
        for name, ids in lookups:
            found = self.collections[name](_jagged(ids))["id"].values()
            hidden = hidden + torch.tanh(self.query(found))
        return torch.tanh(self.query(hidden)).sum(dim=1).square().mean()


def _jagged(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["id"], values=ids.clone(), lengths=torch.ones(SAMPLES, dtype=torch.int32))


def _data(orders: list[str]) -> list[list[Lookups]]:
    """By step and rank."""
    draw = torch.Generator().manual_seed(1)
    return [
        [[(name, torch.randint(0, ROWS, (SAMPLES,), generator=draw)) for name in order] for order in orders]
        for _ in range(STEPS)
    ]


def _losses_unsharded(data: list[list[Lookups]]) -> list[list[float]]:
    """By step and rank, where every step is one of the mean loss."""
    model, losses = Several(), []
    for step in data:
        model.zero_grad()
        found = [model(lookups) for lookups in step]
        torch.stack(found).mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=RATE)
        losses.append([loss.item() for loss in found])
    return losses


def _known(lookups: Lookups, names: str) -> dict[str, Any]:
    """The first lookup of each collection that is named; other ids where in capitals."""
    first: dict[str, Any] = {}
    for name, ids in lookups:
        if name in names.lower():
            first.setdefault(f"collections.{name}", _jagged(ids if name in names else (ids + 1) % ROWS))
    return first


@contextmanager
def _sharded() -> Iterator[tuple[Several, nn.Module, OverlapEngine]]:
    model = Several()
    sharding = TableSharding(model, torch.device("cpu"))
    how = TableOptimizer(torch.optim.SGD, {"lr": RATE}, group=0)
    tables = sharding.shard(
        group=dist.new_group(),
        local_world_size=dist.get_world_size(),
        plan=None,
        optimizers=dict.fromkeys(sharding.parameters, how),
    )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [table.key for table in tables.tables])
    engine = OverlapEngine(tables, timeout=TIMEOUT)
    yield model, DistributedDataParallel(model), engine
    engine.drain()
    engine.close()


def _losses(orders: list[str], ahead: list[str]) -> list[float]:
    rank, data, losses = dist.get_rank(), _data(orders), []
    with _sharded() as (model, ddp, engine):
        for mine, following in zip((step[rank] for step in data), [*(step[rank] for step in data[1:]), None]):
            engine.begin_step(None if following is None else _known(following, ahead[rank]))
            model.zero_grad()
            loss = ddp(mine)
            engine.end_forward()
            loss.backward()
            engine.end_backward()
            model.query.weight.data.sub_(model.query.weight.grad, alpha=RATE)
            losses.append(loss.item())
    return losses


def _same_as_unsharded(orders: list[str], ahead: list[str]) -> None:
    expected = _losses_unsharded(_data(orders))
    for rank, found in enumerate(run_distributed(_losses, len(orders), orders, ahead)):
        assert found == pytest.approx([step[rank] for step in expected], rel=1e-6)


@pytest.mark.parametrize("name", ORDERS)
def test_orders_that_depend_on_the_rank(name: str) -> None:
    _same_as_unsharded(*ORDERS[name])


def _fetched_in_forward() -> list[bool]:
    """By collection, whether a step has the next rows before its forward ends; rank 1 knows no ids of "b"."""
    with _sharded() as (_, ddp, engine):
        (first,), (following,) = _data(["abc"])[:2]
        engine.begin_step(_known(following, "ac" if dist.get_rank() else "abc"))
        loss, fetched = ddp(first), []
        for collection in engine.collections.values():
            collection._worker.run(lambda: None)  # behind what it has been given so far
            fetched.append(collection.jobs.following.heard)
        engine.end_forward()
        loss.backward()
        engine.end_backward()
    return fetched


def test_only_ids_that_a_rank_does_not_know_wait_for_the_forward() -> None:
    assert run_distributed(_fetched_in_forward, 2) == [[True, False, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_order(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 3])
    orders = ["".join(draw.choices(NAMES, k=draw.randrange(7))) for _ in range(ranks)]
    ahead = ["".join(draw.sample(NAMES, draw.randrange(4))) for _ in range(ranks)]
    _same_as_unsharded(orders, [names if draw.random() < 0.7 else names.upper() for names in ahead])
