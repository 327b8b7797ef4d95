"""The place of each target among all items of a sharded table, outside of training steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.catalogue_table import CatalogueTable

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
