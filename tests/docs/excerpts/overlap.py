"""docs/overlap.md: ids given by a method, with the Trainer; then the engine in a plain loop on two ranks."""

from types import SimpleNamespace

import lightning as L
import torch
import torch.distributed as dist
from quick_start import DIM, ITEMS, Histories, collate
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.testing import run_distributed
from tests.docs.excerpts import Excerpts

ROWS = 100


class Hashed(L.LightningModule):
    """Makes the ids of its lookup in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ROWS
        table = EmbeddingConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
        self.tables = EmbeddingCollection(tables=[table])

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        ids = KeyedJaggedTensor(["item"], batch["item"] % self.rows, lengths=batch["lengths"])
        return self.tables(ids)["item"].values().square().mean()

    def on_train_end(self) -> None:
        self.counts = self.trainer.strategy.engine.statistics()
        ids = KeyedJaggedTensor(["item"], torch.arange(4), lengths=torch.tensor([1, 3]))
        names = {"trainer": self.trainer, "torch": torch, "model": self.tables, "batches_of_this_rank": [ids, ids]}
        page.python(names)
        assert len(names["scores"]) == 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _by_item(histories: list[Tensor]) -> dict:
    return {"item": torch.cat(histories), "lengths": torch.tensor([len(history) for history in histories])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = ["item", "next", "other"]
        table = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=features)
        self.items, self.head = EmbeddingCollection(tables=[table]), nn.Linear(DIM, 1)

    def forward(self, batch: SimpleNamespace) -> Tensor:
        return self.head(self.items(batch.ids)["item"].values()).square().mean()


def own_loop() -> dict[str, float]:
    """Four batches on each rank; what the engine has counted."""
    page, histories = Excerpts("docs/overlap.md"), Histories(64)
    page.text("python")
    page.text("python")  # these two run in a fit
    users = iter(range(32 * dist.get_rank(), 64))
    batches = [SimpleNamespace(ids=collate([histories[next(users)] for _ in range(8)])["ids"]) for _ in range(4)]
    model, sgd = Net(), TableOptimizer(torch.optim.SGD, {"lr": 0.1}, group=0)
    names = {"model": model, "device": torch.device("cpu"), "dist": dist, "pairs": zip(batches, [*batches[1:], None])}
    names |= {"how_each_table_is_updated": dict.fromkeys(["items.embeddings.item.weight"], sgd), "ddp": model}
    names |= {"dense": torch.optim.SGD(model.head.parameters(), lr=0.1)}
    page.python(names, local_world_size="2")
    if dist.get_rank() == 0:
        page.end()
    return names["engine"].statistics()


if __name__ == "__main__":
    for counts in run_distributed(own_loop, 2):
        assert counts["predicted_lookups"] == 3 and counts["mispredicted_lookups"] == 0

    page = Excerpts("docs/overlap.md")
    page.python(globals())
    Hashed.embedding_ids = embedding_ids
    histories = Histories(64)
    data = FreeScaleDataModule(histories, histories.lengths, batch_size=8, collate_fn=_by_item)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    model = Hashed()
    L.Trainer(strategy="freescale", **options).fit(model, data)
    assert model.counts["predicted_lookups"] == 7 and model.counts["mispredicted_lookups"] == 0
