"""Which rank computes which sample of a global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import (
    Ints,
    Problem,
    level_tokens,
    lower_bound,
    padded_loads,
    padded_search,
    search,
    to_integers,
    zigzag,
)
from lightning_freescale.balance.validation import (
    AssignmentMode,
    Floats,
    problem_from_arguments,
    relative_slowness,
    whole_number,
)

_LEVEL = 1.02
"""Up to this imbalance, tokens are left as they are."""


@dataclass(frozen=True)
class Assignment:
    """The ranks of one global batch, with what they cost.

    Attributes:
        rank_of_sample: int array of shape ``[samples]``.
        imbalance: max over ranks of cost / mean over ranks; with ``rank_speeds``, the slowest rank's time / the time that
            all would need if the work were spread perfectly. With ``padded``, the slowest rank's time includes its padding, and
            the other time does not.
        lower_bound: the imbalance that no assignment within the mode's limits on the counts can beat.
        tokens_imbalance: max over ranks of tokens / mean over ranks; None if no tokens were given.
        dominated: a single sample costs more than the mean rank load.
        part_of_sample: which of its rank's parts computes a sample, shape ``[samples]``; None without parts.
    """

    rank_of_sample: Ints
    imbalance: float
    lower_bound: float
    tokens_imbalance: float | None
    dominated: bool
    part_of_sample: Ints | None = None

    @property
    def gap(self) -> float:
        """How far the imbalance is above the lower bound, as a share of it."""
        return self.imbalance / self.lower_bound - 1


def assign(
    costs: ArrayLike,
    ranks: int,
    *,
    assignment_mode: AssignmentMode = "fixed",
    count_slack: float | None = None,
    max_tokens_per_rank: float | None = None,
    tokens: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    rank_speeds: ArrayLike | None = None,
    fallback: ArrayLike | None = None,
    padded: bool = False,
    parts: int = 1,
) -> Assignment:
    """Share the samples of a step out so that all ranks finish together.

    Ranks that the lower bound is about share what they must hold among themselves. There, and for the others, longest
    processing time first within the limits (Graham 1969), then swaps, moves and exchanges of several samples between the
    slowest and the quickest ranks until the bound is reached, or a fixed number of rounds is over; up to 256 samples begin
    anew if they fall short, and all plans are looked at of up to 16 on two ranks, 10 on three and 8 on four. Never worse than
    the paper's zig-zag, if that keeps the limits. A pure function of its arguments in whole numbers: every rank computes the
    same plan by itself. Every rank gets at least one sample.

    Args:
        costs: shape ``[samples]``, in the units of the cost model, finite and >= 0.
        ranks: how many ranks share the samples.
        assignment_mode: ``"fixed"``: equal counts, differing by one at most; ``"slack"``: a rank holds at most
            ``1 + count_slack`` times its equal share; ``"free"``: any counts; ``"zigzag"``: FreeScale's zig-zag through the
            sorted samples at equal counts (arXiv 2604.24073), without any refinement, for comparison.
        count_slack: for ``"slack"`` alone; 0.25 if not given.
        max_tokens_per_rank: no rank gets more tokens than this (memory).
        tokens: tokens of each sample, shape ``[samples]``; rounded up to whole tokens, the limit down. Ranks get as equally
            many as they can without the slowest being slower, if the ranks are equally fast.
        keep_together: group of each sample, shape ``[samples]``; samples of a group go to one rank. ``"fixed"`` takes groups
            of equal size only.
        rank_speeds: relative speed of each rank, shape ``[ranks]``, > 0; all the same if not given. Not for
            ``"zigzag"``.
        fallback: the ranks of a plan that is known to keep ``max_tokens_per_rank``, shape ``[samples]``, to start from where
            none is found.
        padded: a rank pads its samples to the longest one. It then costs its number of samples times the cost of the dearest
            one, and holds as many tokens as samples times the tokens of the longest one. The best plan consists of runs of the
            samples sorted by cost. With equally fast ranks it is optimal. Not for ``keep_together``.
        parts: with ``padded``, each rank computes its samples in so many parts, one after the other, and pads each of them by
            itself. ``max_tokens_per_rank`` limits the tokens of a part.

    Raises:
        ValueError: an argument does not fit, or no assignment within the limits was found; names it and the fix.

    Examples:
        >>> plan = assign([900, 40, 30, 20, 400, 10, 350, 60], ranks=2, assignment_mode="free")
        >>> plan.rank_of_sample
        array([0, 1, 1, 1, 1, 0, 1, 1])
        >>> round(plan.imbalance, 3), plan.dominated
        (1.006, False)
    """
    ranks = whole_number("assign(ranks={})", ranks)  # also of numpy's short integers, which overflow
    problem, cost, token, group_of_sample = problem_from_arguments(
        costs, ranks, assignment_mode, count_slack, max_tokens_per_rank, tokens, keep_together, rank_speeds
    )
    if padded:
        _refuse_padded(assignment_mode, keep_together is not None)
        return _padded(problem, cost, token, group_of_sample, parts, assignment_mode, max_tokens_per_rank)
    known = None if fallback is None else _ranks_of_groups(fallback, group_of_sample, ranks)
    if assignment_mode == "zigzag":
        rank_of_group, bound = _zigzag_within_limits(problem, max_tokens_per_rank)
    else:
        rank_of_group, bound = _found(problem, known, assignment_mode, max_tokens_per_rank)
    if assignment_mode != "zigzag" and token is not None and imbalance(token, rank_of_group[group_of_sample], ranks) > _LEVEL:
        tokens = to_integers(np.bincount(group_of_sample, token).astype(np.float64), np.ones(ranks, dtype=np.int64))
        rank_of_group = level_tokens(problem, rank_of_group, tokens)
    rank_of_sample, free = rank_of_group[group_of_sample], not cost.any()
    return Assignment(
        rank_of_sample,
        1.0 if free else float(problem.exact.times(rank_of_group).max()) / problem.exact.ideal_time,
        1.0 if free else bound / problem.exact.ideal_time,
        None if token is None else imbalance(token, rank_of_sample, ranks),
        _is_dominated(cost, ranks),
    )


def _padded(
    problem: Problem, cost: Floats, token: Floats | None, place: Ints, parts: int, mode: str, max_tokens: float | None
) -> Assignment:
    """Return the assignment for ranks that pad; ``place`` is where the problem has each sample."""
    plan, slow = padded_search(problem, parts), problem.exact.slowness / problem.exact.slowness.min()
    drawn = contiguous_split(len(cost), problem.ranks)
    as_drawn = padded_loads(cost, drawn, None, problem.ranks)
    allowed = problem.allows_padded(drawn[np.argsort(place)])
    if plan is None and not allowed:
        raise _none_found(problem, mode, max_tokens)
    rank_of_sample, part_of_sample, loads = drawn, np.zeros_like(drawn), as_drawn
    if plan is not None:
        rank, part = plan.rank_of_group[place], plan.part_of_group[place]
        found = padded_loads(cost, rank, part, problem.ranks)
        if not allowed or (found * slow).max() <= (as_drawn * slow).max():  # may be worse where ranks differ in speed
            rank_of_sample, part_of_sample, loads = rank, part, found
    # the search has the slowness of ranks rounded
    bound = 0.0 if plan is None else plan.bound * float((problem.exact.slowness / problem.slowness).min())
    bound = max(bound, problem.exact.ideal_time)
    free = not cost.any()
    return Assignment(
        rank_of_sample,
        1.0 if free else _over_ideal(loads, cost, slow),
        1.0 if free else bound / problem.exact.ideal_time,
        None if token is None else load_imbalance(padded_loads(token, rank_of_sample, part_of_sample, problem.ranks)),
        _is_dominated(cost, problem.ranks),
        part_of_sample,
    )


def _refuse_padded(mode: str, together: bool) -> None:
    if together or mode == "zigzag":
        what = "keep_together=..." if together else "assignment_mode='zigzag'"
        raise ValueError(f"assign(padded=True, {what}): ranks that pad take runs of samples sorted by cost. Leave one out")


def contiguous_split(samples: int, ranks: int) -> Ints:
    """Return the rank of every sample without balancing, shape ``[samples]``: runs of the drawn order, at equal counts."""
    return np.repeat(np.arange(ranks), np.asarray(equal_counts(samples, ranks)))


def equal_counts(samples: int, ranks: int) -> list[int]:
    """Return the samples per rank: equal, the first ``samples % ranks`` ranks take one more."""
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def imbalance(
    cost: Floats, rank_of_sample: Ints, ranks: int, rank_speeds: ArrayLike | None = None, padded: bool = False
) -> float:
    """Return the max over ranks of cost / mean over ranks, see :class:`Assignment`; 1.0 when all costs are zero."""
    slow = relative_slowness(rank_speeds, ranks)
    if padded:
        return _over_ideal(padded_loads(cost, rank_of_sample, None, ranks), cost, slow) if cost.any() else 1.0
    return load_imbalance(np.bincount(rank_of_sample, weights=cost, minlength=ranks), slow)


def _over_ideal(padded: Floats, cost: Floats, slow: Floats) -> float:
    """Return the slowest rank's padded time over the time that all ranks would need without padding."""
    return float((padded * slow).max() * (1.0 / slow).sum() / cost.sum())


