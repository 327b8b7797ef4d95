"""Checks of the numbers that users pass."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.solver.bounds import Ints

Floats = NDArray[np.float64]
_MAX_TOTAL_TOKENS = 2**53
_LIMIT_BITS = 21


def is_non_negative(values: Any) -> Any:
    """Return True, or a mask of the shape of ``values``, where values are finite and not negative."""
    return np.isfinite(values) & (np.asarray(values) >= 0)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of Python or numpy as Python's, or raise ValueError if it is not one or below ``least``.

    ``name`` is the argument's name for errors, with braces for the value, such as ``"assign(ranks={})"``.
    """
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name.format(repr(value))}: pass an integer of at least {least}")
    return int(value)


def non_negative(name: str, values: ArrayLike, size: int | None = None, first: int = 0) -> Floats:
    """Return ``values`` as float64, shape ``[samples]``.

    Args:
        name: Name of the argument for errors, such as ``"assign(costs=...)"``.
        values: One number per sample.
        size: Number of samples; any number by default.
        first: Index of the first sample, for errors.

    Raises:
        ValueError: The shape is wrong, a value is negative or not finite, or the sum overflows.
    """
    given = np.asarray(values)
    if given.dtype.kind in "cSU":
        raise ValueError(f"{name} has values of type {given.dtype}. Pass one real number per sample.")
    array = np.asarray(given, dtype=np.float64)
    if array.ndim != 1 or size not in (None, len(array)):
        wanted = "samples" if size is None else size
        raise ValueError(f"{name} has shape {array.shape}. Pass one number per sample, shape [{wanted}].")
    bad = np.flatnonzero(~is_non_negative(array))
    if bad.size:
        raise ValueError(
            f"{name}[{first + bad[0]}] is {array[bad[0]]}: pass finite numbers >= 0. {bad.size} of the values are not."
        )
    if array.max(initial=0.0) > np.finfo(np.float64).max / max(1, len(array)):
        raise ValueError(f"{name}: the sum of numbers up to {array.max():g} overflows. Use a larger unit.")
    return array


def whole_tokens(tokens: Floats, limit: float, name: str = "assign(tokens=...)") -> tuple[Ints, int]:
    """Return the tokens as whole numbers, rounded up, and the limit, rounded down.

    Fractions, such as costs, and the limit are first multiplied by a power of two that keeps the rounding below a millionth of
    the limit.

    Raises:
        ValueError: The sum of the tokens is too large to be exact.
    """
    whole = (np.rint(tokens) == tokens).all()
    digits = 0 if whole else max(0, _LIMIT_BITS - int(np.frexp(limit)[1]))
    tokens, limit = np.ldexp(tokens, digits), np.ldexp(limit, digits)
    if tokens.sum() > _MAX_TOTAL_TOKENS:
        raise ValueError(f"{name}: the sum of {tokens.sum():g} tokens is too large to be exact. Use a larger unit.")
    counted, most = np.ceil(tokens).astype(np.int64), int(limit)
    return np.where(tokens <= limit, np.minimum(counted, most), counted), most  # a sample as large as the limit fits
