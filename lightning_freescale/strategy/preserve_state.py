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

_LISTS = (list, set, deque)
_DICTS = (dict, OrderedDict, defaultdict)
_COPIED = (np.ndarray, np.random.Generator, np.random.RandomState, random.Random)


class ParameterChangedError(RuntimeError):
    """A parameter was changed where nothing should leave a trace."""


@contextmanager
def preserve_module_state(root: nn.Module, device: torch.device, skip: Container[nn.Module]) -> Generator[None, None, None]:
    """Give the modules of ``root`` copies of their attributes inside the block, and their own back afterwards.

    Copied are buffers and other tensors, lists, dicts, sets, arrays and random generators, so counters, lists of losses,
    metrics and batch statistics stay as they were; the originals are not touched, so autograd may hold on to them. The price
    is a copy of every buffer. Not covered: other objects, what is outside the module, parameters.

    Args:
        root: the module.
        device: whose random state is kept; so are the host's, Python's and numpy's.
        skip: modules to leave alone.

    Raises:
        ParameterChangedError: a parameter was changed meanwhile, and stays changed; names it.
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
        raise ParameterChangedError(f"parameter {changed[0]!r} was changed, once more than it should have been")


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
    if id(value) in copies:
        return copies[id(value)]
    copied = value
    if type(value) in (*_LISTS, *_DICTS):
        copied = value.copy()
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        copied = value.detach().clone()
    elif isinstance(value, torch.Generator):
        copied = value.clone_state()
    elif isinstance(value, _COPIED):
        copied = copy.deepcopy(value)
    copies[id(value)] = copied  # before its values: it may hold itself
    if type(value) in _DICTS:
        for key, inner in value.items():
            copied[key] = _copy(inner, copies)
    return copied
