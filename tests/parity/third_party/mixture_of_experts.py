"""A small mixture of experts: which one computes an item depends on the item's row, so some have nothing to do in a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.third_party.training import DIM, ITEMS, LENGTH, Training, ranking_loss, sequences

EXPERTS = 4


class MixtureTraining(Training):
    """The next item, at every position, by the one expert that its router prefers."""

    package = "torch"
    tables = ("item_embedding",)
    options = {"find_unused_parameters": True}

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.item_embedding = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.position_embedding = nn.Embedding(LENGTH, DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)) for _ in range(EXPERTS)
        )

    def states(self, items: Tensor) -> Tensor:
        rows = self.item_embedding(items) + self.position_embedding.weight
        tokens, there = rows.cumsum(dim=1) / torch.arange(1, LENGTH + 1)[:, None], items != 0
        share, expert = self.router(tokens).softmax(dim=-1).max(dim=-1)
        found = tokens.clone()
        chosen = [(expert == index) & there for index in range(EXPERTS)]
        for index, mine in enumerate(chosen):
            if mine.any():
                found[mine] = found[mine] + share[mine][:, None] * self.computed(index, tokens[mine], items[mine])
        return found

    def computed(self, expert: int, tokens: Tensor, items: Tensor) -> Tensor:
        return self.experts[expert](tokens)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states, there = self.states(batch["items"]), batch["items"] != 0
        return ranking_loss(states, self.item_embedding(batch["positive"]), self.item_embedding(batch["negative"]), there)

    @staticmethod
    def batches(seed: int, count: int) -> list[dict[str, Tensor]]:
        """Few samples, so that few experts have something to do."""
        return [{name: each[:2] for name, each in batch.items()} for batch in sequences(seed, count)]


class ExpertTables(MixtureTraining):
    """Every expert has a table of its own, which it looks up for the items that come to it, if any."""

    tables = ("item_embedding", *(f"expert_rows.{index}" for index in range(EXPERTS)))

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.expert_rows = nn.ModuleList(nn.Embedding(ITEMS, DIM) for _ in range(EXPERTS))

    def computed(self, expert: int, tokens: Tensor, items: Tensor) -> Tensor:
        return self.experts[expert](tokens) * self.expert_rows[expert](items)
