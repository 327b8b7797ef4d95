"""Run code without a trace in the objects that it can reach, or refuse to."""

from __future__ import annotations

import copy
import enum
import pathlib
import random
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_freescale.strategy.object_parts import (
    attribute,
    class_attributes,
    hides_state,
    random_state,
    slots,
    write_attribute,
    write_class,
    write_dict,
    write_items,
)

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_LEFT_ALONE = (
    *(int, float, str, bytes, range, slice, enum.Enum, pathlib.PurePath, types.ModuleType, types.MappingProxyType),
    *(*weakref.ProxyTypes, weakref.ref, np.generic, np.dtype, dist.ProcessGroup, torch.Stream, torch.Event),
)
_LEFT_ALONE_MODULES = ("lightning_freescale.", "logging.", "torch._dynamo.", "torch._inductor.", "torch._ops.", "torch.fx.")
"""Modules whose objects have no state that training sees: this package, Python's logging, compiled code."""
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


class LeavesTraceError(RuntimeError):
    """Something would stay changed where nothing may leave a trace."""


@contextmanager
def preserve_state(
    roots: Mapping[str, Any], device: torch.device, instead: Iterable[tuple[Any, Any]] = ()
) -> Generator[None, None, None]:
    """Put back, after the block, what the block has changed in objects that can be reached from ``roots``.

    Reached are attributes, also those of classes, items, closures, default arguments, and what methods are bound to. All that
    stays the same object and gets its contents back; but tensors, parameters and arrays are copies inside the block, as
    autograd may hold on to the originals. Random generators go back, the global ones as well. The price is a walk over all
    objects and a copy of every tensor. Not reached: globals, keys of dicts, what libraries hold outside of Python.

    Args:
        roots: modules or other objects, by what an error calls them.
        device: whose random state is kept; so are the host's, Python's and numpy's.
        instead: pairs of an object and what takes its place inside the block; itself, to leave it alone.

    Raises:
        LeavesTraceError: something can be reached that can be neither copied nor put back, such as an iterator, an open file
            or a lock; names it. The block has not run then.
    """
    keeper = _Keeper(instead)
    with _random_states(device):
        try:
            for path, root in roots.items():
                keeper.keep(root, path)
            yield
        finally:
            for write_back in reversed(keeper.write_back):
                write_back()