def load_imbalance(loads: NDArray[Any], slow: Floats | None = None) -> float:
    """Return the same for summed costs, shape ``[ranks]``; ``slow`` is each rank's time per cost."""
    pace = np.ones(len(loads)) if slow is None else slow
    return float((loads * pace).max() * (1.0 / pace).sum() / loads.sum()) if loads.any() else 1.0


def assignment_bound(costs: ArrayLike, ranks: int, **options: Any) -> tuple[float, bool]:
    """Return ``lower_bound`` and ``dominated`` as :func:`assign` would with the same arguments, without a search.

    Of few samples, which it shares out in every way, its own may be higher.
    """
    if options.pop("padded", False):
        found = assign(costs, ranks, padded=True, **options)
        return found.lower_bound, found.dominated
    options.pop("fallback", None)  # of which no bound depends
    problem, cost, _, _ = problem_from_arguments(costs, ranks, **options)
    exact = problem.exact
    return lower_bound(exact).time / exact.ideal_time if cost.any() else 1.0, _is_dominated(cost, ranks)


def _is_dominated(cost: Floats, ranks: int) -> bool:
    return bool(cost.max() * ranks > cost.sum())


def _zigzag_within_limits(problem: Problem, max_tokens: float | None) -> tuple[Ints, float]:
    plan = zigzag(problem)
    if not problem.allows(plan):
        raise ValueError(
            f"assign(assignment_mode='zigzag', max_tokens_per_rank={max_tokens}): it gives a rank more tokens, and is "
            "not refined. Use another assignment_mode, or no limit"
        )
    return plan, lower_bound(problem.exact).time


