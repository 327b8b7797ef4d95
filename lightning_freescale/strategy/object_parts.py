"""What a Python object consists of: how to read its parts, and to write them past its own methods."""

from __future__ import annotations

import random
import struct
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

MISSING = object()
"""Stands for the value of an attribute that is not there."""


def random_state(value: Any) -> Callable[[], Any] | None:
    """Return what puts a random generator back to where it is now; None if it is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    return partial(setattr, bits, "state", bits.state) if isinstance(bits, np.random.BitGenerator) else None


def slots(kind: type) -> list[str]:
    """Return the names of attributes that stand in no ``__dict__``."""
    found = (vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base))
    return [name for items in found for name, slot in items if isinstance(slot, types.MemberDescriptorType)]


def hides_state(kind: type) -> bool:
    """Whether instances are larger than their attributes, so that C code keeps something in them; copyreg asks it so, too."""
    pointers = len(slots(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + pointers * struct.calcsize("P")


def class_attributes(kind: type) -> dict[str, Any]:
    """Return what a class written in Python holds, without methods, properties and what belongs to Python."""
    written_in_python = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return {
        name: value
        for name, value in (vars(kind).items() if written_in_python else ())
        if not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__")
    }


def attribute(value: Any, name: str) -> Any:
    """Return an attribute, or MISSING."""
    try:
        return object.__getattribute__(value, name)
    except (AttributeError, ValueError):  # an empty slot; an empty cell
        return MISSING


def write_attribute(value: Any, name: str, parts: list[Any]) -> None:
    """Set an attribute to the only one of ``parts``; delete it for MISSING."""
    if parts[0] is not MISSING:
        object.__setattr__(value, name, parts[0])
    elif attribute(value, name) is not MISSING:
        object.__delattr__(value, name)


def write_class(kind: type, names: list[str], parts: list[Any]) -> None:
    """Let a class hold ``parts`` by these names, and nothing else that :func:`class_attributes` returns."""
    now = class_attributes(kind)
    for name in now.keys() - set(names):
        type.__delattr__(kind, name)
    for name, part in zip(names, parts):
        if now.get(name, MISSING) is not part:
            type.__setattr__(kind, name, part)


def write_dict(value: dict[Any, Any], base: Any, keys: list[Any], parts: list[Any]) -> None:
    """Let a dict hold ``parts`` by these keys alone, in this order; by the methods of ``base``."""
    if list(map(id, base.keys(value))) != list(map(id, keys)):
        base.clear(value)
    for key, part in zip(keys, parts):
        base.__setitem__(value, key, part)


def write_items(value: Any, parts: list[Any]) -> None:
    """Let a list, set or deque hold ``parts`` alone."""
    if isinstance(value, list):
        list.__setitem__(value, slice(None), parts)
        return
    value.clear()
    (value.extend if isinstance(value, deque) else value.update)(parts)
