"""The assignment of the samples of a global batch to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import (
    Ints,
    Problem,
    dearest_first,
    level_tokens,
    lower_bound,
    padded_loads,
    padded_search,
    search,
    to_integers,
    zigzag,
)
from lightning_freescale.balance.validation import Floats, is_number, non_negative, whole_number, whole_tokens

AssignmentMode = Literal["fixed", "slack", "free", "zigzag"]
COUNT_SLACK = 0.25
"""Share of the equal count by which a rank's number of samples may exceed it in mode ``"slack"``."""
_LEVEL = 1.02
"""Up to this imbalance, tokens are left as they are."""


@dataclass(frozen=True)
class Assignment:
    """The ranks of one global batch, with what they cost.

    Attributes:
        rank_of_sample: int array of shape ``[samples]``.
        imbalance: max over ranks of cost / mean over ranks. With ``padded``, the cost of the slowest rank includes its padding,
            and the mean does not.
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
    max_tokens_per_rank: float | None = None,
    tokens: ArrayLike | None = None,
    fallback: ArrayLike | None = None,
    padded: bool = False,
    parts: int = 1,
) -> Assignment:
    """Assign the samples of a step to the ranks so that all ranks finish together.

    Ranks that cause the lower bound are planned by themselves. There, and for the others, the plan is longest processing
    time first within the limits (Graham 1969), then swaps, moves and exchanges of several samples between the slowest and the
    quickest ranks until the bound is reached, or a fixed number of rounds is over. Up to 256 samples begin anew if they fall
    short. All plans are compared of up to 16 samples on two ranks, 10 on three and 8 on four. The result is never worse than
    the paper's zig-zag, if that keeps the limits. It is a pure function of its arguments in whole numbers: every rank computes
    the same plan by itself. Every rank gets at least one sample.

    Args:
        costs: shape ``[samples]``, in the units of the cost model, finite and >= 0.
        ranks: number of ranks that share the samples.
        assignment_mode: ``"fixed"``: equal counts, differing by one at most; ``"slack"``: a rank holds at most
            1.25 times its equal share; ``"free"``: any counts; ``"zigzag"``: FreeScale's zig-zag through the
            sorted samples at equal counts (arXiv 2604.24073), without any refinement, for comparison.
        max_tokens_per_rank: no rank gets more tokens than this (memory).
        tokens: tokens of each sample, shape ``[samples]``; rounded up to whole tokens, the limit down. Ranks get as equally
            many as they can without the slowest being slower.
        fallback: the ranks of a plan that is known to keep ``max_tokens_per_rank``, shape ``[samples]``, to start from if
            none is found.
        padded: a rank pads its samples to the longest one. It then costs its number of samples times the cost of the most
            expensive one, and holds as many tokens as samples times the tokens of the longest one. The best plan consists of
            runs of the samples sorted by cost, and this plan is optimal.
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
    ranks = whole_number("assign(ranks={})", ranks)  # also numpy's short integers, which overflow
    problem, cost, token, place = _problem(costs, ranks, assignment_mode, max_tokens_per_rank, tokens)
    if padded:
        if assignment_mode == "zigzag":
            raise ValueError(
                "assign(padded=True, assignment_mode='zigzag'): ranks that pad take runs of samples: leave one out"
            )
        return _padded(problem, cost, token, place, parts, assignment_mode, max_tokens_per_rank)
    if assignment_mode == "zigzag":
        plan, bound = _zigzag_within_limits(problem, max_tokens_per_rank)
    else:
        known = None if fallback is None else _sorted_fallback(fallback, place, ranks)
        found, bound = search(problem, known)
        if found is None:
            raise _none_found(problem, assignment_mode, max_tokens_per_rank)
        plan = found
        if token is not None and imbalance(token, plan[place], ranks) > _LEVEL:
            in_order = np.empty_like(token)
            in_order[place] = token
            plan = level_tokens(problem, plan, to_integers(in_order, ranks))
    rank_of_sample, free = plan[place], not cost.any()
    return Assignment(
        rank_of_sample,
        1.0 if free else float(problem.largest_load(plan)) / problem.ideal_load,
        1.0 if free else bound / problem.ideal_load,
        None if token is None else imbalance(token, rank_of_sample, ranks),
        _is_dominated(cost, ranks),
    )