@contextmanager
def _random_states(device: torch.device) -> Generator[None, None, None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _Keeper:
    """Walks over objects.

    Attributes:
        write_back: what puts them back, to be called in reverse.
    """

    def __init__(self, instead: Iterable[tuple[Any, Any]]) -> None:
        self.write_back: list[Callable[[], Any]] = []
        self._given = list(instead)  # alive, so that no other object gets the id of one
        self._instead = {id(value): other for value, other in self._given}
        self._seen: set[int] = set()

    def keep(self, value: Any, path: str) -> Any:
        """Return what stands for ``value`` from now on: a copy, or itself if it will be put back. Shared stays shared."""
        if type(value) in _ATOMS:
            return value
        if id(value) not in self._instead:
            self._instead[id(value)] = value  # it may hold itself
            self._instead[id(value)] = self._keep_unknown(value, path)
        return self._instead[id(value)]

    def _keep_unknown(self, value: Any, path: str) -> Any:
        kind = type(value)
        source = value.__module__ if kind is types.FunctionType else kind.__module__
        foreign = f"{source}.".startswith(_LEFT_ALONE_MODULES) and not issubclass(kind, nn.Module)
        if foreign or issubclass(kind, _LEFT_ALONE):
            return value
        if issubclass(kind, (Tensor, np.ndarray)):
            return _copy_array(value, path)
        if issubclass(kind, (tuple, frozenset, partial, *_BOUND)):
            return self._keep_immutable(value, path)
        if issubclass(kind, type):
            self._keep_class_attributes(value)
        elif (restore := random_state(value)) is not None:
            self.write_back.append(restore)
        elif kind is types.FunctionType:
            self._keep_attributes(value, path, ("__defaults__", "__kwdefaults__"))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                self.keep(cell, f"{path}.{name}")
            self._keep_dict(vars(value), path, "{}.{}")
        elif kind is types.CellType:
            self._keep_attributes(value, path, ("cell_contents",))
        elif issubclass(kind, (dict, list, set, deque)) or not hides_state(kind):
            self._keep_object(value, path)
        else:
            return _copy_hidden(value, path)
        return value

    def _keep_immutable(self, value: Any, path: str) -> Any:
        """Return ``value`` again, or one like it of what stands for its parts."""
        if isinstance(value, _BOUND):
            owner = self.keep(value.__self__, f"{path}.__self__")
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if isinstance(value, partial):
            function, arguments = self.keep(value.func, f"{path}.func"), self.keep(value.args, f"{path}.args")
            self.keep(value.keywords, f"{path}.keywords")
            unchanged = function is value.func and arguments is value.args
            return value if unchanged else partial(function, *arguments, **value.keywords)
        parts = list(value)
        kept = self._keep_all(parts, path)
        if all(map(is_, kept, parts)):
            return value
        make: Any = getattr(type(value), "_make", type(value))  # named tuples take their values one by one
        return make(kept)

    def _keep_object(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            self._keep_dict(value, path, "{}[{!r}]")
        elif isinstance(value, (list, set, deque)):
            parts = list(value)
            self._keep_parts(parts, self._keep_all(parts, path), partial(write_items, value))
        self._keep_class_attributes(type(value))
        self._keep_attributes(value, path, slots(type(value)))
        if hasattr(value, "__dict__"):
            self._keep_dict(vars(value), path, "{}.{}")

    def _keep_all(self, parts: list[Any], path: str) -> list[Any]:
        if set(map(type, parts)) <= _ATOMS:  # a long list of numbers
            return parts
        return [self.keep(part, f"{path}[{index}]") for index, part in enumerate(parts)]

    def _keep_dict(self, value: dict[Any, Any], path: str, name: str) -> None:
        if id(value) in self._seen:  # objects may share it, or be their own
            return
        self._seen.add(id(value))
        base = OrderedDict if isinstance(value, OrderedDict) else dict  # a subclass may do something else in its methods
        keys, parts = list(base.keys(value)), list(base.values(value))
        labels = [key if isinstance(key, (str, int)) else type(key) for key in keys]
        kept = [self.keep(part, name.format(path, label)) for label, part in zip(labels, parts)]
        self._keep_parts(parts, kept, partial(write_dict, value, base, keys))

    def _keep_attributes(self, value: Any, path: str, names: Iterable[str]) -> None:
        for name in names:
            part = attribute(value, name)
            self._keep_parts([part], [self.keep(part, f"{path}.{name}")], partial(write_attribute, value, name))

    def _keep_class_attributes(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen:
                self._seen.add(id(base))
                data = class_attributes(base)
                kept = [self.keep(part, f"{base.__qualname__}.{name}") for name, part in data.items()]
                self._keep_parts(list(data.values()), kept, partial(write_class, base, list(data)))

    def _keep_parts(self, parts: list[Any], kept: list[Any], write: Callable[[list[Any]], None]) -> None:
        self.write_back.append(partial(write, parts))
        if not all(map(is_, kept, parts)):
            write(kept)


def _copy_array(value: Any, path: str) -> Any:
    if isinstance(value, np.memmap) and value.flags.writeable:
        raise LeavesTraceError(f"{_named(value, path)} writes to a file")
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value) if value.flags.writeable else value
    copied = copy.deepcopy(value) if isinstance(value, nn.Parameter) else value.detach().clone()
    vars(copied).update(vars(value))
    return copied


def _copy_hidden(value: Any, path: str) -> Any:
    if isinstance(value, Iterator):  # some can be copied, until a later Python
        raise LeavesTraceError(f"{_named(value, path)} cannot go back to where it was")
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise LeavesTraceError(f"{_named(value, path)} cannot be copied ({error})") from error


def _named(value: Any, path: str) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", path) + f", of type {kind},"
