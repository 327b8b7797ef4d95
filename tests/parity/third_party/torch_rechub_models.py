"""torch-rechub's models of clicks, with the batch norm in each of their layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_rechub.basic.features import SequenceFeature, SparseFeature
from torch_rechub.basic.initializers import RandomNormal
from torch_rechub.models.multi_task import MMOE
from torch_rechub.models.ranking import DIN

from tests.parity.third_party.training import DIM, ITEMS, USERS, Training, clicks

OPTIONS = {"embed_dim": DIM, "initializer": RandomNormal(0, 0.5)}
"""Rows begin at 0.5: at 0.0001, the package's default, batch norm makes ten thousand times as much of their rounding."""


class MMOETraining(Training):
    """Two tasks, of which each weighs the experts."""

    package = "torch-rechub"
    tables = ("model.embedding.embed_dict.item",)
    without_effect = ("mlp.0.bias", "mlp.1.running_mean")  # batch norm takes the bias away again

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        features = [
            SparseFeature("user", USERS, **OPTIONS),
            SparseFeature("item", ITEMS, padding_idx=0, **OPTIONS),
            SequenceFeature("history", ITEMS, pooling="mean", shared_with="item", padding_idx=0, **OPTIONS),
        ]
        towers = [{"dims": [DIM]}, {"dims": [DIM]}]
        self.model = MMOE(features, ["classification", "classification"], 3, {"dims": [2 * DIM]}, towers)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        other = (batch["user"] % 2).float()
        return nn.functional.binary_cross_entropy(self.model(batch), torch.stack([batch["clicked"], other], dim=1))

    @staticmethod
    def batches(seed: int, count: int) -> list[dict[str, Tensor]]:
        return clicks(seed, count)


class DINTraining(MMOETraining):
    """Items of a history count by what they have to do with the item."""

    def __init__(self, optimizer: str) -> None:
        Training.__init__(self, optimizer)
        history = SequenceFeature("history", ITEMS, pooling="concat", shared_with="item", padding_idx=0, **OPTIONS)
        item = SparseFeature("item", ITEMS, padding_idx=0, **OPTIONS)
        user, layers = SparseFeature("user", USERS, **OPTIONS), {"dims": [2 * DIM]}
        self.model = DIN([user], [history], [item], layers, layers)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.binary_cross_entropy(self.model(batch), batch["clicked"])
