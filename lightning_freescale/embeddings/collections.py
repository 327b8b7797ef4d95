"""Find the embedding collections of a module, and put others in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Collection as Group
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, PoolingType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardedModule
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embeddings.managed_collision import is_managed, managed_blueprint, refuse_unshardable
from lightning_freescale.embeddings.plain_embedding import EmbeddingSharder, as_collection, table_name, tied_modules

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
        padding_row: the row that is zero at first and never updated, if there is one.
        mean: whether the rows of a bag are pooled by their mean, else by their sum.
        data_type: of its weights.
        first_column: 0 for a whole table; for a part of one, see :func:`.row_layout.parts_by_width`, its first column there.
    """

    name: str
    key: str
    rows: int
    dim: int
    features: tuple[str, ...]
    init: Callable[[torch.Tensor], Any]
    padding_row: int | None = None
    mean: bool = False
    data_type: DataType = DataType.FP32
    first_column: int = 0

    @property
    def kernel_dim(self) -> int:
        """Width of the rows in the kernel, whose rows are of 16 bytes or a multiple."""
        return self.dim + -self.dim % 4


@dataclass(frozen=True)
class Collection:
    """One embedding collection of a module: where it is and how to build it anew without memory.

    Or an ``nn.Embedding``, which is a collection of one table to everyone but the user.

    Attributes:
        path: where the module holds it, as in ``named_modules``.
        aliases: other places where the module holds the same collection.
        blueprint: builds an unsharded copy on the meta device.
        torchrec: builds the collection that TorchRec shards, on the meta device; its tables have the width of the kernel.
        tables: its tables.
        sharder: TorchRec's sharder for it.
        pooled: whether it is an EmbeddingBagCollection.
        managed: whether TorchRec remaps its ids before it looks them up, so that any id has a row. TorchRec exchanges its rows,
            because they are not known before the lookup.
        need_indices: whether it returns the ids as the weights of its JaggedTensors.
        embedding: whether it is an ``nn.Embedding``, see :mod:`.plain_embedding`.
        weighted: whether it is an EmbeddingBagCollection that multiplies each row by a weight of its id.
        ties: modules that have the weight of the ``nn.Embedding`` as theirs, such as an output layer.
    """

    path: str
    aliases: tuple[str, ...]
    blueprint: Callable[[], nn.Module]
    torchrec: Callable[[], Any]
    tables: tuple[Table, ...]
    sharder: ModuleSharder[Any]
    pooled: bool
    managed: bool
    need_indices: bool
    embedding: bool = False
    weighted: bool = False
    ties: tuple[str, ...] = ()

    def names(self, inner: str) -> tuple[str, ...]:
        """Return what the whole module calls something that the collection calls ``inner``, first as it is at ``path``."""
        return tuple(f"{path}.{inner}" if path else inner for path in (self.path, *self.aliases, *self.ties))

    def put(self, root: nn.Module, old: nn.Module, new: Any) -> None:
        """Put ``new`` wherever ``root`` holds ``old``, and its weight wherever a module shares that of ``old``."""
        replace_everywhere(root, old, new)
        for path in self.ties:
            holder: Any = root.get_submodule(path)
            holder.__dict__.pop("weight", None)
            holder._parameters["weight"] = new._parameters["weight"]
            if hasattr(new, "freescale_sharding"):
                # no parameter: state dicts have it by the name that strategies and checkpoints give the table
                del holder._parameters["weight"]
                holder.__dict__["weight"] = new.catalogue_weight()
                holder._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.pop(f"{prefix}weight", None))

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of an unsharded ``module`` at ``path`` by their names in the whole module's state dict."""
        return {self.names(name)[0]: weight for name, weight in module.named_parameters(remove_duplicate=False)}


