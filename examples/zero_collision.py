"""Raw ids of any size in a small table with TorchRec's zero collision hashing, which maps ids to rows.

``python examples/zero_collision.py`` trains on two ranks with ``MCHManagedCollisionModule``, on CPU or GPU. The most frequent
ids have separate rows, and all other ids of a rank share one row. ``--map mpzch`` selects ``HashZchManagedCollisionModule``
(multi-probe), which needs GPUs and is not tested. On CPU, FBGEMM's kernel neither adds nor evicts ids, so the strategy refuses
it. Both maps are sharded with their tables and trained as in plain TorchRec. The exchange is not overlapped, because only the
map of the owner has the row of an id.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule

from lightning_freescale import BubbleProfiler, FreeScaleDataModule

ROWS, DIM = 512, 16
IDS = 2**40  # raw ids are smaller, for example hashes of names
ITEMS = 2_000  # number of different ids in the data


class Clicks(Dataset[dict[str, Tensor]]):
    """Synthetic clicks on items with raw ids. Few items are popular, and clicks only depend on the item."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        items = torch.Generator().manual_seed(0)  # the same for every seed
        raw, quality = torch.randint(IDS, (ITEMS,), generator=items), torch.randn(ITEMS, generator=items)
        draw = torch.Generator().manual_seed(seed + 1)
        item = (ITEMS ** torch.rand(samples, generator=draw)).long() - 1  # by Zipf's law
        self.ids = raw[item]
        self.clicked = torch.bernoulli((3 * quality[item]).sigmoid(), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the scalars ``id`` and ``clicked``."""
        return {"id": self.ids[index], "clicked": self.clicked[index]}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Return ``ids``, one raw id per sample, and ``clicked``, shape ``[samples]``."""
    values, lengths = torch.stack([sample["id"] for sample in samples]), torch.ones(len(samples), dtype=torch.int32)
    ids = KeyedJaggedTensor(keys=["item"], values=values, lengths=lengths)
    return {"ids": ids, "clicked": torch.stack([sample["clicked"] for sample in samples])}


def managed(kind: str) -> ManagedCollisionEmbeddingCollection:
    """Return a table of ``ROWS`` rows for ids below ``IDS``. Rows and map are divided among the ranks."""
    table = EmbeddingConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
    device = torch.device("cpu")
    if kind == "mpzch":
        of_table: Any = HashZchManagedCollisionModule(ROWS, device, total_num_buckets=8)  # a multiple of the number of ranks
    else:
        # ranks own blocks of the range of ids, which input_hash_size defines
        policy = LFU_EvictionPolicy()
        of_table = MCHManagedCollisionModule(ROWS, device, policy, eviction_interval=5, input_hash_size=IDS)
    maps = ManagedCollisionCollection({"item": of_table}, [table])
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=[table]), maps)


class ClickModel(L.LightningModule):
    """Predicts whether an item is clicked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.items = managed(kind)
        self.rate = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))
        self.auroc = BinaryAUROC()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return the logits, shape ``[samples]``."""
        rows, _ = self.items(ids)
        return self.rate(rows["item"].values()).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss over the rank's samples. In training, the map also learns the ids."""
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch["ids"]), batch["clicked"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Update the area under the ROC curve of all ranks. The map does not change."""
        self.auroc.update(self(batch["ids"]), batch["clicked"].int())
        self.log("auroc", self.auroc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including the table."""
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and validate every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", choices=("mch", "mpzch"), default="mch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16_000)
    options = parser.parse_args()
    L.seed_everything(0)
    train = Clicks(options.samples)
    data = FreeScaleDataModule(  # each sample has one id and the same cost
        train, torch.ones(len(train)), 128, collate_fn=collate, val_dataset=Clicks(2_000, seed=1)
    )
    trainer = L.Trainer(
        strategy="freescale", accelerator="auto", devices=2, max_epochs=options.epochs, callbacks=[BubbleProfiler()],
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(ClickModel(options.map), data)
    trainer.print("AUROC:", round(trainer.callback_metrics["auroc"].item(), 3))


if __name__ == "__main__":
    main()
