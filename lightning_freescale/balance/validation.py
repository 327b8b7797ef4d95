"""Checks of numbers that users pass, and the arguments of :func:`assign`, checked and in whole numbers."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import Ints, Problem, dearest_first, to_integers

AssignmentMode = Literal["fixed", "slack", "free", "zigzag"]
Floats = NDArray[np.float64]
DEFAULT_SLACK = 0.25
_MAX_TOTAL_TOKENS = 2**53
_LIMIT_BITS = 21
SPEED_STEPS = 1024
"""The search goes by speeds that are rounded to this many steps of the fastest rank's."""


def is_non_negative(values: Any) -> Any:
    """Return which numbers are finite and not negative: a bool for a number, a mask of the same shape for an array."""
    return np.isfinite(values) & (np.asarray(values) >= 0)


def is_number(value: Any) -> bool:
    """Return whether it is a single real number, Python's or numpy's."""
    return isinstance(value, Real)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number, Python's or numpy's, as Python's.

    Args:
        name: what errors call it, with braces for its value, such as ``"assign(ranks={})"``.
        value: the number.
        least: what it must be at least.

    Raises:
        ValueError: it is something else, or too small.
    """
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name.format(repr(value))}: pass a whole number, {least} or more")
    return int(value)


def non_negative(name: str, values: ArrayLike, size: int | None = None, first: int = 0) -> Floats:
    """Return ``values`` as float64, one per sample: shape ``[samples]``, finite, >= 0, also in sum.

    Args:
        name: what errors call the values, such as ``"assign(costs=...)"``.
        values: numbers, one per sample.
        size: how many samples there are; any number if not given.
        first: number of the first sample, for errors.

    Raises:
        ValueError: the shape is another, an entry is negative or not finite, or the sum overflows.
    """
    given = np.asarray(values)
    if given.dtype.kind in "cSU":
        raise ValueError(f"{name} has values of type {given.dtype}: pass one real number per sample")
    array = np.asarray(given, dtype=np.float64)
    if array.ndim != 1 or size not in (None, len(array)):
        wanted = "samples" if size is None else size
        raise ValueError(f"{name} has shape {array.shape}: pass one number per sample, shape [{wanted}]")
    bad = np.flatnonzero(~is_non_negative(array))
    if bad.size:
        raise ValueError(
            f"{name}[{first + bad[0]}] is {array[bad[0]]}: every entry must be a finite number >= 0 ({bad.size} are not)"
        )
    if array.max(initial=0.0) > np.finfo(np.float64).max / max(1, len(array)):
        raise ValueError(f"{name}: numbers up to {array.max():g} overflow when they are summed. Use a larger unit")
    return array


def slowness(rank_speeds: ArrayLike | None, ranks: int) -> Ints:
    """Return whole numbers in inverse proportion to the speeds, shape ``[ranks]``; ValueError if the speeds do not fit."""
    speed = _speeds(rank_speeds, ranks)
    return np.rint(SPEED_STEPS * speed.max() / speed).astype(np.int64) if np.ptp(speed) else np.ones(ranks, dtype=np.int64)


def relative_slowness(rank_speeds: ArrayLike | None, ranks: int) -> Floats:
    """Return how many times slower than the fastest each rank is, shape ``[ranks]``; ValueError if the speeds do not fit."""
    speed = _speeds(rank_speeds, ranks)
    return speed.max() / speed


def _speeds(rank_speeds: ArrayLike | None, ranks: int) -> Floats:
    speed = np.asarray(np.ones(ranks) if rank_speeds is None else rank_speeds, dtype=np.float64)
    if speed.shape != (ranks,) or not (np.isfinite(speed) & (speed > 0)).all() or speed.max() > SPEED_STEPS * speed.min():
        raise ValueError(
            f"assign(rank_speeds={rank_speeds!r}): pass one finite number > 0 per rank, shape [{ranks}], none more than "
            f"{SPEED_STEPS} times another"
        )
    return speed


def number_groups(keep_together: ArrayLike | None, samples: int) -> Ints:
    """Return the group of every sample, numbered from 0, shape ``[samples]``; ValueError if it is not one per sample."""
    if keep_together is None:
        return np.arange(samples)
    group = np.asarray(keep_together)
    if group.shape != (samples,):
        raise ValueError(f"assign(keep_together=...) has shape {group.shape}: pass the group of each sample, shape [{samples}]")
    return np.unique(group, return_inverse=True)[1].reshape(samples)


def problem_from_arguments(
    costs: ArrayLike,
    ranks: int,
    assignment_mode: str = "fixed",
    count_slack: float | None = None,
    max_tokens_per_rank: float | None = None,
    tokens: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    rank_speeds: ArrayLike | None = None,
) -> tuple[Problem, Floats, Floats | None, Ints]:
    """Return the arguments of :func:`assign` as a problem in whole numbers, with costs, tokens, and each sample's group.

    Raises:
        ValueError: an argument does not fit, or they contradict each other.
    """
    cost = non_negative("assign(costs=...)", costs)
    ranks = whole_number("assign(ranks={})", ranks)
    if assignment_mode not in get_args(AssignmentMode):
        raise ValueError(f"assign(assignment_mode={assignment_mode!r}): choose one of {', '.join(get_args(AssignmentMode))}")
    if count_slack is not None and not (is_number(count_slack) and is_non_negative(count_slack)):
        raise ValueError(f"assign(count_slack={count_slack!r}): pass a share of the equal count, 0 or more")
    _refuse_without_effect(assignment_mode, count_slack=count_slack, rank_speeds=rank_speeds)
    if len(cost) < ranks:
        raise ValueError(f"assign: {len(cost)} samples for {ranks} ranks; every rank needs at least one sample")
    token = None if tokens is None else non_negative("assign(tokens=...)", tokens, len(cost))
    group_of_sample = number_groups(keep_together, len(cost))
    slow = slowness(rank_speeds, ranks)
    alone = keep_together is None
    size = np.ones(len(cost), dtype=np.int64) if alone else np.bincount(group_of_sample).astype(np.int64)
    if len(size) < ranks:
        raise ValueError(f"assign(keep_together=...): {len(size)} groups for {ranks} ranks; every rank needs at least one")
    group_tokens, max_tokens = _token_limit(token, max_tokens_per_rank, group_of_sample)
    slack = DEFAULT_SLACK if count_slack is None else count_slack
    size, least, most, ranks_at_max = _count_limits(size, ranks, assignment_mode, slack)
    group_cost = to_integers(cost if alone else np.bincount(group_of_sample, cost).astype(np.float64), slow)
    order = dearest_first(group_cost)
    group_tokens = None if group_tokens is None else group_tokens[order]
    unrounded = SPEED_STEPS * relative_slowness(rank_speeds, ranks) if np.ptp(slow) else None
    problem = Problem(group_cost[order], size[order], group_tokens, slow, least, most, ranks_at_max, max_tokens, unrounded)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return problem, cost, token, number if alone else number[group_of_sample]


def _refuse_without_effect(mode: str, **given: Any) -> None:
    """Refuse what an assignment mode makes no use of."""
    if mode != "slack" and given["count_slack"] is not None:
        raise ValueError(
            f"assign(count_slack={given['count_slack']!r}) has no meaning for assignment_mode={mode!r}: leave it out, or use "
            "assignment_mode='slack'"
        )
    if mode == "zigzag" and given["rank_speeds"] is not None:
        raise ValueError(
            f"assign(rank_speeds={given['rank_speeds']!r}) has no meaning for assignment_mode='zigzag', which deals to all "
            "ranks alike: leave it out, or use another assignment_mode"
        )


def _count_limits(size: Ints, ranks: int, mode: str, count_slack: float) -> tuple[Ints, int, int, int]:
    """Return the counted size of the groups, the least and most samples of a rank, and how many ranks may hold the most."""
    smallest, largest = int(size.min()), int(size.max())
    if mode in ("fixed", "zigzag"):
        if smallest < largest:
            raise ValueError(
                f"assign(assignment_mode={mode!r}, keep_together=...): counts cannot be equal with groups of {smallest} to "
                f"{largest} samples. Use assignment_mode='slack' or 'free'"
            )
        share, rest = divmod(len(size), ranks)
        return np.ones_like(size), share, share + bool(rest), rest or ranks
    samples = int(size.sum())
    if mode == "free":
        return size, 1, samples, ranks
    most = max(-(-samples // ranks), int(min(samples, samples / ranks * (1 + count_slack))))
    if largest > most:
        raise ValueError(
            f"assign(assignment_mode='slack', count_slack={count_slack}, keep_together=...): a group of {largest} samples, but "
            f"a rank may hold {most}. Use count_slack={math.ceil(100 * (largest * ranks / samples - 1)) / 100} or more, or "
            "assignment_mode='free'"
        )
    return size, 1, most, ranks


def _token_limit(token: Floats | None, limit: float | None, group_of_sample: Ints) -> tuple[Ints | None, int]:
    """Return the tokens of every group, None without a limit, and how many a rank may hold."""
    if limit is None:
        return None, 0
    if token is None:
        raise ValueError(f"assign(max_tokens_per_rank={limit!r}) needs tokens=, the tokens of each sample")
    if not (is_number(limit) and np.isfinite(limit) and limit > 0):
        raise ValueError(f"assign(max_tokens_per_rank={limit!r}): pass a finite number > 0, or None for no limit")
    tokens, most = whole_tokens(token, limit)
    return np.bincount(group_of_sample, tokens).astype(np.int64), most


def whole_tokens(tokens: Floats, limit: float, name: str = "assign(tokens=...)") -> tuple[Ints, int]:
    """Return the tokens of every sample as whole numbers, rounded up, and the limit, rounded down.

    If they are no whole numbers, such as costs, both are multiplied by a power of two before: by as much as keeps rounding
    below a millionth of the limit.

    Raises:
        ValueError: there are too many to be counted exactly.
    """
    whole = (np.rint(tokens) == tokens).all()
    digits = 0 if whole else max(0, _LIMIT_BITS - int(np.frexp(limit)[1]))
    tokens, limit = np.ldexp(tokens, digits), np.ldexp(limit, digits)
    if tokens.sum() > _MAX_TOTAL_TOKENS:
        raise ValueError(f"{name}: {tokens.sum():g} tokens in all are more than can be counted exactly")
    counted, most = np.ceil(tokens).astype(np.int64), int(limit)
    return np.where(tokens <= limit, np.minimum(counted, most), counted), most  # one as large as the limit fits