def _ranks_of_groups(fallback: ArrayLike, group_of_sample: Ints, ranks: int) -> Ints:
    rank_of_sample = np.asarray(fallback)
    whole = np.issubdtype(rank_of_sample.dtype, np.integer) and rank_of_sample.shape == group_of_sample.shape
    if not whole or rank_of_sample.min() < 0 or rank_of_sample.max() >= ranks:
        raise ValueError(
            f"assign(fallback=...) has shape {rank_of_sample.shape} and type {rank_of_sample.dtype}: pass the rank of each "
            f"sample, shape [{len(group_of_sample)}], from 0 to {ranks - 1}"
        )
    rank_of_group = np.empty(int(group_of_sample.max()) + 1, dtype=np.int64)
    rank_of_group[group_of_sample] = rank_of_sample
    return rank_of_group


def _found(problem: Problem, fallback: Ints | None, mode: str, max_tokens: float | None) -> tuple[Ints, float]:
    plan, bound = search(problem, fallback)
    if plan is None:
        raise _none_found(problem, mode, max_tokens)
    return plan, bound


def _none_found(problem: Problem, mode: str, max_tokens: float | None) -> ValueError:
    # as they were given: the problem has them in whole numbers
    limits = [] if mode == "free" else [f"at most {problem.max_samples} samples (assignment_mode={mode!r})"]
    limits += [] if max_tokens is None else [f"max_tokens_per_rank={max_tokens}"]
    return ValueError(
        f"assign: no place was found for every sample or group on {problem.ranks} ranks with {' and '.join(limits)} each. "
        "Allow more of what is scarce, or use more ranks"
    )
