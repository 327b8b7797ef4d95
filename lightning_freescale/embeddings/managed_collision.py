"""Collections with managed collisions: which of them can be sharded, and how to build them anew without memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule, MCHManagedCollisionModule

_META = torch.device("meta")
_KNOWN = (MCHManagedCollisionModule, HashZchManagedCollisionModule)
_OWNERS = (BaseManagedCollisionEmbeddingCollection, ManagedCollisionCollection, ManagedCollisionModule)


def is_managed(module: nn.Module) -> bool:
    """Whether it remaps ids by a map that training changes; replicas of such a map would not stay the same."""
    return isinstance(module, _OWNERS)


def refuse_unknown(path: str, module: Any) -> None:
    """Check that TorchRec can shard a module for which :func:`is_managed` holds.

    Raises:
        ValueError: it cannot; names the path and the fix.
    """
    because = f"module {path!r} ({type(module).__name__}) maps ids to rows, and its map must be sharded with the table"
    if type(module) is not ManagedCollisionEmbeddingCollection:
        raise ValueError(
            f"{because}: strategy 'freescale' shards torchrec's ManagedCollisionEmbeddingCollection only, no subclass and no "
            "bag. Put the map into one together with its EmbeddingCollection, and pool what it returns"
        )
    inner = module._embedding_module
    if type(inner) is not EmbeddingCollection:
        raise ValueError(f"{because}: its collection is a {type(inner).__name__}, use a plain torchrec.EmbeddingCollection")
    seen: dict[str, str] = {}
    for config in inner.embedding_configs():
        manager = module._managed_collision_collection._managed_collision_modules[config.name]
        if type(manager) not in _KNOWN:
            raise ValueError(
                f"{because}: that of table {config.name!r} is a {type(manager).__name__}, use one of "
                f"{[kind.__name__ for kind in _KNOWN]}"
            )
        for feature in config.feature_names:
            if feature in seen:
                raise ValueError(
                    f"{because}: feature {feature!r} looks up table {seen[feature]!r} and table {config.name!r}, give it one"
                )
            seen[feature] = config.name


def refuse_device(collection: Any, module: Any, device: torch.device, training: bool) -> None:
    """Raise ValueError if a collection has a map that does not work on ``device``; names table and fix."""
    for name, manager in managers(module).items() if collection.managed and device.type == "cpu" else ():
        evicts = getattr(manager, "_eviction_policy_name", None) is not None
        if isinstance(manager, HashZchManagedCollisionModule) and (training or evicts):
            raise ValueError(
                f"table {name!r} of collection {collection.path!r} uses HashZchManagedCollisionModule, but FBGEMM's "
                "zero_collision_hash neither adds nor evicts ids on CPU: use a GPU, or MCHManagedCollisionModule"
            )


def managers(module: Any) -> dict[str, Any]:
    """The map of every table, by the table's name, of a sharded or unsharded collection."""
    return dict(module._managed_collision_collection._managed_collision_modules.items())


def frozen(path: str, module: Any) -> dict[str, nn.Parameter]:
    """The parameters in which TorchRec keeps ids, by their names under ``path``; they are not trained."""
    maps = module._managed_collision_collection
    return {f"{path}._managed_collision_collection.{name}".lstrip("."): value for name, value in maps.named_parameters()}


def blueprint(module: Any) -> Callable[[], nn.Module]:
    """What builds an unsharded copy on the meta device, without keeping ``module`` alive."""
    inner, configs = module._embedding_module, module._embedding_module.embedding_configs()
    empty = {name: _empty(manager) for name, manager in managers(module).items()}
    needs_indices, preprocess = inner.need_indices(), module._managed_collision_collection.need_preprocess
    options = {
        "return_remapped_features": module._return_remapped_features,
        "allow_in_place_embed_weight_update": module._allow_in_place_embed_weight_update,
    }

    def build() -> nn.Module:
        tables = EmbeddingCollection(tables=configs, device=_META, need_indices=needs_indices)
        maps = ManagedCollisionCollection({name: _empty(manager) for name, manager in empty.items()}, configs, preprocess)
        return ManagedCollisionEmbeddingCollection(tables, maps, **options)

    return build


def complete(module: Any) -> None:
    """Finish a sharded collection in place.

    FBGEMM resets the row-wise states of evicted rows on CUDA only, and counts features where TorchRec tells it tables: of two
    tables in one kernel, the first with two features, it would reset the first for the second.
    """
    module._lookups = module._embedding_module._lookups  # where every other sharded collection has them
    for kernel, _ in module._table_to_tbe_and_index.values():
        if kernel.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            kernel.reset_embedding_weight_momentum = partial(_reset_states, kernel)


def _empty(manager: Any) -> Any:
    size = manager.output_size()
    copy = manager.rebuild_with_output_id_range((0, size), [0, size], _META)
    if isinstance(copy, MCHManagedCollisionModule):
        copy._buckets = 0  # sharding makes one per rank, whatever there was; the planner must find no remainder
    return copy


def _reset_states(kernel: Any, pruned_indices: Tensor, logical_table_ids: Tensor, **rest: Any) -> None:
    """TorchRec draws the rows' weights itself, after this."""
    kernel.get_optimizer_state()[int(logical_table_ids[0])]["sum"][pruned_indices] = 0
