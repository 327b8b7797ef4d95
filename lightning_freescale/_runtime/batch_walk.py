"""Walk over all objects in a batch, in any kind of container."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

_MOST_STEPS, _MOST_NODES = 8, 20_000
"""Limits of the walk. A batch may hold a list of names per sample, or refer to a large object; ids are near its root."""
_LEAVES = (str, bytes, int, float, type(None))


class PathStep(NamedTuple):
    """One step of a path: ``node[key]`` or ``node.key``."""

    kind: Literal["item", "attribute"]
    key: Any


Steps = tuple[PathStep, ...]


def walk(batch: Any) -> Iterator[tuple[Steps, Any]]:
    """Yield the path and the object for all objects in a batch, in breadth-first order, each object once."""
    waiting: deque[tuple[Steps, Any]] = deque([((), batch)])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_NODES:
        steps, node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield steps, node
        if len(steps) < _MOST_STEPS:
            waiting.extend(((*steps, step), child) for step, child in _children(node) if not isinstance(child, _LEAVES))


def _children(node: Any) -> Iterator[tuple[PathStep, Any]]:
    if isinstance(node, (Tensor, nn.Module, type)) or callable(node):
        return
    if isinstance(node, Mapping):
        yield from ((PathStep("item", key), value) for key, value in node.items())
    elif isinstance(node, (list, tuple)):
        yield from ((PathStep("item", index), value) for index, value in enumerate(node))
    else:
        # a data class with slots has no __dict__
        fields = [field.name for field in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
        for name in dict.fromkeys([*fields, *getattr(node, "__dict__", ())]):
            yield PathStep("attribute", name), getattr(node, name, None)
