"""The plan of one step: who computes which sample, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import Assignment, assign, bound_of, deal, imbalance
from lightning_freescale.balance.report import StepBalance


@dataclass(frozen=True)
class StepPlan:
    """One step of all ranks.

    Attributes:
        samples: indices into the data set in drawn order, shape ``[samples]``.
        costs: theirs, shape ``[samples]``.
        ranks: how many ranks share the step.
        balanced: assigned by cost; else contiguous runs of the drawn order.
        options: keyword arguments of :func:`assign` for these samples.
    """

    samples: NDArray[np.int64]
    costs: NDArray[np.float64]
    ranks: int
    balanced: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def best(self) -> Assignment:
        """The balanced assignment."""
        return assign(self.costs, self.ranks, **self.options)

    @cached_property
    def rank_of_sample(self) -> NDArray[np.int64]:
        """Shape ``[samples]``."""
        return self.best.rank_of_sample if self.balanced else deal(len(self.samples), self.ranks)

    @cached_property
    def parts(self) -> list[NDArray[np.int64]]:
        """Indices into the data set for every rank."""
        ends = np.bincount(self.rank_of_sample, minlength=self.ranks).cumsum()
        return np.split(self.samples[np.argsort(self.rank_of_sample, kind="stable")], ends[:-1])

    @cached_property
    def balance(self) -> StepBalance:
        """What the assignment is worth."""
        speeds, tokens = self.options.get("rank_speeds"), self.options.get("tokens")
        dealt = deal(len(self.samples), self.ranks)
        bound = (
            (self.best.lower_bound, self.best.dominated) if self.balanced else bound_of(self.costs, self.ranks, **self.options)
        )
        return StepBalance(
            before=imbalance(self.costs, dealt, self.ranks, speeds),
            after=imbalance(self.costs, self.rank_of_sample, self.ranks, speeds),
            lower_bound=bound[0],
            dominated=bound[1],
            tokens_imbalance=None if tokens is None else imbalance(tokens, self.rank_of_sample, self.ranks),
            cost=float(self.costs.sum()),
        )
