"""Which rank computes which sample of a global batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import Ints, Problem, first_plan, lower_bound, refine, to_integers, zigzag
from lightning_freescale.balance.validation import AssignmentMode, Floats, problem_from_arguments, slowness

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

    rank_of_sample: Ints
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
    assignment_mode: AssignmentMode = "fixed",
    count_slack: float = 0.25,
    max_tokens_per_rank: float | None = None,
    tokens: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    rank_speeds: ArrayLike | None = None,
) -> Assignment:
    """Share the samples of a step out so that all ranks finish together.

    Longest processing time first within the limits (Graham 1969), then swaps and moves between the slowest and the quickest
    ranks until the lower bound is reached within 0.1 %, or a fixed number of rounds is over. Never worse than the paper's
    zig-zag, if that keeps the limits. A pure function of its arguments in whole numbers: every rank computes the same plan
    by itself. Every rank gets at least one sample.

    Args:
        costs: shape ``[samples]``, in the units of the cost model, finite and >= 0.
        ranks: how many ranks share the samples.
        assignment_mode: ``"fixed"``: equal counts, differing by one at most; ``"slack"``: a rank holds at most
            ``1 + count_slack`` times its equal share; ``"free"``: any counts; ``"zigzag"``: FreeScale's zig-zag through the
            sorted samples at equal counts (arXiv 2604.24073), without any refinement, for comparison.
        count_slack: for ``"slack"``.
        max_tokens_per_rank: no rank gets more tokens than this (memory).
        tokens: tokens of each sample, shape ``[samples]``; rounded up to whole tokens, the limit down.
        keep_together: group of each sample, shape ``[samples]``; samples of a group go to one rank. ``"fixed"`` takes groups
            of equal size only.
        rank_speeds: relative speed of each rank, shape ``[ranks]``, > 0; all the same if not given.

    Raises:
        ValueError: an argument does not fit, or no assignment within the limits was found; names it and the fix.

    Examples:
        >>> plan = assign([900, 40, 30, 20, 400, 10, 350, 60], ranks=2, assignment_mode="free")
        >>> plan.rank_of_sample
        array([0, 1, 1, 1, 1, 0, 1, 1])
        >>> round(plan.imbalance, 3), plan.dominated
        (1.006, False)
    """
    problem, cost, token, group_of_sample = problem_from_arguments(
        costs, ranks, assignment_mode, count_slack, max_tokens_per_rank, tokens, keep_together, rank_speeds
    )
    rank_of_group = _zigzag_within_limits(problem) if assignment_mode == "zigzag" else _search(problem)
    rank_of_sample = rank_of_group[group_of_sample]
    bound, dominated = _bound(problem, cost)
    return Assignment(
        rank_of_sample,
        float(problem.times(rank_of_group).max()) / problem.ideal_time if cost.any() else 1.0,
        bound,
        None if token is None else imbalance(token, rank_of_sample, ranks),
        dominated,
    )


def contiguous_split(samples: int, ranks: int) -> Ints:
    """Return the rank of every sample without balancing, shape ``[samples]``: runs of the drawn order, at equal counts."""
    return np.repeat(np.arange(ranks), np.asarray(equal_counts(samples, ranks)))


def equal_counts(samples: int, ranks: int) -> list[int]:
    """Return the samples per rank: equal, the first ``samples % ranks`` ranks take one more."""
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def imbalance(cost: Floats, rank_of_sample: Ints, ranks: int, rank_speeds: ArrayLike | None = None) -> float:
    """Return the max over ranks of cost / mean over ranks, see :class:`Assignment`; 1.0 when all costs are zero."""
    loads = np.bincount(rank_of_sample, weights=cost, minlength=ranks)
    return load_imbalance(loads, slowness(rank_speeds, ranks))


def load_imbalance(loads: NDArray[Any], slow: Ints | None = None) -> float:
    """Return the same for summed costs, shape ``[ranks]``; ``slow`` is each rank's time per cost."""
    pace = np.ones(len(loads)) if slow is None else slow
    return float((loads * pace).max() * (1.0 / pace).sum() / loads.sum()) if loads.any() else 1.0


def assignment_bound(costs: ArrayLike, ranks: int, **options: Any) -> tuple[float, bool]:
    """Return ``lower_bound`` and ``dominated`` as :func:`assign` would with the same arguments, without a search."""
    problem, cost, _, _ = problem_from_arguments(costs, ranks, **options)
    return _bound(problem, cost)


def _bound(problem: Problem, cost: Floats) -> tuple[float, bool]:
    bound = lower_bound(problem) / problem.ideal_time if cost.any() else 1.0
    return bound, bool(cost.max() * problem.ranks > cost.sum())


def _zigzag_within_limits(problem: Problem) -> Ints:
    plan = zigzag(problem)
    if not problem.allows(plan):
        raise ValueError(
            f"assign(assignment_mode='zigzag', max_tokens_per_rank={problem.max_tokens}): it gives a rank more tokens, and is "
            "not refined. Use another assignment_mode, or no limit"
        )
    return plan


def _search(problem: Problem) -> Ints:
    found = [plan for plan in (first_plan(problem), zigzag(problem)) if plan is not None and problem.allows(plan)]
    if not found and problem.tokens is not None:  # balancing the tokens is the best that can be done for their limit
        same_speed = np.ones_like(problem.slowness)
        tokens = to_integers(problem.tokens.astype(np.float64), same_speed)
        plan = _search(replace(problem, cost=tokens, tokens=None, slowness=same_speed))
        found = [plan] if problem.allows(plan) else []
    if not found:
        raise ValueError(
            f"assign: no place was found for every sample or group on {problem.ranks} ranks with at most {problem.max_samples} "
            f"samples and max_tokens_per_rank={problem.max_tokens} each. Allow more of what is scarce, or use more ranks"
        )
    best = min(found, key=lambda plan: problem.times(plan).max())
    # Longer searches were tried: exhaustive swaps with the slowest rank won 0.2 % in one batch of forty, at three times the
    # worst runtime.
    return refine(problem, best, CLOSE_ENOUGH * lower_bound(problem))
