"""Find the embedding collections of a module and replace them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Collection as Group
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, PoolingType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardedModule
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype, dtype_to_data_type

from lightning_freescale.embeddings.collection_kinds import PLAIN, hooks_of, is_shardable, open_modules
from lightning_freescale.embeddings.managed_collision import is_managed, managed_blueprint, refuse_unshardable
from lightning_freescale.embeddings.plain_embedding import EmbeddingSharder, as_collection, options_of, table_name, tied_modules


@dataclass(frozen=True)
class Table:
    """One embedding table of a collection."""

    name: str  # name in the TorchRec config
    key: str  # name of the weight in the state dict of the whole module
    rows: int
    dim: int  # embedding width
    features: tuple[str, ...]  # KeyedJaggedTensor features that look up the table
    init: Callable[[torch.Tensor], Any]  # function that fills a tensor with initial weights
    padding_row: int | None = None  # row that is zero at first and never updated
    mean: bool = False  # whether the rows of a bag are averaged instead of summed
    data_type: DataType = DataType.FP32
    first_column: int = 0  # first column of a part of a table, see parts_by_width

    @cached_property
    def kernel_dim(self) -> int:
        """The width of rows in FBGEMM's kernel, a multiple of 4."""
        return self.dim + -self.dim % 4

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return data_type_to_dtype(self.data_type)


@dataclass(frozen=True)
class Collection:
    """An embedding collection of a module, or a plain ``nn.Embedding`` or ``nn.EmbeddingBag``: a collection of one table."""

    path: str  # path in named_modules
    aliases: tuple[str, ...]  # other paths of the same collection
    blueprint: Callable[[], nn.Module]  # builds an unsharded copy on the meta device
    torchrec: Callable[[], Any]  # builds the collection for TorchRec to shard, on the meta device, with kernel widths
    tables: tuple[Table, ...]
    sharder: ModuleSharder[Any]
    pooled: bool  # whether it is an EmbeddingBagCollection
    managed: bool  # whether TorchRec remaps ids, so that any id has a row, and exchanges the rows, which are not known before
    need_indices: bool  # whether it returns the ids as the weights of its JaggedTensors
    embedding: bool = False  # whether it is a plain module, see plain_embedding
    weighted: bool = False  # whether it is an EmbeddingBagCollection that multiplies each row by the weight of its id
    ties: tuple[str, ...] = ()  # modules that share the weight of the plain module, such as an output layer
    attributes: tuple[str, ...] = ()  # names of those that TorchRec's collections and torch's modules do not have
    data_parallel: Group[str] = frozenset()  # weights in the module that are dense parameters, see data_parallel.py

    def names(self, inner: str) -> tuple[str, ...]:
        """Return the names in the whole module of ``inner``, a name in the collection; the first one is below ``path``."""
        return tuple(f"{path}.{inner}" if path else inner for path in (self.path, *self.aliases, *self.ties))

    def carry(self, module: nn.Module, new: nn.Module) -> None:
        """Copy the user's attributes of ``module`` to ``new``, which is to replace it."""
        carried = {name: vars(module)[name] for name in self.attributes if name in vars(module)}
        if lost := sorted(name for name in carried if hasattr(new, name)):
            raise ValueError(f"module {self.path!r} has attributes {lost}, which its sharded module needs itself. Rename them.")
        vars(new).update(carried)

    def put(self, root: nn.Module, old: nn.Module, new: Any) -> None:
        """Replace ``old`` by ``new`` everywhere in ``root``, and its weight in modules that share it."""
        replace_everywhere(root, old, new)
        for path in self.ties:
            holder: Any = root.get_submodule(path)
            holder.__dict__.pop("weight", None)
            holder._parameters["weight"] = new._parameters["weight"]
            if hasattr(new, "freescale_sharding"):
                # not a parameter: state dicts contain the weight under the name that strategies and checkpoints use
                del holder._parameters["weight"]
                holder.__dict__["weight"] = new.catalogue_weight()
                holder._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.pop(f"{prefix}weight", None))

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of ``module``, by name in the whole module's state dict, without data-parallel tables."""
        prefix, found = f"{self.path}." if self.path else "", module.named_parameters(remove_duplicate=False)
        return {prefix + name: weight for name, weight in found if name not in self.data_parallel}


