"""Which rank computes which sample of a global batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import Ints, Problem, first_plan, lower_bound, refine, whole, zigzag
from lightning_freescale.balance.validation import Mode, check, per_sample, problem_of, slowness, units

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
        tokens: tokens of each sample, shape ``[samples]``; rounded up to whole tokens, the limit down.
        keep_together: group of each sample, shape ``[samples]``; samples of a group go to one rank. ``"fixed"`` takes groups
            of equal size only.
        rank_speeds: relative speed of each rank, shape ``[ranks]``, > 0; all the same if not given.

    Raises:
        ValueError: an argument does not fit, or no assignment within the limits was found; names it and the fix.
    """
    problem, cost, token, unit_of_sample = _prepare(
        costs, ranks, mode, count_slack, max_tokens_per_rank, tokens, keep_together, rank_speeds
    )
    rank_of_unit = _dealt(problem) if mode == "zigzag" else _search(problem)
    rank_of_sample, slowest = rank_of_unit[unit_of_sample], float(problem.times(rank_of_unit).max())
    return Assignment(
        rank_of_sample,
        slowest / problem.spread if cost.any() else 1.0,
        _bound(problem, cost),
        None if token is None else imbalance(token, rank_of_sample, ranks),
        _dominated(cost, ranks),
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
    slow = slowness(rank_speeds, ranks)
    return imbalance_of(np.bincount(rank_of_sample, weights=cost, minlength=ranks), slow)


def imbalance_of(loads: NDArray[Any], slow: Ints | None = None) -> float:
    """The same of summed costs, shape ``[ranks]``; ``slow`` is each rank's time per cost."""
    pace = np.ones(len(loads)) if slow is None else slow
    return float((loads * pace).max() * (1.0 / pace).sum() / loads.sum()) if loads.any() else 1.0


def bound_of(costs: ArrayLike, ranks: int, **options: Any) -> tuple[float, bool]:
    """``lower_bound`` and ``dominated`` as :func:`assign` would give them, without looking for a plan."""
    problem, cost, _, _ = _prepare(costs, ranks, **options)
    return _bound(problem, cost), _dominated(cost, ranks)


def _prepare(
    costs: ArrayLike,
    ranks: int,
    mode: Mode = "fixed",
    count_slack: float = 0.25,
    max_tokens_per_rank: float | None = None,
    tokens: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    rank_speeds: ArrayLike | None = None,
) -> tuple[Problem, NDArray[np.float64], NDArray[np.float64] | None, Ints]:
    """The problem in whole numbers, costs, tokens, and the unit of every sample."""
    cost = per_sample("assign", "costs", costs)
    check(cost, ranks, mode, count_slack)
    token = None if tokens is None else per_sample("assign", "tokens", tokens, len(cost))
    unit_of_sample = units(keep_together, len(cost))
    slow = slowness(rank_speeds, ranks)
    return problem_of(cost, unit_of_sample, token, max_tokens_per_rank, slow, mode, count_slack), cost, token, unit_of_sample


def _bound(problem: Problem, cost: NDArray[np.float64]) -> float:
    return lower_bound(problem) / problem.spread if cost.any() else 1.0


def _dominated(cost: NDArray[np.float64], ranks: int) -> bool:
    return bool(cost.max() * ranks > cost.sum())


def _dealt(problem: Problem) -> Ints:
    dealt = zigzag(problem)
    if not problem.allows(dealt):
        raise ValueError(
            f"assign(mode='zigzag', max_tokens_per_rank={problem.token_limit}): the deal gives a rank more tokens, and is not "
            "refined. Use another mode, or no limit"
        )
    return dealt


def _search(problem: Problem) -> Ints:
    dealt = zigzag(problem)
    found = [plan for plan in (first_plan(problem), dealt) if plan is not None and (problem.plain or problem.allows(plan))]
    if not found and problem.tokens is not None:  # balancing the tokens is the best that can be done for their limit
        tokens = whole(problem.tokens.astype(np.float64), np.ones_like(problem.slowness))
        plan = _search(replace(problem, cost=tokens, tokens=None, slowness=np.ones_like(problem.slowness)))
        found = [plan] if problem.allows(plan) else []
    if not found:
        raise ValueError(
            f"assign: no place was found for every sample or group on {problem.ranks} ranks with at most {problem.most} "
            f"samples and max_tokens_per_rank={problem.token_limit} each. Allow more of what is scarce, or use more ranks"
        )
    best = min(found, key=lambda plan: problem.times(plan).max())
    return refine(problem, best, CLOSE_ENOUGH * lower_bound(problem))
