"""Lightning's own DDP strategy trains a plain module over the backend, given its name alone."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_freescale.comm.process_group import FreeScaleGroup
from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import differs
from tests.helpers.recommender import trainer

pytestmark = pytest.mark.slow


class Plain(L.LightningModule):
    """Trains, validates and logs over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1))
        self.kind, self.losses, self.seen = "", [], []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.body(batch[0]).sub(batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        predicted = self.body(batch[0])
        group, size = dist.group.WORLD, self.trainer.world_size
        moved, gathered = torch.zeros_like(predicted), torch.zeros(size * len(predicted), 1)
        works = [
            dist.all_to_all_single(moved, predicted, group=group, async_op=True),
            dist.all_gather_into_tensor(gathered, predicted, group=group, async_op=True),
        ]
        for work in works:
            work.wait()
        self.seen += [*moved.flatten().tolist(), *gathered.flatten().tolist()]
        self.seen += self.all_gather(predicted).flatten().tolist()
        self.log("val", predicted.mean(), sync_dist=True)

    def on_train_start(self) -> None:
        self.kind = type(dist.group.WORLD).__name__

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def _fit(backend: str) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)  # other weights on every rank, which DDP makes those of the first
    module, draw = Plain(), torch.Generator().manual_seed(90 + rank)
    loaders = [DataLoader(TensorDataset(torch.randn(24, 6, generator=draw)), batch_size=size * 2) for _ in range(2)]
    strategy = DDPStrategy(process_group_backend=backend, timeout=timedelta(seconds=30))
    fitting = trainer(devices=size, strategy=strategy, max_epochs=2)
    fitting.fit(module, *loaders)
    logged = {name: value.item() for name, value in fitting.callback_metrics.items()}
    return {
        "kind": module.kind,
        "told": [module.losses, module.seen, logged, list(module.state_dict().values())],
    }


@pytest.mark.parametrize("size", [2, 3])
def test_weights_and_metrics_are_those_of_gloo(size: int) -> None:
    mine, gloo = (run_distributed(_fit, size, backend, init=False, timeout=90) for backend in ("freescale", "gloo"))
    assert {one["kind"] for one in mine} == {FreeScaleGroup.__name__} and {one["kind"] for one in gloo} == {"ProcessGroup"}
    for one, other in zip(mine, gloo):
        assert differs(one["told"], other["told"]) == ""
    losses = [one["told"][0] for one in gloo]
    assert losses[0] != losses[1] and len(set(losses[0])) == len(losses[0]), "the loss must move, or equality means nothing"
    assert differs(gloo[0]["told"][3], gloo[1]["told"][3]) == "", "the ranks must agree"
