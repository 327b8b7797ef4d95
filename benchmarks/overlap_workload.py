"""Batches of the overlap benchmark, and what their ids alone say about the bytes that must be waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from lightning_freescale.data.interactions import Histories, read_interactions

RATINGS = Path(__file__).parents[1] / "examples" / "data" / "ml-latest-small" / "ratings.csv.gz"
SEED, EXPONENT, LONGEST = 20, 1.05, 200
Ids = NDArray[np.int64]
Draw = Callable[[int, int], tuple[Ids, Ids]]  # of a step and a rank: ids, and the lengths of their histories


@dataclass
class Batch(Pipelineable):
    """What a rank trains on in one step.

    Attributes:
        features: the ids to look up.
        inverse: which looked up row every item of the histories has; None if each has its own.
    """

    features: KeyedJaggedTensor
    inverse: Tensor | None = None

    def deduplicated(self) -> Batch:
        """The same, with every id looked up once."""
        once, inverse = torch.unique(self.features.values(), return_inverse=True)
        return Batch(_features(once, torch.tensor([len(once)])), inverse)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """It is on the CPU already."""
        return self

    def record_stream(self, stream: object) -> None:
        """There are no streams on the CPU."""


def production(rows: int, samples: int) -> Draw:
    """Zipf-distributed ids, the popular ones scattered over the table, in histories as long as ml-latest-small's."""
    popularity = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    scattered, lengths = np.random.default_rng(SEED).permutation(rows), _ratings().lengths

    def draw(step: int, rank: int) -> tuple[Ids, Ids]:
        random = np.random.default_rng([SEED, step, rank])
        chosen = random.choice(lengths, samples)
        return scattered[np.searchsorted(popularity, random.random(chosen.sum()) * popularity[-1])], chosen

    return draw


def hard(samples: int) -> tuple[int, Draw]:
    """Rows of the table, and the latest items of ml-latest-small's users: next to no row is free of collisions."""
    known = _ratings()

    def draw(step: int, rank: int) -> tuple[Ids, Ids]:
        users = np.random.default_rng([SEED, step, rank]).choice(len(known.lengths), samples)
        parts = [known.items[known.offsets[user] : known.offsets[user + 1]][-LONGEST:] for user in users]
        return np.concatenate(parts), np.array([len(part) for part in parts])

    return known.num_items, draw


def batches(draw: Draw, steps: int, rank: int) -> list[Batch]:
    """The batches of one rank."""
    drawn = [draw(step, rank) for step in range(steps)]
    return [Batch(_features(torch.from_numpy(ids), torch.from_numpy(lengths))) for ids, lengths in drawn]


def collisions(draw: Draw, steps: int, world: int, rows: int) -> dict[str, float]:
    """Exact shares of contended rows: those which the global batch before or after needs as well, of all but the ends."""
    ids = [[draw(step, rank)[0] for rank in range(world)] for step in range(steps)]
    everyones = [np.unique(np.concatenate(parts)) for parts in ids]
    collided = union = tokens = unique = contended = 0
    for step in range(1, steps - 1):
        before, now, after = everyones[step - 1 : step + 2]
        collided, union = collided + np.isin(now, before).sum(), union + len(now)
        for rank, own in enumerate(ids[step]):
            sent = own[own // -(-rows // world) != rank]  # TorchRec cuts the table into one block of rows per rank
            once = np.unique(sent)
            tokens, unique = tokens + 2 * len(sent), unique + 2 * len(once)
            contended += np.isin(once, before).sum() + np.isin(once, after).sum()  # fetched, and sent back as gradients
    return {
        "collision_rate": float(collided / union),
        "tokens_per_rank": float(np.mean([len(own) for parts in ids for own in parts])),
        "unique_per_rank": float(np.mean([len(np.unique(own)) for parts in ids for own in parts])),
        "predicted_reduction_vs_plain": float(1 - contended / tokens),
        "predicted_reduction_vs_dedup": float(1 - contended / unique),
    }


def _features(ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], ids, lengths=lengths.int())


def _ratings() -> Histories:
    return read_interactions(RATINGS, user="userId", item="movieId", time="timestamp", order="sort", ties="keep")
