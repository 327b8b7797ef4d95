"""A sharded table in losses over all items, and ranks of targets among all items.

In training, a loss uses the rows of each rank; otherwise it uses a copy of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division

from lightning_freescale.embeddings.collections import Table
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.losses import CatalogueRows, Positions

_ROWS_AT_ONCE = 2**18
"""The number of rows in one lookup for a copy of the whole table."""

_CHUNK_SCORES = 2**23
"""The number of scores in memory at once: 64 MiB in float64."""


class CatalogueTable:
    """Provides the rows of a table for losses, as the attribute ``freescale_catalogue`` of its weight.

    ``part`` is the part of the table's module that has the table, and ``number`` its index. ``look_up`` looks up ``features``,
    all features of the module.
    """

    def __init__(
        self,
        table: Table,
        features: list[str],
        part: OverlappedCollection,
        look_up: Callable[[KeyedJaggedTensor], list[Tensor]],
        number: int,
        tables: ShardedTables,
    ) -> None:
        self.table, self._part, self._look_up, self._number, self._tables = table, part, look_up, number, tables
        self._features = features
        self.index = next(i for i, each in enumerate(part.local.layout.tables) if each.name == table.name)
        self.has_whole_rows = part.local.layout.tables[self.index].dim == table.dim  # whether no row is split between ranks
        self.copied: Tensor | None = None

    def __call__(self) -> Tensor | CatalogueShard:
        """Return this rank's rows for a loss of the current step, or a copy of the table under ``no_grad``. Collective.

        The rows have all updates of earlier steps. Other uses outside of a step, and split columns, are a ValueError.
        """
        key = self.table.key
        if not self.has_whole_rows:
            raise ValueError(
                f"A loss over all rows of {key!r} needs whole rows, but the plan splits the columns of the table. Leave out "
                "plan=, or shard the table row-wise."
            )
        if not torch.is_grad_enabled():
            return self.whole()
        if not self.in_step:
            raise ValueError(
                f"A loss over all rows of {key!r} outside of a training step would not train them. Compute it in "
                "training_step, or under torch.no_grad(). "
                f"full_weight({key.removesuffix('.weight')!r}) returns a copy of the table."
            )
        self._part.begin_whole_use(self.index)
        return CatalogueShard(self)

    def whole(self) -> Tensor:
        """Return a copy of the table in the order of the ids, which is valid until the next step. Collective."""
        if self.copied is None:
            feature, parts = self.table.features[0], []
            # other tables may have the same feature
            place = [index for name, index in self._part.local.layout.features if name == feature].index(self.index)
            with torch.no_grad():
                for start in range(0, self.table.rows, _ROWS_AT_ONCE):
                    ids = torch.arange(start, min(self.table.rows, start + _ROWS_AT_ONCE), device=self._tables.device)
                    lengths = [len(ids) if feature == other else 0 for other in self._features]
                    features = KeyedJaggedTensor(
                        self._features, ids, lengths=torch.tensor(lengths, device=ids.device), length_per_key=lengths, stride=1
                    )
                    found = self._look_up(features)[self._number]
                    parts.append(found[place * len(ids) : (place + 1) * len(ids)])
            self.copied = torch.cat(parts).to(self.table.dtype)
        return self.copied

    @property
    def weight(self) -> Tensor:
        """A live view of this rank's rows, shape ``[rows, dim]``."""
        return self._part.local.weight(self.index)

    @property
    def in_step(self) -> bool:
        return self._part.step.open

    @property
    def trains(self) -> bool:
        """Whether the step updates the table."""
        return not self._part.is_frozen(self.index)

    def places(self, items: Tensor) -> Tensor:
        """Return the index of each item among this rank's rows, int64; -1 for items of other ranks."""
        here = self._part.local.places(self.index, items)
        return torch.where((here >= 0) & (here < len(self.weight)), here, -1)

    @cached_property
    def ids(self) -> Tensor:
        """The items of this rank's rows, int64 of shape ``[rows]``."""
        every = torch.arange(self.table.rows, device=self._tables.device)
        places = self.places(every)
        mine = places >= 0
        return torch.empty(len(self.weight), dtype=torch.int64, device=every.device).index_copy_(0, places[mine], every[mine])

    def positions(self, count: int) -> RankPositions:
        """Exchange the number of positions of each rank. Collective."""
        return RankPositions(self._tables.group, self._tables.message_device(), count)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a gradient of this rank's rows, summed over all ranks, to the update of the step."""
        self._part.add_gradient(self.index, gradient.div_(self._tables.group.size()) if get_gradient_division() else gradient)


