"""Where in a batch the ids are that a model looks up: found once, then followed in every later batch."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

_DEPTH = 8
_PLACES = 20_000
"""A batch may hold a list of names per sample, or lead to something huge; ids are near its root."""
_LEAVES = (str, bytes, int, float, type(None))
_MISSING = object()


class PathStep(NamedTuple):
    """One step down: ``place[key]`` or ``place.key``."""

    kind: Literal["item", "attribute"]
    key: Any


Steps = tuple[PathStep, ...]


@dataclass(frozen=True)
class KJTPath:
    """Where the ids are.

    Attributes:
        whole: where a KeyedJaggedTensor stands in the batch; None if the model makes one of tensors in the batch.
        keys: its features, if it is made.
        parts: where the tensors are that it is made of, by the names of KeyedJaggedTensor's arguments.
    """

    whole: Steps | None
    keys: tuple[str, ...] = ()
    parts: tuple[tuple[str, Steps], ...] = ()


def find_path(batch: Any, features: KeyedJaggedTensor) -> KJTPath | None:
    """Where ``features``, or the tensors it was made of, stand in ``batch``; None if they do not.

    Looks into mappings, lists, tuples, dataclasses and plain objects. The same object comes first, then a KeyedJaggedTensor
    over the same memory, then single tensors. Empty tensors have no memory: they are found only as the same object.
    """
    places = list(_walk(batch))
    whole = _first(places, lambda place: place is features)
    if whole is None:
        whole = _first(places, lambda place: isinstance(place, KeyedJaggedTensor) and _same_parts(place, features))
    return KJTPath(whole) if whole is not None else _find_parts(places, features)


def follow(batch: Any, path: KJTPath) -> KeyedJaggedTensor | None:
    """The ids of another batch; None if it has no such place, or something else is there."""
    if path.whole is not None:
        found = _at(batch, path.whole)
        return found if isinstance(found, KeyedJaggedTensor) else None
    parts = {name: _at(batch, steps) for name, steps in path.parts}
    if not all(isinstance(part, Tensor) for part in parts.values()):
        return None
    return KeyedJaggedTensor(keys=list(path.keys), **parts)


def same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are one: the same object or the same view of the same memory. Two missing ones are."""
    if a is b:
        return True
    if a is None or b is None or not (_plain(a) and _plain(b)) or a.data_ptr() == 0:
        return False
    return _view(a) == _view(b)


def _find_parts(places: list[tuple[Steps, Any]], features: KeyedJaggedTensor) -> KJTPath | None:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return None  # more than three tensors make such a one
    needed = {"values": features.values()}
    if features.weights_or_none() is not None:
        needed["weights"] = features.weights()
    parts = {name: _find_tensor(places, tensor) for name, tensor in needed.items()}
    # whichever the model did not pass, TorchRec has computed: it stands in no batch
    for name, tensor in (("lengths", features.lengths_or_none()), ("offsets", features.offsets_or_none())):
        steps = None if tensor is None else _find_tensor(places, tensor)
        if steps is not None:
            parts[name] = steps
            break
    else:
        return None
    found = tuple((name, steps) for name, steps in parts.items() if steps is not None)
    return KJTPath(None, tuple(features.keys()), found) if len(found) == len(parts) else None


def _find_tensor(places: list[tuple[Steps, Any]], tensor: Tensor) -> Steps | None:
    return _first(places, lambda place: isinstance(place, Tensor) and same_memory(place, tensor))


def _first(places: list[tuple[Steps, Any]], wanted: Callable[[Any], bool]) -> Steps | None:
    return next((steps for steps, place in places if wanted(place)), None)


def _same_parts(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    lengths, offsets = (a.lengths_or_none(), b.lengths_or_none()), (a.offsets_or_none(), b.offsets_or_none())
    jagged = any(x is not None and same_memory(x, y) for x, y in (lengths, offsets))
    both = ((a.values(), b.values()), (a.weights_or_none(), b.weights_or_none()))
    return jagged and a.keys() == b.keys() and all(same_memory(x, y) for x, y in both)


def _plain(tensor: Tensor) -> bool:
    """Whether it has one piece of memory."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _walk(batch: Any) -> Iterator[tuple[Steps, Any]]:
    """Every place of a batch, the nearest first, each object once."""
    waiting: deque[tuple[Steps, Any]] = deque([((), batch)])
    seen: set[int] = set()
    while waiting and len(seen) < _PLACES:
        steps, place = waiting.popleft()
        if id(place) in seen:
            continue
        seen.add(id(place))
        yield steps, place
        if len(steps) < _DEPTH:
            waiting.extend(((*steps, step), below) for step, below in _below(place) if not isinstance(below, _LEAVES))


def _below(place: Any) -> Iterator[tuple[PathStep, Any]]:
    if isinstance(place, (Tensor, nn.Module, type)) or callable(place):
        return
    if isinstance(place, Mapping):
        yield from ((PathStep("item", key), value) for key, value in place.items())
    elif isinstance(place, (list, tuple)):
        yield from ((PathStep("item", index), value) for index, value in enumerate(place))
    else:
        # a data class with slots has no __dict__
        fields = [field.name for field in dataclasses.fields(place)] if dataclasses.is_dataclass(place) else []
        for name in dict.fromkeys([*fields, *getattr(place, "__dict__", ())]):
            yield PathStep("attribute", name), getattr(place, name, None)


def _at(batch: Any, steps: Steps) -> Any:
    place = batch
    for kind, key in steps:
        if kind == "attribute":
            place = getattr(place, key, _MISSING)
        elif isinstance(place, Mapping):
            place = place[key] if key in place else _MISSING  # noqa: SIM401 (get() of a defaultdict is not it)
        elif isinstance(place, (list, tuple)) and isinstance(key, int):
            place = place[key] if key < len(place) else _MISSING
        else:
            return _MISSING
    return place
