"""Find the embedding collections of a module, and put others in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardedModule

from lightning_freescale.embeddings.managed_collision import blueprint, is_managed, refuse_unknown

_META = torch.device("meta")


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
    """

    path: str
    aliases: tuple[str, ...]
    blueprint: Callable[[], nn.Module]
    tables: tuple[Table, ...]
    sharder: ModuleSharder[Any]
    pooled: bool
    managed: bool = False


def find_collections(root: nn.Module) -> list[tuple[Collection, nn.Module]]:
    """Every collection under ``root`` that can be sharded, each with the module that stands there now.

    That is the user's unsharded one, or the sharded one that an earlier call of the strategy left. Collections inside
    other TorchRec modules belong to those and are not returned, except that one with managed collisions is one collection.

    Raises:
        ValueError: a module is sharded already, or manages collisions and cannot be sharded.
    """
    found: list[tuple[Collection, nn.Module]] = []
    inside: str | None = None
    for path, module in root.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        inside = None
        if hasattr(module, "freescale"):
            found.append((module.freescale.collection, module))
            inside = f"{path}." if path else ""
        elif is_managed(module):
            refuse_unknown(path, module)
            found.append((_describe_managed(path, module, _other_paths(root, path, module)), module))
        elif type(module) in (EmbeddingCollection, EmbeddingBagCollection):
            found.append((_describe(path, module, _other_paths(root, path, module)), module))
        elif isinstance(module, ShardedModule):
            raise ValueError(
                f"module {path!r} is already sharded ({type(module).__name__}): strategy 'freescale' shards by itself, pass "
                "the unsharded collection"
            )
        if type(module).__module__.startswith("torchrec.modules.") and path:
            inside = f"{path}."
    return found


def unsupported_collections(root: nn.Module) -> list[str]:
    """Paths of embedding collections that stay replicated: subclasses, and those inside other TorchRec modules."""
    mine = {collection.path for collection, _ in find_collections(root)}
    kinds = (EmbeddingCollection, EmbeddingBagCollection)
    return [path for path, module in root.named_modules() if isinstance(module, kinds) and path not in mine]


def replace_everywhere(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``root`` holds ``old``."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The table name and weight of every table of an unsharded collection."""
    inner = module._embedding_module if is_managed(module) else module
    bags = inner.embeddings if isinstance(inner, EmbeddingCollection) else inner.embedding_bags  # type: ignore[union-attr]
    for name, table in bags.items():  # type: ignore[operator, union-attr]
        yield name, table.weight


def _other_paths(root: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
    return tuple(other for other, held in root.named_modules(remove_duplicate=False) if held is module and other != path)


def _describe(path: str, module: nn.Module, aliases: tuple[str, ...]) -> Collection:
    prefix = f"{path}." if path else ""
    if isinstance(module, EmbeddingCollection):
        configs, holder = module.embedding_configs(), "embeddings"
        needed = {"need_indices": module.need_indices()}
        return _collection(path, aliases, EmbeddingCollection, configs, needed, prefix + holder, EmbeddingCollectionSharder())
    assert isinstance(module, EmbeddingBagCollection)
    configs, holder = module.embedding_bag_configs(), "embedding_bags"
    needed = {"is_weighted": module.is_weighted()}
    return _collection(path, aliases, EmbeddingBagCollection, configs, needed, prefix + holder, EmbeddingBagCollectionSharder())


def _describe_managed(path: str, module: Any, aliases: tuple[str, ...]) -> Collection:
    holder = f"{path}._embedding_module.embeddings" if path else "_embedding_module.embeddings"
    tables = _tables(module._embedding_module.embedding_configs(), holder)
    sharder: Any = ManagedCollisionEmbeddingCollectionSharder()
    return Collection(path, aliases, blueprint(module), tables, sharder, pooled=False, managed=True)


def _tables(configs: list[Any], holder: str) -> tuple[Table, ...]:
    return tuple(
        Table(c.name, f"{holder}.{c.name}.weight", c.num_embeddings, c.embedding_dim, tuple(c.feature_names), c.init_fn)
        for c in configs
    )


def _collection(
    path: str,
    aliases: tuple[str, ...],
    kind: Any,
    configs: list[Any],
    options: dict[str, Any],
    holder: str,
    sharder: ModuleSharder[Any],
) -> Collection:
    pooled, tables = kind is EmbeddingBagCollection, _tables(configs, holder)
    return Collection(path, aliases, lambda: kind(tables=configs, device=_META, **options), tables, sharder, pooled)
