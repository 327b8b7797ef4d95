"""What balancing brings for the steps of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_freescale.balance.assign import assign, deal, imbalance
from lightning_freescale.balance.sampler import BalancedSampler


@dataclass(frozen=True)
class BalanceReport:
    """Imbalance over the steps of an epoch, each weighted by its cost (so 1 - 1/imbalance is the idle share).

    Attributes:
        before: imbalance of the samples as drawn.
        after: imbalance of the balanced assignment.
        lower_bound: what no assignment with equal counts can beat.
    """

    before: float
    after: float
    lower_bound: float

    @classmethod
    def of_epoch(cls, sampler: BalancedSampler, epoch: int = 0) -> BalanceReport:
        """Plan every step of ``epoch`` both ways."""
        mean, rows = 0.0, []
        for step in range(len(sampler)):
            cost = sampler.costs[sampler.global_batch(epoch, step)]
            best = assign(cost, sampler.num_replicas)
            drawn = imbalance(cost, deal(len(cost), sampler.num_replicas), sampler.num_replicas)
            rows.append(np.array([drawn, best.imbalance, best.lower_bound]) * cost.sum())
            mean += cost.sum()
        before, after, bound = np.sum(rows, axis=0) / mean if mean else (1.0, 1.0, 1.0)
        return cls(float(before), float(after), float(bound))
