"""TorchRec's DLRM, as its DLRMTrain trains it."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

from tests.parity.third_party.training import DIM, ITEMS, POPULAR, SAMPLES, Training

ROWS = {"item": ITEMS, "user": 40, "shop": 13}
FEATURES = {"clicked": "item", "bought": "item", "user": "user", "shop": "shop"}


class DLRMTraining(Training):
    """Clicks from dense features and bags of three tables, one of them shared by two features."""

    package = "torchrec"
    tables = tuple(f"model.model.sparse_arch.embedding_bag_collection.embedding_bags.{table}" for table in ROWS)

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        tables = [
            EmbeddingBagConfig(
                name=table,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[feature for feature, of in FEATURES.items() if of == table],
            )
            for table, rows in ROWS.items()
        ]
        self.model = DLRMTrain(
            DLRM(
                embedding_bag_collection=EmbeddingBagCollection(tables=tables),
                dense_in_features=5,
                dense_arch_layer_sizes=[16, DIM],
                over_arch_layer_sizes=[16, 1],
            )
        )

    def loss(self, batch: Batch) -> Tensor:
        loss, _ = self.model(batch)
        return loss

    @staticmethod
    def batches(seed: int, count: int) -> list[Batch]:
        """Up to four ids in a bag, or none."""
        found = []
        for step in range(count):
            draw = torch.Generator().manual_seed(1000 * seed + step)
            lengths = torch.randint(0, 5, (len(FEATURES), SAMPLES), generator=draw)
            ids = []
            for feature, table in zip(lengths, FEATURES.values()):
                drawn = torch.randint(0, 10**6, (int(feature.sum()),), generator=draw)
                ids.append(POPULAR[drawn % len(POPULAR)] if table == "item" else drawn % ROWS[table])
            sparse = KeyedJaggedTensor(keys=list(FEATURES), values=torch.cat(ids), lengths=lengths.view(-1))
            dense = torch.randn(SAMPLES, 5, generator=draw)
            found.append(Batch(dense, sparse, (dense[:, 0] > 0).int()))
        return found
