"""Find the embedding collections of a module, and put others in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardedModule

from lightning_freescale.embeddings.managed_collision import is_managed, managed_blueprint, refuse_unshardable

_KINDS = (EmbeddingCollection, EmbeddingBagCollection)


@dataclass(frozen=True)
class Table:
    """One embedding table of a collection.

    Attributes:
        name: as in its TorchRec config.
        key: its weight's name in the state dict of the whole module.
        rows: number of embeddings.
        dim: embedding width.
        features: the KeyedJaggedTensor features that look it up.
        init: fills a tensor with initial weights.
    """

    name: str
    key: str
    rows: int
    dim: int
    features: tuple[str, ...]
    init: Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Collection:
    """One embedding collection of a module: where it is and how to build it anew without memory.

    Attributes:
        path: where the module holds it, as in ``named_modules``.
        aliases: other places where the module holds the same collection.
        blueprint: builds an unsharded copy on the meta device.
        tables: its tables.
        sharder: TorchRec's sharder for it.
        pooled: whether it is an EmbeddingBagCollection.
        managed: whether TorchRec remaps its ids before it looks them up, so that any id has a row.
        need_indices: whether it returns the ids as the weights of its JaggedTensors.
    """

    path: str
    aliases: tuple[str, ...]
    blueprint: Callable[[], nn.Module]
    tables: tuple[Table, ...]
    sharder: ModuleSharder[Any]
    pooled: bool
    managed: bool
    need_indices: bool

    def names(self, inner: str) -> tuple[str, ...]:
        """Return what the whole module calls something that the collection calls ``inner``, first as it is at ``path``."""
        return tuple(f"{path}.{inner}" if path else inner for path in (self.path, *self.aliases))


def find_collections(root: nn.Module) -> list[tuple[Collection, Any]]:
    """Return every collection under ``root`` that can be sharded, each with the module that stands there now.

    That is the user's unsharded one, or the sharded one that an earlier call of the strategy left. Collections inside
    other TorchRec modules belong to those and are not returned, except that one with managed collisions is one collection.

    Raises:
        ValueError: a module is sharded already, or manages collisions and cannot be sharded.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    found: list[tuple[Collection, Any]] = []
    inside: str | None = None
    for module, (path, *aliases) in paths.items():
        if inside is not None and path.startswith(inside):
            continue
        inside = None
        record = getattr(module, "freescale_sharding", None)
        if record is not None:
            found.append((record.collection, module))
            inside = f"{path}." if path else ""
        elif is_managed(module):
            refuse_unshardable(path, module)
            found.append((_describe(path, tuple(aliases), module), module))
        elif type(module) in _KINDS:
            found.append((_describe(path, tuple(aliases), module), module))
        elif isinstance(module, ShardedModule):
            raise ValueError(
                f"module {path!r} is already sharded ({type(module).__name__}): strategy 'freescale' shards by itself, pass "
                "the unsharded collection"
            )
        if type(module).__module__.startswith("torchrec.modules.") and path:
            inside = f"{path}."
    return found


def unsupported_collections(root: nn.Module, found: Sequence[tuple[Collection, Any]]) -> list[str]:
    """Return the paths of collections that stay replicated: subclasses, and those inside other TorchRec modules.

    Args:
        root: the module.
        found: what :func:`find_collections` has found in it.
    """
    shardable = {inner for _, module in found for inner in module.modules()}
    return [path for path, module in root.named_modules() if isinstance(module, _KINDS) and module not in shardable]


def replace_everywhere(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``root`` holds ``old``."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def table_weights(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the table name and weight of every table of an unsharded collection."""
    inner = module._embedding_module if is_managed(module) else module
    for name, table in (inner.embeddings if isinstance(inner, EmbeddingCollection) else inner.embedding_bags).items():
        yield name, table.weight


def _describe(path: str, aliases: tuple[str, ...], module: Any) -> Collection:
    managed = is_managed(module)
    pooled = isinstance(module, EmbeddingBagCollection)
    configs = (
        module.embedding_bag_configs() if pooled else (module._embedding_module if managed else module).embedding_configs()
    )
    need_indices = not managed and not pooled and module.need_indices()
    meta = torch.device("meta")
    blueprint: Callable[[], nn.Module]
    sharder: Any
    if managed:
        holder, sharder = "_embedding_module.embeddings", ManagedCollisionEmbeddingCollectionSharder()
        blueprint = managed_blueprint(module)
    elif pooled:
        holder, sharder = "embedding_bags", EmbeddingBagCollectionSharder()
        blueprint = partial(EmbeddingBagCollection, tables=configs, device=meta, is_weighted=module.is_weighted())
    else:
        holder, sharder = "embeddings", EmbeddingCollectionSharder()
        blueprint = partial(EmbeddingCollection, tables=configs, device=meta, need_indices=need_indices)
    holder = f"{path}.{holder}" if path else holder
    tables = tuple(
        Table(c.name, f"{holder}.{c.name}.weight", c.num_embeddings, c.embedding_dim, tuple(c.feature_names), c.init_fn)
        for c in configs
    )
    return Collection(path, aliases, blueprint, tables, sharder, pooled, managed, need_indices)
