"""The modules of TorchRec, and subclasses, that can be sharded, and the refusal of large ones that cannot."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_freescale._runtime.error_text import a

LARGE_EMBEDDING = 1_000_000
"""The number of elements from which a table should be sharded. With 4 MB, DDP's reduction of the gradient is slow."""

_KINDS = (EmbeddingCollection, EmbeddingBagCollection)
_AROUND = (FeatureProcessedEmbeddingBagCollection, EmbeddingTower, EmbeddingTowerCollection)
"""Modules of TorchRec that call a collection like any module of the user."""

PLAIN = (nn.Embedding, nn.EmbeddingBag)
"""The tables of torch."""


def is_shardable(module: nn.Module) -> bool:
    """Return whether a module is one of TorchRec's two collections, or a subclass that changes only ``__init__``."""
    return isinstance(module, _KINDS) and not _changes(module)


def open_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules under ``root`` with their paths, without those inside a module that is sharded or left as a whole."""
    inside: str | None = None
    for path, module in root.named_modules():
        if inside is None or not path.startswith(inside):
            inside = f"{path}." if _is_closed(module) and path else None
            yield path, module


def check_replicas(root: nn.Module, sharded: Collection[nn.Module]) -> list[str]:
    """Return a message for each collection under ``root`` that is not in ``sharded`` and therefore replicated.

    Raise a ValueError if it has :data:`LARGE_EMBEDDING` or more elements.
    """
    texts: list[str] = []
    for path, module in open_modules(root):
        left = [each for each in module.modules() if each not in sharded]
        if not _is_closed(module):
            # other layers are not tables. Fused collections have tables in instances of nn.Module itself
            left = [each for each in left if each is module or isinstance(each, PLAIN) or type(each) is nn.Module]
        values = sum(weight.numel() for each in left for weight in each.parameters(recurse=False))
        if values == 0 or not _holds_tables(module):
            continue
        changes = alone = ""
        if isinstance(module, _KINDS):
            changes = f", which overrides or adds {_changes(module)},"
            inner = [name for name, each in module.named_modules(prefix=path) if isinstance(each, PLAIN)]
            alone = f", or pass shard={inner}"
        text = f"embedding collection {path!r} is {a(type(module))} with {values} values{changes} and cannot be sharded"
        if values >= LARGE_EMBEDDING:
            raise ValueError(
                f"{text}. Every rank would hold all of it. Use torchrec.EmbeddingCollection or EmbeddingBagCollection itself, "
                f"and change ids and results in a module around it{alone}."
            )
        texts.append(f"{text}. It is replicated as with 'ddp'")
    return texts


def own_members(module: nn.Module, kind: type[nn.Module]) -> set[str]:
    """Return the names of what ``module`` or a subclass of ``kind`` overrides or adds, except ``__init__`` and attributes."""
    classes = type(module).__mro__[: type(module).__mro__.index(kind)]
    members = {name for each in classes for name in vars(each) if name != "_abc_impl" and not re.fullmatch("__.*__", name)}
    defined = [item for each in (module, *classes) for item in vars(each).items()]
    members |= {name for name, value in defined if isinstance(value, (FunctionType, MethodType, property))} - {"__init__"}
    parts = module._modules.keys() | module._parameters.keys() | module._buffers.keys()
    return members | (parts - ({"weight"} if kind in PLAIN else {"embeddings", "embedding_bags"}))


def hooks_of(path: str, module: nn.Module) -> list[str]:
    """Return the hooks of ``module`` and of the modules in it that a sharded module would not run."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return [f"{name}.{kind}" for name, each in module.named_modules(prefix=path) for kind in kinds if getattr(each, kind)]


def _is_closed(module: nn.Module) -> bool:
    of_torchrec = type(module).__module__.startswith(("torchrec.modules.", "torchrec.distributed."))
    sharded = is_shardable(module) or hasattr(module, "freescale_sharding")
    return sharded or (of_torchrec and not isinstance(module, _AROUND))


def _changes(module: nn.Module) -> list[str]:
    """Return the names of what ``module`` does not have from TorchRec, also of the changed options of its tables."""
    kind = next(each for each in _KINDS if isinstance(module, each))
    if own := own_members(module, kind):
        return sorted(own)
    built: Any = module
    configs = built.embedding_bag_configs() if isinstance(built, EmbeddingBagCollection) else built.embedding_configs()
    plain = dict(kind(tables=configs, device=torch.device("meta")).named_modules())
    held = dict(module.named_modules())
    changed = plain.keys() ^ held.keys()
    for path in plain.keys() & held.keys():
        changed |= {f"{path}.{option}" for option in _changed_options(held[path], plain[path])}
    return sorted(changed)


def _changed_options(module: nn.Module, plain: nn.Module) -> set[str]:
    if not isinstance(plain, PLAIN):
        return set()
    if type(module) is not type(plain):
        return {type(module).__name__}
    options = [each for each in vars(module) if not each.startswith("_") and each not in {"training", "sparse"}]
    return own_members(module, type(plain)) | {each for each in options if vars(module)[each] != vars(plain).get(each)}


def _holds_tables(module: nn.Module) -> bool:
    kinds = (EmbeddingCollectionInterface, EmbeddingBagCollectionInterface)
    return any(isinstance(each, kinds) for each in (module.modules() if _is_closed(module) else (module,)))