def find_collections(root: nn.Module, embeddings: Group[nn.Module] = ()) -> list[tuple[Collection, Any]]:
    """Return every collection under ``root`` that can be sharded, each with the module that stands there now.

    That is the user's unsharded one, or the sharded one that an earlier call of the strategy left. Collections inside
    other TorchRec modules belong to those and are not returned, except that one with managed collisions is one collection.
    Of the plain ``nn.Embedding`` modules under ``root`` those in ``embeddings`` are returned as collections; others that share
    the weight of one are that collection again.

    Raises:
        ValueError: a module is sharded already, or manages collisions and cannot be sharded.
    """
    tables = {weight: module for module in embeddings if (weight := _embedding_weight(module)) is not None}
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        weight = _embedding_weight(module)
        paths.setdefault(module if weight is None else tables.get(weight, module), []).append(path)
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
        elif is_managed(module) or type(module) in _KINDS:
            found.append((_describe(path, tuple(aliases), module), module))
        elif module in embeddings:
            ties = tuple(tied_modules(root, _embedding_weight(module)))
            found.append((_describe_embedding(path, tuple(aliases), ties, module), module))
        elif isinstance(module, ShardedModule):
            raise ValueError(
                f"module {path!r} is already sharded ({type(module).__name__}): strategy 'freescale' shards by itself, pass "
                "the unsharded collection"
            )
        if type(module).__module__.startswith("torchrec.modules.") and path:
            inside = f"{path}."
    return found


def unsupported_collections(root: nn.Module, found: Sequence[tuple[Collection, Any]]) -> list[str]:
    """Return the paths of collections that :func:`find_collections` has not ``found``: subclasses, and those inside others."""
    shardable = {inner for _, module in found for inner in module.modules()}
    return [path for path, module in root.named_modules() if isinstance(module, _KINDS) and module not in shardable]


def replace_everywhere(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``root`` holds ``old``, or an ``nn.Embedding`` of the same weight."""
    weight = _embedding_weight(old)
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old or (weight is not None and _embedding_weight(child) is weight):
                parent._modules[name] = new


def _embedding_weight(module: nn.Module | None) -> nn.Parameter | None:
    return module._parameters.get("weight") if isinstance(module, nn.Embedding) else None


def _describe(path: str, aliases: tuple[str, ...], module: Any) -> Collection:
    managed, pooled = is_managed(module), isinstance(module, EmbeddingBagCollection)
    need_indices = weighted = False
    meta = torch.device("meta")
    build: Callable[..., nn.Module]
    sharder: Any
    if managed:
        refuse_unshardable(path, module)
        holder, configs = "_embedding_module.embeddings", module._embedding_module.embedding_configs()
        sharder, build = ManagedCollisionEmbeddingCollectionSharder(), managed_blueprint(module)
    elif pooled:
        holder, configs, sharder = "embedding_bags", module.embedding_bag_configs(), EmbeddingBagCollectionSharder()
        weighted = module.is_weighted()
        build = partial(EmbeddingBagCollection, device=meta, is_weighted=weighted)
    else:
        holder, configs, sharder = "embeddings", module.embedding_configs(), EmbeddingCollectionSharder()
        need_indices = module.need_indices()
        build = partial(EmbeddingCollection, device=meta, need_indices=need_indices)
    holder = f"{path}.{holder}" if path else holder
    tables = tuple(
        Table(
            name=c.name,
            key=f"{holder}.{c.name}.weight",
            rows=c.num_embeddings,
            dim=c.embedding_dim,
            features=tuple(c.feature_names),
            init=c.init_fn,
            mean=pooled and c.pooling == PoolingType.MEAN,
            data_type=c.data_type,
        )
        for c in configs
    )
    wide = [replace(config, embedding_dim=table.kernel_dim) for config, table in zip(configs, tables)]
    builders = partial(build, tables=configs), partial(build, tables=wide)
    return Collection(path, aliases, *builders, tables, sharder, pooled, managed, need_indices, weighted=weighted)


def _describe_embedding(path: str, aliases: tuple[str, ...], ties: tuple[str, ...], module: Any) -> Collection:
    rows, dim, padding = module.num_embeddings, module.embedding_dim, module.padding_idx
    table = Table(table_name(path), f"{path}.weight", rows, dim, (path,), nn.init.normal_, padding)
    builders = (
        partial(nn.Embedding, rows, dim, padding_idx=padding, device=torch.device("meta")),
        partial(as_collection, path, rows, table.kernel_dim),
    )
    given = (path, aliases, *builders, (table,), EmbeddingSharder(dim, padding))
    return Collection(*given, pooled=False, managed=False, need_indices=False, embedding=True, ties=ties)
