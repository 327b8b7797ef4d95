"""Lookups outside of training steps, and ranks of targets among all items: validation, test and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.catalogue_table import CatalogueTable
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection

_CHUNK_SCORES = 2**23
"""Scores that exist at once: 64 MiB in float64."""


@dataclass(frozen=True)
class RankedSamples:
    """The samples of one rank, for :func:`lightning_freescale.metrics.catalogue_ranks`.

    Attributes:
        hidden: a state for each sample, shape ``[samples, dim]``.
        targets: rows of the table, int64 of shape ``[samples]``.
        seen: rows of the table that do not compete, int64 of shape ``[samples, any]``; negative numbers fill rows up.
        items: which rows of the table are items.
    """

    hidden: Tensor
    targets: Tensor
    seen: Tensor
    items: range

    @classmethod
    def none(cls, table: CatalogueTable) -> RankedSamples:
        """Return no samples, with which a rank serves the others."""
        rows, nothing = table.weight, torch.empty(0, dtype=torch.int64, device=table.weight.device)
        return cls(rows[:0], nothing, nothing.view(0, 0), range(table.table.rows))


@torch.no_grad()
def ranks_over_shards(table: CatalogueTable, samples: RankedSamples) -> Tensor:
    """Return how many items come before each target of this rank: int64 of shape ``[samples]``. Collective.

    Scores are computed in float64 and rounded to float32: what is equal stays equal on all shards, however they are multiplied.
    """
    count, rows, ids = len(samples.targets), table.weight.double(), table.ids
    positions = table.positions(count)
    of_items = torch.tensor([[samples.items.start, samples.items.stop]], device=rows.device).expand(count, 2)
    every, wanted, limits = positions.gather(samples.hidden.float(), samples.targets, of_items)
    samples_seen, columns = (samples.seen >= 0).nonzero(as_tuple=True)
    pairs = table.positions(len(columns))
    before = sum(positions.counts[: table.rank])
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
        come_before = ~(scores < hits[part, None])  # also what compares with nothing
        come_before &= (ids >= limits[part, :1]) & (ids < limits[part, 1:])
        for which, place in ((here, places[here]), (seen_by, seen)):
            inside = (which >= start) & (which < start + size)
            come_before[which[inside] - start, place[inside]] = False
        found[part] = come_before.sum(1)
    return positions.to_ranks(found)().sum(0)


class Evaluation:
    """Makes lookups outside of steps. Ranks may look up different modules, and make different numbers of lookups.

    A lookup is one round of all ranks. Its first message, which the first collection sends, tells which module each rank looks
    up, or by which table it ranks samples. Then the collections of these modules exchange their rows, and the ranks what these
    tables need of the samples. A rank that looks up nothing more joins the rounds of the others in :meth:`serve`.

    Attributes:
        modules: the parts of each module, by its path; in the same order on all ranks.
        tables: those that rank samples; in the same order on all ranks.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Sequence[OverlappedCollection]] = {}
        self.tables: list[CatalogueTable] = []

    def rows(self, path: str, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Return the rows of a lookup of the module at ``path`` by its parts, each of shape ``[ids, dim]``."""
        return self._round(1 + list(self.modules).index(path), ids)[1]

    def ranks(
        self, table: CatalogueTable, hidden: Tensor, targets: Tensor, seen: Tensor | None, items: range | None = None
    ) -> Tensor | None:
        """Return how many items of a table come before each target, as :class:`RankedSamples` has them; None in a step."""
        if table.in_step:
            return None
        seen = targets.new_empty(len(targets), 0) if seen is None else seen
        samples = RankedSamples(hidden, targets, seen, range(table.table.rows) if items is None else items)
        return self._round(1 + len(self.modules) + self.tables.index(table), samples=samples)[1][0]

    def serve(self) -> None:
        """Give the other ranks the rows that they look up, until every rank has called this method."""
        while self.modules and self._round(0)[0]:
            pass

    def _round(
        self, number: int, ids: KeyedJaggedTensor | None = None, samples: RankedSamples | None = None
    ) -> tuple[set[int], list[Tensor]]:
        """Do what has a number: look up a module, rank samples by a table, or, for 0, serve.

        Returns:
            The numbers of all ranks, and the rows, or the places of the samples.
        """
        modules = list(self.modules.values())
        collections = [part for parts in modules for part in parts]
        for each in collections:
            each.drain()
        first = collections[0]
        mine = modules[number - 1] if ids is not None else []
        told, found = first.evaluated(first.submit_evaluation(number, ids if first in mine else None))
        rows, numbers = {first: found}, set(told) - {0}
        looked_up = [each - 1 for each in sorted(numbers) if each <= len(modules)]
        others = [each for module in looked_up for each in modules[module] if each is not first]
        # of all, before any is waited for
        jobs = [(each, each.submit_evaluation(number, ids if each in mine else None)) for each in others]
        rows |= {each: each.evaluated(job)[1] for each, job in jobs}
        results = [rows[each] for each in mine]
        for other in sorted(numbers)[len(looked_up) :]:
            table = self.tables[other - len(modules) - 1]
            asks = samples is not None and other == number
            ranks = ranks_over_shards(table, samples if samples is not None and asks else RankedSamples.none(table))
            results += [ranks] if asks else []
        return numbers, results
