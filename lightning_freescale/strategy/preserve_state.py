"""Run code of a module without a trace in the module or in the random states."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATOMS: tuple[type, ...] = (bool, int, float, str, type(None))
_LISTS: tuple[type, ...] = (list, set, deque)
_DICTS: tuple[type, ...] = (dict, OrderedDict, defaultdict)
_COPIED = (np.ndarray, np.random.Generator, np.random.RandomState, random.Random)


@contextmanager
def preserve_module_state(
    root: nn.Module, device: torch.device, skip: Container[nn.Module] = ()
) -> Generator[None, None, None]:
    """Give the modules of ``root`` copies of their attributes inside the block, and their own back afterwards.

    Copied are buffers and other tensors, lists, dicts, sets, arrays and random generators, so counters, lists of losses,
    metrics and batch statistics stay as they were; the originals are not touched, so autograd may hold on to them. The price
    is a copy of every buffer. Not covered: other objects, what is outside the module, parameters.

    Args:
        root: the module.
        device: whose random state is kept; so are the host's, Python's and numpy's.
        skip: modules to leave alone.

    Raises:
        RuntimeError: a parameter was changed meanwhile, and stays changed; names it.
    """
    modules = {name: module for name, module in root.named_modules() if module not in skip}
    originals = [(module, dict(vars(module))) for module in modules.values()]
    parameters = {
        f"{path}.{name}".lstrip("."): (parameter, _write_stamp(parameter))
        for path, module in modules.items()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    copies: dict[int, Any] = {}
    try:
        with _random_states(device):
            for module, attributes in originals:
                vars(module).update({name: _copy(value, copies) for name, value in attributes.items()})
            yield
    finally:
        for module, attributes in originals:
            vars(module).update(attributes)
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
    changed = [name for name, (parameter, stamp) in parameters.items() if _write_stamp(parameter) != stamp]
    if changed:
        raise RuntimeError(f"parameter {changed[0]!r} was changed, once more than it should have been")


def _write_stamp(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


@contextmanager
def _random_states(device: torch.device) -> Generator[None, None, None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy that can be changed in value's place; what is shared stays shared."""
    if type(value) in _ATOMS:
        return value
    if id(value) not in copies:
        copies[id(value)] = _new_copy(value, copies)
    return copies[id(value)]


def _new_copy(value: Any, copies: dict[int, Any]) -> Any:
    if type(value) in _LISTS:
        return value.copy()
    if type(value) in _DICTS:
        copied = copies[id(value)] = value.copy()  # before its values: it may hold itself
        for key, inner in value.items():
            copied[key] = _copy(inner, copies)
        return copied
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.deepcopy(value) if isinstance(value, _COPIED) else value
