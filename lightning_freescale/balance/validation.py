"""Checks of the numbers that users pass."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver import Ints

Floats = NDArray[np.float64]
_MAX_TOTAL_TOKENS = 2**53
_LIMIT_BITS = 21


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
