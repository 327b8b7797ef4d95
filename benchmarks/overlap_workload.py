"""Batches of the overlap benchmark, and the bytes that must be waited for by their ids alone."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from lightning_freescale.balance.micro_batches import cut
from lightning_freescale.data.interactions import Histories, read_interactions
from lightning_freescale.embeddings.row_order import RowOrder

RATINGS = Path(__file__).parents[1] / "examples" / "data" / "ml-latest-small" / "ratings.csv.gz"
SEED, EXPONENT, LONGEST = 20, 1.05, 200
Ids = NDArray[np.int64]
Draw = Callable[[int, int], tuple[Ids, Ids]]  # of a step and a rank: ids, and the lengths of their histories


@dataclass
class Batch(Pipelineable):
    """The batch of one rank in one step.

    Attributes:
        features: the ids to look up.
        inverse: the looked up row of each item of the histories; None if each item has its own.
    """

    features: KeyedJaggedTensor
    inverse: Tensor | None = None

    def deduplicated(self) -> Batch:
        """Return the batch with each id looked up once."""
        once, inverse = torch.unique(self.features.values(), return_inverse=True)
        return Batch(_features(once, torch.tensor([len(once)])), inverse)

    def in_micro_batches(self, count: int) -> list[Batch]:
        """Return the batch cut by numbers of ids, as the package cuts a rank's samples."""
        lengths, values = self.features.lengths().long(), self.features.values()
        samples, costs = list(zip(values.split(lengths.tolist()), lengths)), lengths.double().numpy()
        parts = cut(samples, count, costs, np.ones(len(costs))).batches
        return [Batch(_features(torch.cat([ids for ids, _ in part]), torch.stack([n for _, n in part]))) for part in parts]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch, which is on the CPU already."""
        return self

    def record_stream(self, stream: object) -> None:
        """Do nothing, because the CPU has no streams."""


def production(rows: int, samples: int, by_popularity: bool = False) -> Draw:
    """Return Zipf-distributed ids in histories with the lengths of ml-latest-small; popular ids are scattered, or first."""
    popularity = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    item_of_rank = np.arange(rows) if by_popularity else np.random.default_rng(SEED).permutation(rows)
    lengths = _ratings().lengths

    def draw(step: int, rank: int) -> tuple[Ids, Ids]:
        random = np.random.default_rng([SEED, step, rank])
        chosen = random.choice(lengths, samples)
        return item_of_rank[np.searchsorted(popularity, random.random(chosen.sum()) * popularity[-1])], chosen

    return draw


def hard(samples: int) -> tuple[int, Draw]:
    """Return rows of the table, and the latest items of ml-latest-small's users; nearly all rows collide."""
    known = _ratings()

    def draw(step: int, rank: int) -> tuple[Ids, Ids]:
        users = np.random.default_rng([SEED, step, rank]).choice(len(known.lengths), samples)
        parts = [known.items[known.offsets[user] : known.offsets[user + 1]][-LONGEST:] for user in users]
        return np.concatenate(parts), np.array([len(part) for part in parts])

    return known.num_items, draw


def histories(path: Path, samples: int) -> tuple[int, Draw]:
    """Return rows of the table, and whole histories of a file, ``.npz`` with items and offsets, or ``.txt.gz``."""
    if path.suffix == ".npz":
        stored = np.load(path)
        items, offsets = stored["items"].astype(np.int64), stored["offsets"]
    else:
        with gzip.open(path, "rt") as file:
            known = [np.array(line.split()[1:], np.int64) for line in file]
        items, offsets = np.concatenate(known), np.cumsum([0, *(len(each) for each in known)])

    def draw(step: int, rank: int) -> tuple[Ids, Ids]:
        users = np.random.default_rng([step, rank]).integers(0, len(offsets) - 1, samples)
        parts = [items[offsets[user] : offsets[user + 1]] for user in users]
        return np.concatenate(parts), np.array([len(part) for part in parts])

    return int(items.max()) + 1, draw


def batches(draw: Draw, steps: int, rank: int) -> list[Batch]:
    """Return the batches of one rank."""
    drawn = [draw(step, rank) for step in range(steps)]
    return [Batch(_features(torch.from_numpy(ids), torch.from_numpy(lengths))) for ids, lengths in drawn]


