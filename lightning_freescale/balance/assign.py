"""Which rank computes which sample of a global batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.arguments import Mode, check, per_sample, problem_of, slowness, units
from lightning_freescale.balance.solver import Ints, Problem, first_plan, lower_bound, refine, zigzag

CLOSE_ENOUGH = 1.001
"""Refinement stops within this factor of the lower bound."""


@dataclass(frozen=True)
class Assignment:
    """The ranks of one global batch, with what they cost.

    Attributes:
        rank_of_sample: int array of shape ``[samples]``.
        imbalance: max over ranks of cost / mean over ranks; with ``rank_speeds``, the slowest rank's time / the time that
            all would need if the work were spread perfectly.
        lower_bound: the imbalance that no assignment within the mode's limits on the counts can beat.
        tokens_imbalance: max over ranks of tokens / mean over ranks; None if no tokens were given.
        dominated: a single sample costs more than the mean rank load.
    """

    rank_of_sample: NDArray[np.int64]
    imbalance: float
    lower_bound: float
    tokens_imbalance: float | None
    dominated: bool

    @property
    def gap(self) -> float:
        """How far the imbalance is above the lower bound, as a share of it."""
        return self.imbalance / self.lower_bound - 1


def assign(
    costs: ArrayLike,
    ranks: int,
    *,
    mode: Mode = "fixed",
    count_slack: float = 0.25,
    max_tokens_per_rank: float | None = None,
    tokens: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    rank_speeds: ArrayLike | None = None,
) -> Assignment:
    """Share the samples of a step out so that all ranks finish together.

    Longest processing time first within the limits (Graham 1969), then swaps and moves between the slowest and the quickest
    ranks until the lower bound is reached within 0.1 %, or a fixed number of rounds is over. Never worse than the paper's
    zig-zag deal, if that keeps the limits. A pure function of its arguments in whole numbers: every rank computes the same
    plan by itself. Every rank gets at least one sample.

    Args:
        costs: shape ``[samples]``, in the units of the cost model, finite and >= 0.
        ranks: how many ranks share the samples.
        mode: ``"fixed"``: equal counts, differing by one at most; ``"slack"``: a rank holds at most ``1 + count_slack`` times
            its equal share; ``"free"``: any counts; ``"zigzag"``: FreeScale's deal of the sorted samples at equal counts
            (arXiv 2604.24073), without any refinement, for comparison.
        count_slack: for ``"slack"``.
        max_tokens_per_rank: no rank gets more tokens than this (memory).
        tokens: tokens of each sample, shape ``[samples]``.
        keep_together: group of each sample, shape ``[samples]``; samples of a group go to one rank. ``"fixed"`` takes groups
            of equal size only.
        rank_speeds: relative speed of each rank, shape ``[ranks]``, > 0; all the same if not given.

    Raises:
        ValueError: an argument does not fit, or no assignment within the limits was found; names it and the fix.
    """
    cost = per_sample("costs", costs)
    check(cost, ranks, mode, count_slack)
    token = None if tokens is None else per_sample("tokens", tokens, len(cost))
    unit_of_sample = units(keep_together, len(cost))
    problem = problem_of(cost, unit_of_sample, token, max_tokens_per_rank, slowness(rank_speeds, ranks), mode, count_slack)
    rank_of_unit = zigzag(problem) if mode == "zigzag" else _search(problem)
    rank_of_sample, slowest = rank_of_unit[unit_of_sample], float(problem.times(rank_of_unit).max())
    return Assignment(
        rank_of_sample,
        slowest / problem.spread if cost.any() else 1.0,
        lower_bound(problem) / problem.spread if cost.any() else 1.0,
        None if token is None else imbalance(token, rank_of_sample, ranks),
        bool(cost.max() * ranks > cost.sum()),
    )


def deal(samples: int, ranks: int) -> NDArray[np.int64]:
    """The unbalanced assignment: contiguous runs of the drawn order, with equal counts."""
    return np.repeat(np.arange(ranks), np.asarray(counts(samples, ranks)))


def counts(samples: int, ranks: int) -> list[int]:
    """Samples per rank: equal, the first ``samples % ranks`` ranks take one more."""
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def imbalance(
    cost: NDArray[np.float64], rank_of_sample: NDArray[np.int64], ranks: int, rank_speeds: ArrayLike | None = None
) -> float:
    """Max over ranks of cost / mean over ranks, see :class:`Assignment`; 1.0 when all costs are zero."""
    speeds = np.ones(ranks) if rank_speeds is None else np.asarray(rank_speeds, dtype=np.float64)
    loads = np.bincount(rank_of_sample, weights=cost, minlength=ranks)
    return float((loads / speeds).max() * speeds.sum() / loads.sum()) if loads.any() else 1.0


def _search(problem: Problem) -> Ints:
    found = first_plan(problem)
    if found is None:
        raise ValueError(
            f"assign: no place was found for every sample or group on {problem.ranks} ranks with at most {problem.most} "
            f"samples and max_tokens_per_rank={problem.token_limit} each. Allow more of what is scarce, or use more ranks"
        )
    if problem.plain:  # else the deal may break a limit
        dealt = zigzag(problem)
        found = min(found, dealt, key=lambda plan: problem.times(plan).max())
    return refine(problem, found, CLOSE_ENOUGH * lower_bound(problem))
