"""docs/overlap.md: ids given by a method, with the Trainer."""

from types import SimpleNamespace

import lightning as L
import torch
from quick_start import DIM, Histories
from torch import Tensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import FreeScaleDataModule
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _by_item(histories: list[Tensor]) -> dict:
    return {"item": torch.cat(histories), "lengths": torch.tensor([len(history) for history in histories])}


if __name__ == "__main__":
    page = Excerpts("docs/overlap.md")
    page.python(globals())
    page.python(globals())
    page.end()
    told = SimpleNamespace(global_step=3), None, "item", torch.arange(2), torch.ones(2)
    PrintHotRows().on_hot_rows_changed(*told)
    Hashed.embedding_ids = embedding_ids
    histories = Histories(64)
    data = FreeScaleDataModule(histories, histories.lengths, batch_size=8, collate_fn=_by_item)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    model = Hashed()
    L.Trainer(strategy="freescale", **options).fit(model, data)
    assert model.counts["predicted_lookups"] == 7 and model.counts["mispredicted_lookups"] == 0
