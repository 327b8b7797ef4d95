"""DistributedDataParallel over a freescale group trains the same weights as over gloo."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import TIMEOUT, differs, make_group

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "tiny_buckets": {"bucket_cap_mb": 0.0005},
    "static_view_tiny_buckets": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
    "unused": {"find_unused_parameters": True},
    "no_sync": {},
    "hook": {},
    "join": {},
    "zero": {},
}


class Net(nn.Module):
    """With a sparse embedding, a buffer, and a part that only some ranks and steps use."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 16, sparse=sparse)
        self.norm = nn.BatchNorm1d(16)
        self.body = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))
        self.seldom = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor, seldom: bool) -> torch.Tensor:
        found = self.norm(self.rows(ids))
        return self.body(found) + (self.seldom(found) if seldom else 0)


def _train(group: Any, name: str) -> tuple[list[float], list[torch.Tensor]]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other weights on every rank, which DDP makes those of the first
    net = Net(sparse=name == "plain")
    model = DistributedDataParallel(net, process_group=group, **OPTIONS[name])
    if name == "hook":
        model.register_comm_hook(group, fp16_compress_hook)
    if name == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, losses = torch.Generator().manual_seed(50 + rank), []

    def step(index: int) -> None:
        ids = torch.randint(0, 20, (8,), generator=draw)
        loss = model(ids, name != "unused" or (index + rank) % 3 == 0).square().mean()
        loss.backward()
        losses.append(loss.item())
        if name != "no_sync" or index % 2:
            optimizer.step()
            optimizer.zero_grad()

    with Join([model]) if name == "join" else nullcontext():
        for index in range(6 + (rank if name == "join" else 0)):  # uneven where they may be
            if name == "no_sync" and index % 2 == 0:
                with model.no_sync():
                    step(index)
            else:
                step(index)
    return losses, [*net.state_dict().values()]


def _differences(name: str) -> list[str]:
    mine, gloo = _train(make_group(), name), _train(dist.new_group(backend="gloo", timeout=TIMEOUT), name)
    assert len(set(gloo[0])) >= 6, "the loss must move, or equality means nothing"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, next(weights for weights in gloo[1] if weights.is_floating_point()))
    assert all(torch.equal(everyone[0], other) for other in everyone), "the ranks must agree"
    return [differs(mine, gloo)]


@pytest.mark.parametrize(("size", "name"), [*((2, name) for name in OPTIONS), (3, "plain"), (4, "static_view_tiny_buckets")])
def test_weights_are_those_of_gloo(size: int, name: str) -> None:
    assert run_distributed(_differences, size, name, timeout=60) == [[""]] * size
