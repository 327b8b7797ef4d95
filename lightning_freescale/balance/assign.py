"""The assignment of the samples of a global batch to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver.bounds import Ints, Problem, dearest_first, lower_bound, to_integers
from lightning_freescale.balance.solver.lpt import zigzag
from lightning_freescale.balance.solver.padded import padded_loads, padded_search
from lightning_freescale.balance.solver.search import level_tokens, search
from lightning_freescale.balance.validation import Floats, non_negative, whole_number, whole_tokens

AssignmentMode = Literal["fixed", "slack", "free", "zigzag"]
COUNT_SLACK = 0.25
"""Share by which a rank's number of samples may exceed the equal count in mode ``"slack"``."""
_LEVEL = 1.02
"""Imbalance of tokens above which they are balanced too."""


@dataclass(frozen=True)
class Assignment:
    """The assignment of the samples of a global batch to the ranks.

    Attributes:
        rank_of_sample: Rank of each sample, shape ``[samples]``.
        imbalance: Maximum cost over ranks / mean cost over ranks. With ``padded``, only the maximum includes padding.
        lower_bound: Imbalance that no assignment with the counts of the mode can beat.
        tokens_imbalance: Maximum tokens over ranks / mean tokens over ranks; None if no tokens were given.
        dominated: True if a single sample costs more than the mean load of the ranks.
        part_of_sample: Index of each sample's part within its rank, shape ``[samples]``; None without parts.
    """

    rank_of_sample: Ints
    imbalance: float
    lower_bound: float
    tokens_imbalance: float | None
    dominated: bool
    part_of_sample: Ints | None = None

    @property
    def gap(self) -> float:
        """The relative difference between the imbalance and the lower bound."""
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

    The plan starts with longest processing time first (Graham 1969), within the limits. Swaps, moves and exchanges of several
    samples between the slowest and the quickest ranks follow, until the lower bound or a fixed number of rounds is reached.
    Ranks that cause the lower bound are planned separately. With up to 256 samples, the search tries several first plans. It
    compares all plans for up to 16 samples on two ranks, 10 on three and 8 on four.

    The result is a pure function of the arguments and uses whole numbers, so that every rank computes the same plan. It is
    never worse than FreeScale's zig-zag, if that keeps the limits. Each rank gets at least one sample.

    Args:
        costs: Cost of each sample, shape ``[samples]``, finite and >= 0, in any unit.
        ranks: Number of ranks that share the samples.
        assignment_mode: ``"fixed"``: equal counts, which differ by at most one. ``"slack"``: a rank holds at most 1.25 times
            its equal share. ``"free"``: any counts. ``"zigzag"``: FreeScale's zig-zag through the sorted samples at equal
            counts (arXiv 2604.24073), without refinement, for comparison.
        max_tokens_per_rank: Maximum number of tokens of a rank, to limit memory; rounded down.
        tokens: Tokens of each sample, shape ``[samples]``; rounded up. They are balanced as far as the slowest rank does not
            become slower.
        fallback: Rank of each sample in a plan that keeps ``max_tokens_per_rank``, shape ``[samples]``. The search starts from
            it if it finds no other plan.
        padded: Each rank pads its samples to the longest one. The cost of a rank is its number of samples times its highest
            cost, and its tokens are its number of samples times its highest number of tokens. The result is optimal: it
            consists of runs of the samples sorted by cost.
        parts: With ``padded``, the number of parts that each rank computes one after the other. Each part is padded to its own
            longest sample, and ``max_tokens_per_rank`` limits the tokens of a part.

    Raises:
        ValueError: An argument is invalid, or no assignment within the limits was found.

    Examples:
        >>> plan = assign([900, 40, 30, 20, 400, 10, 350, 60], ranks=2, assignment_mode="free")
        >>> plan.rank_of_sample
        array([0, 1, 1, 1, 1, 0, 1, 1])
        >>> round(plan.imbalance, 3), plan.dominated
        (1.006, False)
    """
    ranks = whole_number("assign(ranks={})", ranks)  # numpy's 8-bit integers would overflow
    problem, cost, token, place = _problem(costs, ranks, assignment_mode, max_tokens_per_rank, tokens)
    if padded:
        if assignment_mode == "zigzag":
            raise ValueError(
                "assign(padded=True, assignment_mode='zigzag'): these cannot be combined, because padded plans consist of runs "
                "of samples. Use another assignment_mode, or padded=False."
            )
        return _padded(problem, cost, token, place, parts, assignment_mode, max_tokens_per_rank)
    if assignment_mode == "zigzag":
        plan, bound = zigzag(problem), lower_bound(problem)[0]
        if not problem.allows(plan):
            raise ValueError(
                f"assign(assignment_mode='zigzag', max_tokens_per_rank={max_tokens_per_rank}): the zig-zag gives a rank more "
                "tokens, and is not refined. Use another assignment_mode, or no limit."
            )
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
    """Return the arguments of :func:`assign` as a problem, with costs, tokens, and each sample's position in the problem."""
    cost = non_negative("assign(costs=...)", costs)
    if mode not in get_args(AssignmentMode):
        raise ValueError(f"assign(assignment_mode={mode!r}): choose one of {', '.join(get_args(AssignmentMode))}")
    if len(cost) < ranks:
        raise ValueError(
            f"assign got {len(cost)} samples for {ranks} ranks. Each rank needs at least one sample. Use fewer ranks or more "
            "samples."
        )
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
    """Return the minimum and maximum samples of a rank, and the number of ranks that may hold the maximum."""
    if mode in ("fixed", "zigzag"):
        share, rest = divmod(samples, ranks)
        return share, share + bool(rest), rest or ranks
    if mode == "free":
        return 1, samples, ranks
    return 1, max(-(-samples // ranks), int(min(samples, samples / ranks * (1 + COUNT_SLACK)))), ranks


def _token_limit(token: Floats | None, limit: float | None) -> tuple[Ints | None, int]:
    """Return the tokens of each sample, None without a limit, and the limit of a rank."""
    if limit is None:
        return None, 0
    if token is None:
        raise ValueError(f"assign(max_tokens_per_rank={limit!r}) needs the tokens of each sample. Pass tokens=.")
    if not (isinstance(limit, Real) and np.isfinite(limit) and limit > 0):
        raise ValueError(f"assign(max_tokens_per_rank={limit!r}): pass a finite number > 0, or None for no limit")
    return whole_tokens(token, limit)


def _padded(
    problem: Problem, cost: Floats, token: Floats | None, place: Ints, parts: int, mode: str, max_tokens: float | None
) -> Assignment:
    plan, drawn = padded_search(problem, parts), contiguous_split(len(cost), problem.ranks)
    allowed = problem.allows(drawn[np.argsort(place)], padded=True)
    if plan is None and not allowed:
        raise _none_found(problem, mode, max_tokens)
    rank_of_sample, part_of_sample, loads = drawn, np.zeros_like(drawn), padded_loads(cost, drawn, None, problem.ranks)
    if plan is not None:
        rank, part = plan.rank_of_sample[place], plan.part_of_sample[place]
        found = padded_loads(cost, rank, part, problem.ranks)
        if not allowed or found.max() <= loads.max():  # the search may stop slightly above the best plan
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
    """Return the rank of each sample without balancing, shape ``[samples]``: runs of the drawn order at equal counts.

    The first ``samples % ranks`` ranks take one sample more than the others.
    """
    return np.repeat(np.arange(ranks), samples // ranks + (np.arange(ranks) < samples % ranks))


def imbalance(cost: Floats, rank_of_sample: Ints, ranks: int, padded: bool = False) -> float:
    """Return the imbalance of :class:`Assignment`; 1.0 if all costs are zero."""
    if padded:
        return _over_ideal(padded_loads(cost, rank_of_sample, None, ranks), cost) if cost.any() else 1.0
    return load_imbalance(np.bincount(rank_of_sample, weights=cost, minlength=ranks))


def _over_ideal(padded: Floats, cost: Floats) -> float:
    return float(padded.max() * len(padded) / cost.sum())


def load_imbalance(loads: NDArray[Any]) -> float:
    """Return the imbalance of summed costs, shape ``[ranks]``."""
    return float(loads.max() * len(loads) / loads.sum()) if loads.any() else 1.0


def assignment_bound(costs: ArrayLike, ranks: int, **options: Any) -> tuple[float, bool]:
    """Return ``lower_bound`` and ``dominated`` of :func:`assign` for the same arguments, without a search.

    The bound of :func:`assign` may be higher where it compares all plans of few samples.
    """
    if options.pop("padded", False):
        found = assign(costs, ranks, padded=True, **options)
        return found.lower_bound, found.dominated
    tokens, limit = options.get("tokens"), options.get("max_tokens_per_rank")
    problem, cost, _, _ = _problem(costs, ranks, options.get("assignment_mode", "fixed"), limit, tokens)
    return lower_bound(problem)[0] / problem.ideal_load if cost.any() else 1.0, _is_dominated(cost, ranks)


def _is_dominated(cost: Floats, ranks: int) -> bool:
    return bool(cost.max() * ranks > cost.sum())


def _sorted_fallback(fallback: ArrayLike, place: Ints, ranks: int) -> Ints:
    rank_of_sample = np.asarray(fallback)
    whole = np.issubdtype(rank_of_sample.dtype, np.integer) and rank_of_sample.shape == place.shape
    if not whole or rank_of_sample.min() < 0 or rank_of_sample.max() >= ranks:
        raise ValueError(
            f"assign(fallback=...) has shape {rank_of_sample.shape} and type {rank_of_sample.dtype}. Pass the rank of each "
            f"sample, an integer from 0 to {ranks - 1}, shape [{len(place)}]."
        )
    in_order = np.empty(len(place), dtype=np.int64)
    in_order[place] = rank_of_sample
    return in_order


def _none_found(problem: Problem, mode: str, max_tokens: float | None) -> ValueError:
    # name the limits as given, because the problem holds them rounded
    limits = [] if mode == "free" else [f"at most {problem.max_samples} samples (assignment_mode={mode!r})"]
    limits += [] if max_tokens is None else [f"max_tokens_per_rank={max_tokens}"]
    return ValueError(
        f"assign found no assignment to {problem.ranks} ranks with {' and '.join(limits)} per rank. Raise a limit, or use more "
        "ranks."
    )
