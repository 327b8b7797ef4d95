"""SASRec as it is published (arXiv 1808.09781): one plain table with a padding row, looked up three times in a step."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import assert_same
from tests.helpers.recommender import trainer
from tests.helpers.several_lookups import LazyAdam

ITEMS, DIM, LENGTH, SAMPLES, STEPS = 40, 4, 6, 4, 50
Batch = tuple[Tensor, Tensor, Tensor]


class SASRec(L.LightningModule):
    """Next-item prediction against one negative item per position; nothing of it knows of sharding."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.pos_emb = nn.Embedding(LENGTH, DIM)
        self.attention_norm, self.last_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 1, batch_first=True)
        self.forward_layers = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.optimizer, self.losses = optimizer, []

    def log2feats(self, history: Tensor) -> Tensor:
        states = self.item_emb(history)
        states *= DIM**0.5
        states = states + self.pos_emb(torch.arange(LENGTH))
        states *= (history != 0).unsqueeze(-1)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        states = self.attention_norm(states + self.attention(states, states, states, attn_mask=later)[0])
        return self.last_norm(states + self.forward_layers(states))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        history, positive, negative = batch
        states, wanted = self.log2feats(history), positive != 0
        good = (states * self.item_emb(positive)).sum(dim=-1)[wanted]
        bad = (states * self.item_emb(negative)).sum(dim=-1)[wanted]
        loss = nn.functional.softplus(-good).mean() + nn.functional.softplus(bad).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        kinds: dict[str, Any] = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.Adam,
            "lazy": LazyAdam,
        }
        return kinds[self.optimizer](self.parameters(), lr={"sgd": 0.5}.get(self.optimizer, 0.02))


def _batches(rank: int) -> list[Batch]:
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        items = torch.randint(1, ITEMS, (SAMPLES, LENGTH + 1), generator=draw)
        for row, padded in zip(items, torch.randint(0, LENGTH, (SAMPLES,), generator=draw).tolist()):
            row[:padded] = 0
        negative = torch.randint(1, ITEMS, (SAMPLES, LENGTH), generator=draw) * (items[:, 1:] != 0)
        found.append((items[:, :-1].clone(), items[:, 1:].clone(), negative))
    return found


def _train(optimizer: str, sharded: bool) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(0)
    module, statistics = SASRec(optimizer), {}
    strategy = FreeScaleStrategy(shard=["item_emb"]) if sharded else DDPStrategy()
    fitting = trainer(strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    fitting.fit(module, DataLoader(_batches(int(os.environ["RANK"])), batch_size=None))
    if isinstance(strategy, FreeScaleStrategy):
        statistics = vars(strategy.overlap_report)
    state = fitting._checkpoint_connector.dump_checkpoint(weights_only=True)
    return module.losses, state["state_dict"], statistics


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_sasrec_is_that_of_ddp(optimizer: str, ranks: int) -> None:
    expected = run_distributed(_train, ranks, "lazy" if optimizer == "adam" else optimizer, False)
    found = run_distributed(_train, ranks, optimizer, True)
    for (losses, _, _), (mine, _, _) in zip(expected, found):
        assert max(losses) / min(losses) > 1.1, "the loss must move, or equality means nothing"
        assert mine == pytest.approx(losses, rel=1e-5)
    for weights in (found[0][1], expected[0][1]):
        weights["attention.in_proj_bias"][DIM : 2 * DIM] = 0  # of keys: softmax drops it, so its gradient is rounding alone
    assert_same(found[0][1], expected[0][1], rtol=1e-5, atol=1e-6)
    assert not found[0][1]["item_emb.weight"][0].any(), "the padding row is never updated"
    assert found[0][2]["mispredicted_lookups"] == 0
