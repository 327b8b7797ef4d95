"""DeepCTR-Torch's DeepFM, trained on its loss as its own ``fit`` does."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
from deepctr_torch.models import DeepFM
from torch import Tensor, nn

from tests.parity.third_party.training import DIM, ITEMS, LENGTH, USERS, Training, clicks

for thread in threading.enumerate():  # the import asks a registry for the newest version: ranks are not forked meanwhile
    if getattr(getattr(thread, "_target", None), "__module__", "") == "deepctr_torch.utils":
        thread.join()


class DeepFMTraining(Training):
    """Without the L2 norms of whole tables; the history shares the item's table."""

    package = "deepctr-torch"
    tables = ("model.embedding_dict.item",)
    rates = {"sgd": 0.1, "adagrad": 0.02, "adam": 0.007}
    options_of_model: ClassVar[dict[str, Any]] = {"l2_reg_embedding": 0, "l2_reg_linear": 0, "init_std": 0.1}

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        history = SparseFeat("history", ITEMS, DIM, embedding_name="item")
        columns = [SparseFeat("item", ITEMS, DIM), SparseFeat("user", USERS, DIM), VarLenSparseFeat(history, LENGTH)]
        self.model = DeepFM(columns, columns, **self.options_of_model)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        predicted = self.model(batch["features"]).squeeze(1)
        loss = nn.functional.binary_cross_entropy(predicted, batch["clicked"], reduction="sum")
        return (loss + self.model.get_regularization_loss() + self.model.aux_loss).sum()

    @staticmethod
    def batches(seed: int, count: int) -> list[dict[str, Tensor]]:
        """All features in the columns of one tensor of floats, as the package has them."""
        found = []
        for batch in clicks(seed, count):
            columns = [batch["item"][:, None], batch["user"][:, None], batch["history"]]
            found.append({"features": torch.cat(columns, dim=1).float(), "clicked": batch["clicked"]})
        return found


class DeepFMDefaults(DeepFMTraining):
    """With the L2 norms, for which the model keeps its weights in a list."""

    options_of_model = {}
