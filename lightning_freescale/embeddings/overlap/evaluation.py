"""Lookups outside of training steps: those of validation, test and prediction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.batch_state import EvaluationLookup
from lightning_freescale.embeddings.overlap.collection import OverlappedCollection


class Evaluation:
    """Makes lookups outside of steps, of which every rank may make other ones, and another number.

    A lookup is one round of all ranks. Its first message, which the first collection sends, tells which module each rank looks
    up. Then the collections of these modules exchange their rows. A rank that looks up nothing more joins the rounds of the
    others in :meth:`serve`.

    Attributes:
        modules: the parts of each module, by its path; in the same order on all ranks.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Sequence[OverlappedCollection]] = {}

    def rows(self, path: str, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Return the rows of a lookup of the module at ``path`` by its parts, each of shape ``[ids, dim]``."""
        return self._round(path, ids)[1]

    def serve(self) -> None:
        """Give the other ranks the rows that they look up, until every rank has called this method."""
        while self.modules and self._round(None, None)[0]:
            pass

    def _round(self, path: str | None, ids: KeyedJaggedTensor | None) -> tuple[set[int], list[Tensor]]:
        """Look up a module, or none; return the numbers of the modules that the ranks have looked up, and the rows."""
        modules, number = list(self.modules.values()), 0 if path is None else 1 + list(self.modules).index(path)
        collections = [part for parts in modules for part in parts]
        for each in collections:
            each.drain()
        first = collections[0]
        mine = modules[number - 1] if number else []
        lookups = {each: EvaluationLookup(number, ids if each in mine else None) for each in collections}
        found = {first: first.wait_for_evaluation(first.submit_evaluation(lookups[first]), lookups[first])}
        looked_up = set(lookups[first].modules) - {0}
        others = [each for other in sorted(looked_up) for each in modules[other - 1] if each is not first]
        jobs = [each.submit_evaluation(lookups[each]) for each in others]  # of all, before any is waited for
        found |= {each: each.wait_for_evaluation(job, lookups[each]) for each, job in zip(others, jobs)}
        return looked_up, [found[each] for each in mine]
