"""What :func:`assign` is given, checked and in whole numbers."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import Ints, Problem, whole

Mode = Literal["fixed", "slack", "free", "zigzag"]
_MOST_TOKENS = 2**53
SPEED_STEPS = 1024
"""Speeds are rounded to this many steps of the fastest rank's."""


def check(cost: NDArray[np.float64], ranks: int, mode: str, count_slack: float) -> None:
    """The arguments that are not arrays.

    Raises:
        ValueError: one does not fit.
    """
    if ranks < 1:
        raise ValueError(f"assign(ranks={ranks!r}): there must be at least one rank")
    if mode not in get_args(Mode):
        raise ValueError(f"assign(mode={mode!r}): choose one of {', '.join(get_args(Mode))}")
    if not (np.isfinite(count_slack) and count_slack >= 0):
        raise ValueError(f"assign(count_slack={count_slack!r}): pass a share of the equal count, 0 or more")
    if len(cost) < ranks:
        raise ValueError(f"assign: {len(cost)} samples for {ranks} ranks; every rank needs at least one sample")


def per_sample(of: str, name: str, values: ArrayLike, samples: int | None = None) -> NDArray[np.float64]:
    """The argument ``name`` of ``of``: shape ``[samples]``, finite, >= 0, also in sum.

    Raises:
        ValueError: something else.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or samples not in (None, len(array)):
        wanted = "samples" if samples is None else samples
        raise ValueError(f"{of}({name}=...) has shape {array.shape}: pass one number per sample, shape [{wanted}]")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise ValueError(f"{of}({name}=...): {array[bad[0]]} of sample {bad[0]} is not a finite number >= 0")
    if array.max(initial=0.0) > np.finfo(np.float64).max / max(1, len(array)):
        raise ValueError(f"{of}({name}=...): numbers up to {array.max():g} overflow when they are summed. Use a larger unit")
    return array


def slowness(rank_speeds: ArrayLike | None, ranks: int) -> Ints:
    """Whole numbers in inverse proportion to the speeds, shape ``[ranks]``.

    Raises:
        ValueError: not one speed > 0 per rank, or they are too far apart.
    """
    if rank_speeds is None:
        return np.ones(ranks, dtype=np.int64)
    speed = np.asarray(rank_speeds, dtype=np.float64)
    if speed.shape != (ranks,) or not (np.isfinite(speed) & (speed > 0)).all() or speed.max() > SPEED_STEPS * speed.min():
        raise ValueError(
            f"assign(rank_speeds={rank_speeds!r}): pass one finite number > 0 per rank, shape [{ranks}], none more than "
            f"{SPEED_STEPS} times another"
        )
    return np.rint(SPEED_STEPS * speed.max() / speed).astype(np.int64) if np.ptp(speed) else np.ones(ranks, dtype=np.int64)


def units(keep_together: ArrayLike | None, samples: int) -> Ints:
    """The unit of every sample, numbered from 0.

    Raises:
        ValueError: not one group per sample.
    """
    if keep_together is None:
        return np.arange(samples)
    group = np.asarray(keep_together)
    if group.shape != (samples,):
        raise ValueError(f"assign(keep_together=...) has shape {group.shape}: pass the group of each sample, shape [{samples}]")
    return np.unique(group, return_inverse=True)[1].reshape(samples)


def problem_of(
    cost: NDArray[np.float64],
    unit_of_sample: Ints,
    tokens: NDArray[np.float64] | None,
    max_tokens: float | None,
    slow: Ints,
    mode: str,
    count_slack: float,
) -> Problem:
    """What the search works on.

    Raises:
        ValueError: the arguments contradict each other.
    """
    size, ranks = np.bincount(unit_of_sample).astype(np.int64), len(slow)
    if max_tokens is not None and tokens is None:
        raise ValueError(f"assign(max_tokens_per_rank={max_tokens!r}) needs tokens=, the tokens of each sample")
    if len(size) < ranks:
        raise ValueError(f"assign(keep_together=...): {len(size)} groups for {ranks} ranks; every rank needs at least one")
    equal_counts = mode in ("fixed", "zigzag")
    if equal_counts and np.ptp(size):
        raise ValueError(
            f"assign(mode={mode!r}, keep_together=...): counts cannot be equal with groups of {size.min()} to {size.max()} "
            "samples. Use mode='slack' or 'free'"
        )
    if equal_counts:
        size = np.ones_like(size)
    least, most, spare = _counts(int(size.sum()), ranks, mode, count_slack, int(size.max()))
    limited = tokens is not None and max_tokens is not None
    if max_tokens is not None and not (np.isfinite(max_tokens) and max_tokens > 0):
        raise ValueError(f"assign(max_tokens_per_rank={max_tokens!r}): pass a finite number > 0, or None for no limit")
    if tokens is not None and max_tokens is not None and tokens.sum() > _MOST_TOKENS:
        raise ValueError(f"assign(tokens=...): {tokens.sum():g} tokens in all are more than can be counted exactly")
    return Problem(
        cost=whole(np.bincount(unit_of_sample, cost).astype(np.float64), slow),
        size=size,
        tokens=np.bincount(unit_of_sample, np.ceil(tokens)).astype(np.int64) if limited and tokens is not None else None,
        slowness=slow,
        least=least,
        most=most,
        spare=spare,
        token_limit=int(max_tokens) if limited and max_tokens is not None else 0,
    )


def _counts(samples: int, ranks: int, mode: str, count_slack: float, largest: int) -> tuple[int, int, int | None]:
    """Least and most samples of a rank, and how many ranks may hold the most."""
    share, rest = divmod(samples, ranks)
    if mode in ("fixed", "zigzag"):
        return share, share + bool(rest), rest or ranks
    if mode == "free":
        return 1, samples, None
    most = max(share + bool(rest), int(samples / ranks * (1 + count_slack)))
    if largest > most:
        raise ValueError(
            f"assign(mode='slack', count_slack={count_slack}, keep_together=...): a group of {largest} samples, but a rank may "
            f"hold {most}. Use count_slack={math.ceil(100 * (largest * ranks / samples - 1)) / 100} or more, or mode='free'"
        )
    return 1, most, None
