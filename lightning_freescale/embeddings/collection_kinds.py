"""The modules of TorchRec, and subclasses, that can be sharded, and the refusal of large ones that cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import FunctionType, MethodType

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


def own_methods(module: nn.Module, kind: type[nn.Module]) -> set[str]:
    """Return the methods that ``module`` or a subclass of ``kind`` defines, except ``__init__``."""
    classes = type(module).__mro__[: type(module).__mro__.index(kind)]
    defined = [item for each in (module, *classes) for item in vars(each).items()]
    return {name for name, value in defined if isinstance(value, (FunctionType, MethodType, property))} - {"__init__"}


def _is_closed(module: nn.Module) -> bool:
    of_torchrec = type(module).__module__.startswith(("torchrec.modules.", "torchrec.distributed."))
    sharded = is_shardable(module) or hasattr(module, "freescale_sharding")
    return sharded or (of_torchrec and not isinstance(module, _AROUND))


def _changes(module: nn.Module) -> list[str]:
    """Return the names of methods, modules, parameters and buffers that ``module`` does not have from TorchRec."""
    kind = next(each for each in _KINDS if isinstance(module, each))
    parts = module._modules.keys() - {"embeddings", "embedding_bags"}
    return sorted(own_methods(module, kind) | parts | module._parameters.keys() | module._buffers.keys())


def _holds_tables(module: nn.Module) -> bool:
    kinds = (EmbeddingCollectionInterface, EmbeddingBagCollectionInterface)
    return any(isinstance(each, kinds) for each in (module.modules() if _is_closed(module) else (module,)))
