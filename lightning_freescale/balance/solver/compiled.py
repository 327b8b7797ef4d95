"""The optional numba path. It runs the same whole-number arithmetic, so the plan is the same to the sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

SMALLEST = 2048
"""Units from which on compiling is worth it: below, the interpreter needs less than a millisecond."""
enabled = find_spec("numba") is not None
"""Set to False to plan without numba although it is installed."""


def worth_compiling(units: int) -> bool:
    """Whether to take the compiled path."""
    return enabled and units >= SMALLEST


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled at its first call and kept on disk; it leaves the interpreter free for the training step."""
    import numba

    return numba.njit(cache=True, nogil=True)(function)