def collisions(draw: Draw, steps: int, world: int, rows: int, micro_batches: Sequence[int] = ()) -> dict[str, float]:
    """Return exact shares of colliding rows, which the global batch before or after also needs, of all steps but the ends.

    In micro-batches: the rows of a step's first part that the step before updates, and those of its last part that the first
    part of the next step needs.
    """
    ids = [[draw(step, rank)[0] for rank in range(world)] for step in range(steps)]
    everyones = [np.unique(np.concatenate(parts)) for parts in ids]
    order = RowOrder(rows)  # TorchRec cuts the table into one block of rows per rank
    cuts = {
        count: [[_cut(draw(step, rank), count) for rank in range(world)] for step in range(steps)] for count in micro_batches
    }
    collided, sent = np.zeros(2), {"plain": np.zeros(2), "dedup": np.zeros(2), "colliding": np.zeros(2)}
    for before, now, after, parts in zip(everyones, everyones[1:], everyones[2:], ids[1:]):
        collided += np.isin(now, before).sum(), len(now)
        once = [np.unique(own) for own in parts]
        sent["plain"] += 2 * _transferred(parts, order)  # rows in one direction, and their gradients in the other
        sent["dedup"] += 2 * _transferred(once, order)
        sent["colliding"] += sum(_transferred([own[np.isin(own, other)] for own in once], order) for other in (before, after))
    waited = {count: _waited_in_micro_batches(parts, everyones, order) for count, parts in cuts.items()}
    figures = {
        "collision_rate": collided[0] / collided[1],
        "tokens_per_rank": np.mean([len(own) for parts in ids for own in parts]),
        "unique_per_rank": np.mean([len(np.unique(own)) for parts in ids for own in parts]),
    }
    for other in ("plain", "dedup"):
        predicted = 1 - sent["colliding"] / sent[other]
        figures |= {f"predicted_reduction_vs_{other}": predicted[0], f"predicted_busiest_vs_{other}": predicted[1]}
        figures |= {f"predicted_micro_{count}_vs_{other}": 1 - (sums / sent[other])[0] for count, sums in waited.items()}
    return {name: float(value) for name, value in figures.items()}


def requests(ids: list[Ids], order: RowOrder) -> NDArray[np.int64]:
    """Return the rows that each rank (first dimension) requests from each owner, whose rows are a block of ``order``."""
    block = -(-order.rows // len(ids))
    positions = [order.positions(torch.from_numpy(own)).numpy() for own in ids]
    return np.array([np.bincount(own // block, minlength=len(ids)) for own in positions])


def _cut(drawn: tuple[Ids, Ids], count: int) -> list[Ids]:
    """Return the unique ids of each micro-batch."""
    ids, lengths = drawn
    batch = Batch(_features(torch.from_numpy(ids), torch.from_numpy(lengths)))
    return [np.unique(part.features.values().numpy()) for part in batch.in_micro_batches(count)]


def _waited_in_micro_batches(steps: list[list[list[Ids]]], everyones: list[Ids], order: RowOrder) -> NDArray[np.float64]:
    """Return rows and gradients to wait for: ``steps[step][rank][part]`` are ids, ``everyones[step]`` all ids of a step."""
    waited = np.zeros(2)
    for before, parts, after in zip(everyones, steps[1:], steps[2:]):
        next_firsts = np.unique(np.concatenate([of_rank[0] for of_rank in after]))
        waited += _transferred([of_rank[0][np.isin(of_rank[0], before)] for of_rank in parts], order)
        waited += _transferred([of_rank[-1][np.isin(of_rank[-1], next_firsts)] for of_rank in parts], order)
    return waited


def _transferred(ids: list[Ids], order: RowOrder) -> NDArray[np.float64]:
    """Return the rows that ranks fetch from others: of all together, and over one direction of the busiest link."""
    owners = requests(ids, order)
    np.fill_diagonal(owners, 0)
    return np.array([owners.sum(), max(owners.sum(axis=0).max(), owners.sum(axis=1).max())], dtype=float)


def _features(ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], ids, lengths=lengths.int())


def _ratings() -> Histories:
    return read_interactions(RATINGS, user="userId", item="movieId", time="timestamp", order="sort", ties="keep")