class CatalogueShard(CatalogueRows):
    """This rank's rows of a table, or of its items from ``start`` to ``stop - 1``."""

    def __init__(self, table: CatalogueTable, start: int = 0, stop: int | None = None) -> None:
        self._table, self._start = table, start
        stop = table.table.rows if stop is None else stop
        self.items, self.weight = stop - start, table.weight
        self.trained = torch.empty(0, device=self.weight.device, requires_grad=table.trains)
        if self.items < table.table.rows:
            device = self.weight.device
            others = torch.cat([torch.arange(start, device=device), torch.arange(stop, table.table.rows, device=device)])
            places = table.places(others)
            self.excluded = places[places >= 0]

    def limited(self, start: int, stop: int) -> CatalogueShard:
        return CatalogueShard(self._table, self._start + start, self._start + stop)

    def positions(self, count: int) -> RankPositions:
        return self._table.positions(count)

    def places(self, items: Tensor) -> Tensor:
        return self._table.places(items + self._start)

    def select(self, by_item: Tensor) -> Tensor:
        return by_item[self._places_of_rows]  # values of excluded rows are undefined

    def spread(self, by_row: Tensor) -> Tensor:
        return by_row.new_zeros(self.items).index_add_(0, self._places_of_rows, by_row)

    def take_gradient(self, gradient: Tensor) -> None:
        self._table.add_gradient(gradient)

    @property
    def _places_of_rows(self) -> Tensor:
        return (self._table.ids - self._start).clamp_(0, self.items - 1)


class RankPositions(Positions):
    """The positions of all ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: int) -> None:
        self._group, self._device, self._count, self.rank = group, device, count, group.rank()
        counts = torch.empty(group.size(), 1, dtype=torch.int64, device=device)
        dist.all_gather(list(counts), torch.tensor([count], device=device), group=group)
        self.counts: list[int] = counts[:, 0].tolist()

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        flat = [each.detach().reshape(self._count, each.shape[1:].numel()).contiguous() for each in tensors]
        octets = torch.cat([each.view(torch.uint8) for each in flat], dim=1).to(self._device)
        most, width = max(self.counts), octets.shape[1]
        mine = torch.nn.functional.pad(octets, (0, 0, 0, most - self._count))
        came = mine.new_empty(len(self.counts), most, width)
        if most:
            dist.all_gather(list(came), mine, group=self._group)
        every = torch.cat([part[:count] for part, count in zip(came, self.counts)]).to(tensors[0].device)
        columns = every.split([each.shape[1] * each.element_size() for each in flat], dim=1)
        found = zip(columns, tensors)
        return tuple(each.contiguous().view(like.dtype).view(-1, *like.shape[1:]) for each, like in found)

    def to_ranks(self, values: Tensor) -> Callable[[], Tensor]:
        width, ranks = values.shape[1:].numel(), len(self.counts)
        sent = values.contiguous().to(self._device).view(-1)
        came = sent.new_empty(ranks * self._count * width)
        gets, gives = [self._count * width] * ranks, [count * width for count in self.counts]
        work: Any = dist.all_to_all_single(came, sent, gets, gives, group=self._group, async_op=True) if any(gives) else None

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return came.to(values.device).view(ranks, self._count, *values.shape[1:])

        return wait


@dataclass(frozen=True)
class RankedSamples:
    """The samples of one rank, for :func:`lightning_freescale.metrics.catalogue_ranks`."""

    hidden: Tensor  # a state for each sample, shape [samples, dim]
    targets: Tensor  # rows of the table, int64 of shape [samples]
    seen: Tensor  # rows of the table to exclude, int64 of shape [samples, any], padded with negative numbers
    items: range  # the rows of the table that are items

    @classmethod
    def none(cls, table: CatalogueTable) -> RankedSamples:
        """Return no samples, with which a rank serves the others."""
        rows, nothing = table.weight, torch.empty(0, dtype=torch.int64, device=table.weight.device)
        return cls(rows[:0], nothing, nothing.view(0, 0), range(table.table.rows))


@torch.no_grad()
def ranks_over_shards(table: CatalogueTable, samples: RankedSamples) -> Tensor:
    """Return how many items come before each target of this rank, int64 of shape ``[samples]``. Collective.

    Scores are computed in float64 and rounded to float32, so that equal scores are equal on all shards in any order of
    summation.
    """
    count, rows, ids = len(samples.targets), table.weight.double(), table.ids
    positions = table.positions(count)
    of_items = torch.tensor([[samples.items.start, samples.items.stop]], device=rows.device).expand(count, 2)
    every, wanted, limits = positions.gather(samples.hidden.float(), samples.targets, of_items)
    samples_seen, columns = (samples.seen >= 0).nonzero(as_tuple=True)
    pairs = table.positions(len(columns))
    before = sum(positions.counts[: positions.rank])
    seen, seen_by = pairs.gather(samples.seen[samples_seen, columns], samples_seen + before)
    places, seen_places = table.places(wanted), table.places(seen)
    seen, seen_by = seen_places[seen_places >= 0], seen_by[seen_places >= 0]
    every, here = every.double(), (places >= 0).nonzero()[:, 0]
    hits = torch.zeros(len(every), device=rows.device)
    hits[here] = (every[here] * rows[places[here]]).sum(1).float()
    (hits,) = positions.gather(positions.to_ranks(hits)().sum(0))
    found, size = torch.zeros(len(every), dtype=torch.int64, device=rows.device), max(1, _CHUNK_SCORES // max(1, len(rows)))
    for start in range(0, len(every), size):
        part = slice(start, start + size)
        scores = (every[part] @ rows.T).float()
        come_before = ~(scores < hits[part, None])  # includes NaN
        come_before &= (ids >= limits[part, :1]) & (ids < limits[part, 1:])
        for which, place in ((here, places[here]), (seen_by, seen)):
            inside = (which >= start) & (which < start + size)
            come_before[which[inside] - start, place[inside]] = False
        found[part] = come_before.sum(1)
    return positions.to_ranks(found)().sum(0)