def find_collections(root: nn.Module, embeddings: Group[nn.Module] = ()) -> list[tuple[Collection, Any]]:
    """Return every collection under ``root`` that can be sharded, with its current module.

    The module is the user's unsharded module or the sharded module of an earlier call of the strategy. Collections inside
    other TorchRec modules (see :func:`.open_modules`) are not returned, but a collection with managed collisions is. The plain
    modules in ``embeddings`` are returned as collections. Other modules with the same weight are their aliases. A module that
    TorchRec has sharded, or with managed collisions that cannot be sharded, is a ValueError.
    """
    tables = {weight: module for module in embeddings if (weight := _embedding_weight(module)) is not None}
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        weight = _embedding_weight(module)
        paths.setdefault(module if weight is None else tables.get(weight, module), []).append(path)
    found: list[tuple[Collection, Any]] = []
    opened = {module for _, module in open_modules(root)}
    for module, (path, *aliases) in ((module, places) for module, places in paths.items() if module in opened):
        record = getattr(module, "freescale_sharding", None)
        if record is not None:
            found.append((record.collection, module))
        elif is_managed(module) or is_shardable(module):
            found.append((_describe(path, tuple(aliases), module), module))
        elif module in embeddings:
            ties = tuple(tied_modules(root, _embedding_weight(module)))
            found.append((_describe_embedding(path, tuple(aliases), ties, module), module))
        elif isinstance(module, ShardedModule):
            raise ValueError(
                f"module {path!r} is already sharded ({type(module).__name__}). Strategy 'freescale' shards collections "
                "itself. Pass the unsharded collection."
            )
    return found


def replace_everywhere(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` everywhere in ``root``, and each plain module with the weight of ``old``."""
    weight = _embedding_weight(old)
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old or (weight is not None and _embedding_weight(child) is weight):
                parent._modules[name] = new


def _embedding_weight(module: nn.Module | None) -> nn.Parameter | None:
    return module._parameters.get("weight") if isinstance(module, PLAIN) else None


def _describe(path: str, aliases: tuple[str, ...], module: Any) -> Collection:
    managed, pooled = is_managed(module), isinstance(module, EmbeddingBagCollection)
    need_indices = weighted = False
    if hooks := hooks_of(path, module):
        raise ValueError(
            f"embedding collection {path!r} has hooks {hooks}, which its sharded module would not run. Remove them, and change "
            "ids and results in a module around it."
        )
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
    attributes = tuple(vars(module).keys() - vars(build(tables=configs)))
    # TorchRec divides some sums of other tables, too, and the means of grid_shard are wrong. _pooled_columns divides instead
    sums = {"pooling": PoolingType.SUM} if pooled else {}
    wide = [replace(config, embedding_dim=table.kernel_dim, **sums) for config, table in zip(configs, tables)]
    builders = partial(build, tables=configs), partial(build, tables=wide)
    given = (path, aliases, *builders, tables, sharder, pooled, managed, need_indices)
    return Collection(*given, weighted=weighted, attributes=attributes)


def _describe_embedding(path: str, aliases: tuple[str, ...], ties: tuple[str, ...], module: Any) -> Collection:
    rows, dim, options = module.num_embeddings, module.embedding_dim, options_of(module)
    plain, padding = getattr(nn, options.pop("class")), options.get("padding_idx")
    dtype = module._parameters["weight"].dtype
    data_type = dtype_to_data_type(dtype)
    table = Table(table_name(path), f"{path}.weight", rows, dim, (path,), nn.init.normal_, padding, data_type=data_type)
    builders = (
        partial(plain, rows, dim, device=torch.device("meta"), dtype=dtype, **options),
        partial(as_collection, path, rows, table.kernel_dim, data_type),
    )
    given = (path, aliases, *builders, (table,), EmbeddingSharder(dim=dim, **options), False, False, False)
    return Collection(*given, embedding=True, ties=ties, attributes=tuple(vars(module).keys() - vars(builders[0]())))
