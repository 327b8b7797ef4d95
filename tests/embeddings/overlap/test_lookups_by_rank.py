"""Ranks look up different collections in different orders, and no two ranks wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, sharded, train_overlapped

NAMES, ROWS, DIM, SAMPLES, STEPS = "abc", 13, 4, 3, 5
Lookups = list[tuple[str, Tensor]]
ORDERS = {
    # the first rank knows next ids of "a" that the second does not know while it waits twice for "b"
    "2 ranks": (["aa", "bbba"], ["a", ""]),
    "in a circle": (["aaa", "bbb", "ccc"], ["ab", "bc", "ca"]),
    "3 collections": (["abcc", "ccbaabb", "bb"], ["a", "c", "ab"]),
    # the second rank has announced other ids of "a" before it looks them up, and gets no gradient of their rows
    "in vain": (["aaaa", "ba"], ["a", "A"]),
}
"""The collections that each rank looks up, and those whose next ids it submits; wrong ids for capitals."""


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        configs = [EmbeddingConfig(name=f"{n}s", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["id"]) for n in NAMES]
        self.collections = nn.ModuleDict({name: EmbeddingCollection(tables=[each]) for name, each in zip(NAMES, configs)})
        self.query = nn.Linear(DIM, DIM, bias=False)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, lookups: Lookups) -> Tensor:
        hidden = torch.ones(SAMPLES, DIM)
        for name, ids in lookups:
            hidden = hidden + torch.tanh(self.query(self.collections[name](_jagged(ids))["id"].values()))
        return torch.tanh(self.query(hidden)).sum(dim=1).square().mean()


def _jagged(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["id"], values=ids.clone(), lengths=torch.ones(SAMPLES, dtype=torch.int32))


def _data(orders: list[str]) -> list[list[Lookups]]:
    draw = torch.Generator().manual_seed(1)
    steps = [
        [[(name, torch.randint(0, ROWS, (SAMPLES,), generator=draw)) for name in order] for order in orders]
        for _ in range(STEPS)
    ]
    return [list(each) for each in zip(*steps)]


def _losses_unsharded(data: list[list[Lookups]]) -> list[list[float]]:
    """Return losses by rank and step, where every step has the mean loss."""
    model, losses = Several(), []
    optimizers = torch.optim.SGD(model.collections.parameters(), lr=0.5), torch.optim.Adam(model.query.parameters(), lr=1e-2)
    for step in zip(*data):
        model.zero_grad()
        found = [model(lookups) for lookups in step]
        torch.stack(found).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append([loss.item() for loss in found])
    return [list(each) for each in zip(*losses)]


def _known(lookups: Lookups | None, names: str) -> dict[str, Any] | None:
    """Look up each named collection first; use other ids for capitals."""
    first: dict[str, Any] = {}
    for name, ids in lookups or ():
        if name in names.lower():
            first.setdefault(f"collections.{name}", _jagged(ids if name in names else (ids + 1) % ROWS))
    return None if lookups is None else first


def _losses(orders: list[str], ahead: list[str]) -> list[float]:
    rank = dist.get_rank()

    def submit(step: int, following: Any) -> Any:
        return _known(following, ahead[rank]), {}

    return train_overlapped(OPTIMIZERS["sgd"], _data(orders)[rank], submit=submit, make=Several, ends_forward=True).losses


def _fetched_in_forward() -> list[bool]:
    """Return by collection whether a step has the next rows before its forward ends; rank 1 knows no ids of "b"."""
    with sharded(OPTIMIZERS["sgd"], make=Several) as (_, ddp, tables, _):
        engine = OverlapEngine(tables)
        first, following = _data(["abc"])[0][:2]
        engine.begin_step(_known(following, "ac" if dist.get_rank() else "abc"))
        loss, fetched = ddp(first), []
        for collection in engine.collections.values():
            collection._worker.run(lambda: None)  # after all earlier jobs
            fetched.append(collection.step.following.announced.heard)
        engine.end_forward()
        loss.backward()
        engine.end_backward()
        engine.drain()
        engine.close()
    return fetched


def _all(names: list[str]) -> tuple[dict[str, list[float]], list[bool]]:
    return {name: _losses(*ORDERS[name]) for name in names}, _fetched_in_forward()


@pytest.mark.parametrize("ranks", [2, 3])
def test_orders_that_depend_on_the_rank(ranks: int) -> None:
    """Check that next ids are sent in the forward, except those that a rank does not know."""
    names = [name for name, (orders, _) in ORDERS.items() if len(orders) == ranks]
    expected = {name: _losses_unsharded(_data(ORDERS[name][0])) for name in names}
    for rank, (found, fetched) in enumerate(run_distributed(_all, ranks, names)):
        for name in names:
            assert found[name] == pytest.approx(expected[name][rank], rel=1e-6), name
        assert fetched == [True, False, True]
