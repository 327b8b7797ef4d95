"""Lookups outside of training steps: those of validation, test and prediction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.batch_state import EvaluationLookup
from lightning_freescale.embeddings.overlap.catalogue_table import CatalogueTable
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection
from lightning_freescale.embeddings.overlap.shard_ranks import RankedSamples, ranks_over_shards


class Evaluation:
    """Makes lookups outside of steps, of which every rank may make other ones, and another number.

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
        lookups = {each: EvaluationLookup(number, ids if each in mine else None) for each in collections}
        found = {first: first.wait_for_evaluation(first.submit_evaluation(lookups[first]), lookups[first])}
        numbers = set(lookups[first].modules) - {0}
        looked_up = [each - 1 for each in sorted(numbers) if each <= len(modules)]
        others = [each for module in looked_up for each in modules[module] if each is not first]
        jobs = [each.submit_evaluation(lookups[each]) for each in others]  # of all, before any is waited for
        found |= {each: each.wait_for_evaluation(job, lookups[each]) for each, job in zip(others, jobs)}
        results = [found[each] for each in mine]
        for other in sorted(numbers)[len(looked_up) :]:
            table = self.tables[other - len(modules) - 1]
            asks = samples is not None and other == number
            ranks = ranks_over_shards(table, samples if samples is not None and asks else RankedSamples.none(table))
            results += [ranks] if asks else []
        return numbers, results
