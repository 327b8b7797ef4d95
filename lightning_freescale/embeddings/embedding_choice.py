"""Which plain ``nn.Embedding`` modules to shard: those that the user names, or all large ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType, MethodType
from typing import Literal, NamedTuple

import torch
from torch import nn

LARGE_EMBEDDING = 1_000_000
"""Numbers in a table from which on ``shard="auto"`` shards it: with 4 MB, DDP's reduction of its dense gradient takes time."""


class EmbeddingChoice(NamedTuple):
    """The ``nn.Embedding`` modules of a module.

    Attributes:
        chosen: those to shard, by path.
        left: large ones that are not sharded and could be, by path.
        unshardable: large ones that cannot be, by path, with the reason.
    """

    chosen: dict[str, nn.Embedding]
    left: dict[str, nn.Embedding]
    unshardable: dict[str, str]


def choose_embeddings(root: nn.Module, shard: Sequence[str] | Literal["auto"] | None) -> EmbeddingChoice:
    """Return which of the ``nn.Embedding`` modules under ``root`` are to be sharded.

    Args:
        root: the module, unsharded or sharded earlier.
        shard: paths in it; ``"auto"`` for those of :data:`LARGE_EMBEDDING` numbers or more that can be sharded; or None.

    Raises:
        ValueError: there is no ``nn.Embedding`` at a path, or it would not be the same sharded; says why, and the fix.
    """
    plain = _plain_embeddings(root)
    tables = _tables(plain)
    obstacles = {path: _obstacle_of_table(root, tied) for path, tied in tables.items()}
    firsts = {path: plain[path] for path in tables}
    large = {path: module for path, module in firsts.items() if module.num_embeddings * module.embedding_dim >= LARGE_EMBEDDING}
    free = {path: module for path, module in large.items() if obstacles[path] is None}
    unshardable = {path: reason for path in large if (reason := obstacles[path]) is not None}
    if shard is None or shard == "auto":
        return EmbeddingChoice(free, {}, unshardable) if shard else EmbeddingChoice({}, free, {})
    held, chosen = dict(root.named_modules(remove_duplicate=False)), {}
    first_path = {module: path for path, tied in tables.items() for module in tied.values()}
    for given in shard:
        module = held.get(given)
        if hasattr(module, "freescale_sharding"):  # by an earlier fit
            continue
        path = first_path.get(module) if isinstance(module, nn.Embedding) else None
        if path is None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {_missing(given, held, plain)}")
        if (reason := obstacles[path]) is not None:
            raise ValueError(f"FreeScaleStrategy(shard=[{given!r}]): {reason}, or leave {given!r} out of shard=")
        chosen[path] = plain[path]
    return EmbeddingChoice(chosen, {}, {})


def _plain_embeddings(root: nn.Module) -> dict[str, nn.Embedding]:
    """Return the modules by path that are no part of one of TorchRec's."""
    found: dict[str, nn.Embedding] = {}
    inside: str | None = None
    for path, module in root.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        inside = f"{path}." if type(module).__module__.startswith("torchrec.") and path else None
        if isinstance(module, nn.Embedding):
            found[path] = module
    return found


def _tables(plain: Mapping[str, nn.Embedding]) -> dict[str, dict[str, nn.Embedding]]:
    """Return the modules of each table by its first path: several that share a weight look up one table."""
    found: dict[tuple[int, int | None], dict[str, nn.Embedding]] = {}
    for path, module in plain.items():
        key = id(_weight_of(module) if _weight_of(module) is not None else module), module.padding_idx
        found.setdefault(key, {})[path] = module
    return {next(iter(tied)): tied for tied in found.values()}


def _weight_of(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("weight")


def tied_modules(root: nn.Module, weight: nn.Parameter | None) -> list[str]:
    """Return the paths of the modules under ``root`` that have the weight of an ``nn.Embedding`` as theirs, such as a head."""
    held = root.named_modules(remove_duplicate=False)
    return [path for path, module in held if _weight_of(module) is weight is not None and not isinstance(module, nn.Embedding)]


def _missing(path: str, held: Mapping[str, nn.Module], plain: Mapping[str, nn.Embedding]) -> str:
    """Say why the module at a path, if there is one, cannot be chosen."""
    ways = f"its nn.Embedding modules are {[*plain]}"
    if path not in held:
        near = get_close_matches(path, plain, n=1)
        return f"the module has no {path!r}, {f'did you mean {near[0]!r}?' if near else ways}"
    if isinstance(held[path], nn.Embedding):
        return f"{path!r} belongs to a module of TorchRec, which is sharded as a whole: leave it out"
    return f"{path!r} is a {type(held[path]).__name__}, no nn.Embedding: {ways}"


def _obstacle_of_table(root: nn.Module, tied: Mapping[str, nn.Embedding]) -> str | None:
    """Return why a sharded table would not do what the modules of one weight do, and a fix; None if it would."""
    shared = len(tied) > 1 or any(tied_modules(root, _weight_of(module)) for module in tied.values())
    if shared and any(module.weight.is_meta for module in tied.values()):
        return f"{[*tied]} share a weight on the meta device, where they cannot be initialised as one: build it on the CPU"
    obstacles = (_obstacle(path, module) or _other_use(root, path, module, tied) for path, module in tied.items())
    return next((reason for reason in obstacles if reason is not None), None)


def _obstacle(path: str, module: nn.Embedding) -> str | None:
    """Return what ``module`` does that a sharded table would not, and a fix; None if there is nothing."""
    kind, weight, own = type(module), module._parameters.get("weight"), _own_methods(module)
    if own - {"reset_parameters"} or weight is None:
        return f"{path!r} is a {kind.__name__}, which has {sorted(own)} of its own: use a plain nn.Embedding"
    if own and weight.is_meta:
        return f"{path!r} is a {kind.__name__} on the meta device with its own reset_parameters: build it on the CPU"
    if module.max_norm is not None:
        return f"{path!r} has max_norm={module.max_norm!r}, which changes rows when they are looked up: build it without"
    if module.scale_grad_by_freq:
        return f"{path!r} has scale_grad_by_freq=True, but ranks would have to count the ids of all: build it without"
    if weight.dtype != torch.float32:
        return f"{path!r} is of {weight.dtype}, but tables are of torch.float32: convert it"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return f"{path!r} has hooks, which a sharded table would not run: remove them"
    return None


def _other_use(root: nn.Module, path: str, module: nn.Embedding, tied: Mapping[str, nn.Embedding]) -> str | None:
    """Return which module that is not ``tied`` to it has the weight of ``module`` otherwise than as its weight, and a fix."""
    for holder, other in root.named_modules():
        for name, parameter in other.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is module.weight and other not in tied.values():
                also = f"the weight of {path!r} is also {(f'{holder}.{name}' if holder else name)!r}"
                if isinstance(other, nn.Embedding) and other.padding_idx != module.padding_idx:
                    return f"{also}, but padding_idx is {module.padding_idx} and {other.padding_idx}: give both the same"
                if isinstance(other, nn.Embedding) or name != "weight":
                    return f"{also}, and only a module that has it as its 'weight' can share it: name it so, or untie them"
    return None


def _own_methods(module: nn.Embedding) -> set[str]:
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]
    defined = [item for each in (module, *classes) for item in vars(each).items()]
    return {name for name, value in defined if isinstance(value, (FunctionType, MethodType, property))} - {"__init__"}
