"""The names that torch gives the arguments of a process group's methods, which differ from method to method."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_SAME = {
    "output": ("output_tensor", "output_tensors", "output_lists", "outputs"),
    "input": ("input_tensor", "input_tensors", "input_list", "inputs"),
    "opts": ("timeout",),
}
_SPELLINGS = {other: name for name, others in _SAME.items() for other in others}


def accept_c10d_argument_names(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method with ``output``, ``input`` and ``opts`` take all of them; ``opts`` may be a timeout."""

    @wraps(method)
    def any_spelling(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{_SPELLINGS.get(name, name): value for name, value in kwargs.items()})

    return any_spelling