def _problem(
    costs: ArrayLike, ranks: int, mode: str, max_tokens: float | None, tokens: ArrayLike | None
) -> tuple[Problem, Floats, Floats | None, Ints]:
    """Return the arguments of :func:`assign` as a problem in whole numbers, with costs, tokens, and each sample's place in it.

    Raises:
        ValueError: an argument does not fit, or they contradict each other.
    """
    cost = non_negative("assign(costs=...)", costs)
    if mode not in get_args(AssignmentMode):
        raise ValueError(f"assign(assignment_mode={mode!r}): choose one of {', '.join(get_args(AssignmentMode))}")
    if len(cost) < ranks:
        raise ValueError(f"assign: {len(cost)} samples for {ranks} ranks; every rank needs at least one sample")
    token = None if tokens is None else non_negative("assign(tokens=...)", tokens, len(cost))
    counted, most_tokens = _token_limit(token, max_tokens)
    whole = to_integers(cost, ranks)
    order = dearest_first(whole)
    least, most, ranks_at_max = _count_limits(len(cost), ranks, mode)
    limited = None if counted is None else counted[order]
    problem = Problem(whole[order], ranks, limited, least, most, ranks_at_max, most_tokens)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return problem, cost, token, place


def _count_limits(samples: int, ranks: int, mode: str) -> tuple[int, int, int]:
    """Return the least and most samples of a rank, and how many ranks may hold the most."""
    if mode in ("fixed", "zigzag"):
        share, rest = divmod(samples, ranks)
        return share, share + bool(rest), rest or ranks
    if mode == "free":
        return 1, samples, ranks
    return 1, max(-(-samples // ranks), int(min(samples, samples / ranks * (1 + COUNT_SLACK)))), ranks


def _token_limit(token: Floats | None, limit: float | None) -> tuple[Ints | None, int]:
    """Return the tokens of every sample, None without a limit, and how many a rank may hold."""
    if limit is None:
        return None, 0
    if token is None:
        raise ValueError(f"assign(max_tokens_per_rank={limit!r}) needs tokens=, the tokens of each sample")
    if not (is_number(limit) and np.isfinite(limit) and limit > 0):
        raise ValueError(f"assign(max_tokens_per_rank={limit!r}): pass a finite number > 0, or None for no limit")
    return whole_tokens(token, limit)


def _padded(
    problem: Problem, cost: Floats, token: Floats | None, place: Ints, parts: int, mode: str, max_tokens: float | None
) -> Assignment:
    """Return the assignment for ranks that pad."""
    plan, drawn = padded_search(problem, parts), contiguous_split(len(cost), problem.ranks)
    allowed = problem.allows_padded(drawn[np.argsort(place)])
    if plan is None and not allowed:
        raise _none_found(problem, mode, max_tokens)
    rank_of_sample, part_of_sample, loads = drawn, np.zeros_like(drawn), padded_loads(cost, drawn, None, problem.ranks)
    if plan is not None:
        rank, part = plan.rank_of_sample[place], plan.part_of_sample[place]
        found = padded_loads(cost, rank, part, problem.ranks)
        if not allowed or found.max() <= loads.max():  # the search stops a little above the best plan
            rank_of_sample, part_of_sample, loads = rank, part, found
    bound, free = max(0.0 if plan is None else plan.bound, problem.ideal_load), not cost.any()
    return Assignment(
        rank_of_sample,
        1.0 if free else _over_ideal(loads, cost),
        1.0 if free else bound / problem.ideal_load,
        None if token is None else load_imbalance(padded_loads(token, rank_of_sample, part_of_sample, problem.ranks)),
        _is_dominated(cost, problem.ranks),
        part_of_sample,
    )


def contiguous_split(samples: int, ranks: int) -> Ints:
    """Return the rank of every sample without balancing, shape ``[samples]``: runs of the drawn order, at equal counts."""
    return np.repeat(np.arange(ranks), np.asarray(equal_counts(samples, ranks)))


def equal_counts(samples: int, ranks: int) -> list[int]:
    """Return the samples per rank: equal, the first ``samples % ranks`` ranks take one more."""
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def imbalance(cost: Floats, rank_of_sample: Ints, ranks: int, padded: bool = False) -> float:
    """Return the max over ranks of cost / mean over ranks, see :class:`Assignment`; 1.0 when all costs are zero."""
    if padded:
        return _over_ideal(padded_loads(cost, rank_of_sample, None, ranks), cost) if cost.any() else 1.0
    return load_imbalance(np.bincount(rank_of_sample, weights=cost, minlength=ranks))


def _over_ideal(padded: Floats, cost: Floats) -> float:
    """Return the slowest rank's padded load over the mean load without padding."""
    return float(padded.max() * len(padded) / cost.sum())


def load_imbalance(loads: NDArray[Any]) -> float:
    """Return the imbalance of summed costs, shape ``[ranks]``."""
    return float(loads.max() * len(loads) / loads.sum()) if loads.any() else 1.0


def assignment_bound(costs: ArrayLike, ranks: int, **options: Any) -> tuple[float, bool]:
    """Return ``lower_bound`` and ``dominated`` as :func:`assign` would with the same arguments, without a search.

    If all plans of few samples are compared, the bound of :func:`assign` may be higher.
    """
    if options.pop("padded", False):
        found = assign(costs, ranks, padded=True, **options)
        return found.lower_bound, found.dominated
    tokens, limit = options.get("tokens"), options.get("max_tokens_per_rank")
    problem, cost, _, _ = _problem(costs, ranks, options.get("assignment_mode", "fixed"), limit, tokens)
    return lower_bound(problem).load / problem.ideal_load if cost.any() else 1.0, _is_dominated(cost, ranks)


def _is_dominated(cost: Floats, ranks: int) -> bool:
    return bool(cost.max() * ranks > cost.sum())


def _zigzag_within_limits(problem: Problem, max_tokens: float | None) -> tuple[Ints, float]:
    plan = zigzag(problem)
    if not problem.allows(plan):
        raise ValueError(
            f"assign(assignment_mode='zigzag', max_tokens_per_rank={max_tokens}): it gives a rank more tokens, and is "
            "not refined. Use another assignment_mode, or no limit"
        )
    return plan, lower_bound(problem).load


def _sorted_fallback(fallback: ArrayLike, place: Ints, ranks: int) -> Ints:
    """Return the fallback in the order of the problem."""
    rank_of_sample = np.asarray(fallback)
    whole = np.issubdtype(rank_of_sample.dtype, np.integer) and rank_of_sample.shape == place.shape
    if not whole or rank_of_sample.min() < 0 or rank_of_sample.max() >= ranks:
        raise ValueError(
            f"assign(fallback=...) has shape {rank_of_sample.shape} and type {rank_of_sample.dtype}: pass the rank of each "
            f"sample, shape [{len(place)}], from 0 to {ranks - 1}"
        )
    in_order = np.empty(len(place), dtype=np.int64)
    in_order[place] = rank_of_sample
    return in_order


def _none_found(problem: Problem, mode: str, max_tokens: float | None) -> ValueError:
    # the limits as they were given: the problem has them in whole numbers
    limits = [] if mode == "free" else [f"at most {problem.max_samples} samples (assignment_mode={mode!r})"]
    limits += [] if max_tokens is None else [f"max_tokens_per_rank={max_tokens}"]
    return ValueError(
        f"assign: no place was found for every sample on {problem.ranks} ranks with {' and '.join(limits)} each. "
        "Allow more of what is scarce, or use more ranks"
    )
