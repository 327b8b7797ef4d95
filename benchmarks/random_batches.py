"""The batches of a random case, whole or cut into micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from random_cases import Case, Part
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_freescale.balance import MicroBatches

SAMPLES = 4
Batch = dict[str, Any]


def _cut(batch: Batch, micro_batches: int) -> MicroBatches:
    """Cut a batch by its samples."""
    parts = torch.arange(SAMPLES).tensor_split(micro_batches)

    def some(given: Any, samples: Tensor) -> Any:
        if isinstance(given, Tensor):
            return given[samples]
        lengths = given.lengths().view(len(given.keys()), SAMPLES)
        chosen = torch.zeros_like(lengths, dtype=torch.bool)
        chosen[:, samples] = True
        of_part, weights = torch.repeat_interleave(chosen.view(-1), lengths.view(-1)), given.weights_or_none()
        weights = None if weights is None else weights[of_part]
        return KeyedJaggedTensor(given.keys(), given.values()[of_part], weights, lengths[:, samples].reshape(-1))

    batches = [
        {
            "lookups": [[some(given, samples) for given in lookups] for lookups in batch["lookups"]],
            "label": batch["label"][samples],
            "step": batch["step"],
            "first": index == 0,
        }
        for index, samples in enumerate(parts)
    ]
    return MicroBatches(tuple(batches), tuple(len(samples) / SAMPLES for samples in parts))


def loader(case: Case, rank: int, salt: int = 0, micro_batches: int = 1) -> DataLoader:
    """Return the batches of one rank; ``salt`` makes others."""
    draw = torch.Generator().manual_seed(7 * case.seed + 1009 * rank + salt)

    def lookup(part: Part) -> Any:
        if part.plain:
            return torch.randint(0, part.rows[0], (SAMPLES, 3), generator=draw)
        rows = [rows for rows, features in zip(part.rows, part.features) for _ in range(features)]
        lengths = torch.randint(0, 5, (len(rows), SAMPLES), generator=draw)
        ids = [torch.randint(0, most, (int(each.sum()),), generator=draw) for most, each in zip(rows, lengths)]
        weights = torch.rand(int(lengths.sum()), generator=draw) + 0.5 if "weighted" in part.bags else None
        return KeyedJaggedTensor([f"f{index}" for index in range(len(rows))], torch.cat(ids), weights, lengths.view(-1))

    batches = [
        {
            "lookups": [[lookup(part) for _ in range(part.lookups)] for part in case.parts],
            "label": torch.rand(SAMPLES, generator=draw),
            "step": step,
            "first": True,
        }
        for step in range(case.steps)
    ]
    if micro_batches > 1:
        batches = [_cut(batch, micro_batches) for batch in batches]
    return DataLoader(batches, batch_size=None, generator=torch.Generator().manual_seed(1))
