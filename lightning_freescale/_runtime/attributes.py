"""Attributes that have another value for some time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a module or an instance within the context. The class does not change."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - own.keys():
            vars(owner).pop(name, None)
        vars(owner).update(own)  # at no moment without the attribute, which another thread may read
