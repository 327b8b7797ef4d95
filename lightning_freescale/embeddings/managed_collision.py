"""Collections with managed collisions: which can be sharded, how to build them anew without memory, what they have seen.

TorchRec's managed-collision module (MC module) of a table remaps ids to rows, and keeps for it what is called a map here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule, MCHManagedCollisionModule

_KNOWN = (MCHManagedCollisionModule, HashZchManagedCollisionModule)
_OWNERS = (BaseManagedCollisionEmbeddingCollection, ManagedCollisionCollection, ManagedCollisionModule)


def is_managed(module: nn.Module) -> bool:
    """Return whether a module remaps ids by a map that training changes."""
    return isinstance(module, _OWNERS)


def refuse_unshardable(path: str, module: Any) -> None:
    """Check that TorchRec can shard a module for which :func:`is_managed` holds.

    Raises:
        ValueError: it cannot, and replicas of a map would not stay the same; names the path and the fix.
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
        mc_module = mc_modules(module)[config.name]
        if type(mc_module) not in _KNOWN:
            raise ValueError(
                f"{because}: that of table {config.name!r} is a {type(mc_module).__name__}, use one of "
                f"{[kind.__name__ for kind in _KNOWN]}"
            )
        for feature in config.feature_names:
            if feature in seen:
                raise ValueError(
                    f"{because}: feature {feature!r} looks up table {seen[feature]!r} and table {config.name!r}, give it one"
                )
            seen[feature] = config.name


def refuse_device(path: str, module: Any, device: torch.device, training: bool) -> None:
    """Check that the maps of a managed-collision collection work on ``device``.

    Raises:
        ValueError: one does not; names table and fix.
    """
    for table, mc_module in mc_modules(module).items() if device.type == "cpu" else ():
        evicts = getattr(mc_module, "_eviction_policy_name", None) is not None
        if isinstance(mc_module, HashZchManagedCollisionModule) and (training or evicts):
            raise ValueError(
                f"table {table!r} of collection {path!r} uses HashZchManagedCollisionModule, but FBGEMM's "
                "zero_collision_hash neither adds nor evicts ids on CPU: use a GPU, or MCHManagedCollisionModule"
            )


def mc_modules(module: Any) -> dict[str, Any]:
    """Return TorchRec's MC module of every table, by the table's name, of a sharded or unsharded collection."""
    return dict(module._managed_collision_collection._managed_collision_modules.items())


def managed_blueprint(module: Any) -> Callable[..., nn.Module]:
    """Return a function that builds an unsharded copy with given configs of tables on the meta device.

    It does not keep ``module`` alive.
    """
    meta = torch.device("meta")
    inner = module._embedding_module
    empty = {table: _empty_mc_module(mc_module) for table, mc_module in mc_modules(module).items()}
    needs_indices, preprocess = inner.need_indices(), module._managed_collision_collection.need_preprocess
    options = {
        "return_remapped_features": module._return_remapped_features,
        "allow_in_place_embed_weight_update": module._allow_in_place_embed_weight_update,
    }

    def build(tables: list[EmbeddingConfig]) -> nn.Module:
        collection = EmbeddingCollection(tables=tables, device=meta, need_indices=needs_indices)
        fresh = {table: _empty_mc_module(mc_module) for table, mc_module in empty.items()}
        return ManagedCollisionEmbeddingCollection(collection, ManagedCollisionCollection(fresh, tables, preprocess), **options)

    return build


def patch_sharded(module: Any) -> None:
    """Correct a sharded collection of TorchRec in place."""
    module._lookups = module._embedding_module._lookups  # where every other sharded collection has them
    for kernel, _ in module._table_to_tbe_and_index.values():
        # FBGEMM resets the row-wise states of evicted rows on CUDA only, and counts features where TorchRec tells it tables:
        # of two tables in one kernel, the first with two features, it would reset the first for the second
        if kernel.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            kernel.reset_embedding_weight_momentum = partial(_reset_states, kernel)


def get_input_history(mc_module: Any) -> dict[str, Any] | None:
    """Return the ids that a map has seen since it last let new ones in; None if it keeps none.

    TorchRec leaves them out of the state dict, but a resumed run needs them.
    """
    if not isinstance(mc_module, MCHManagedCollisionModule) or mc_module._input_history_buffer_size < 0:
        return None
    used = slice(mc_module._current_history_buffer_offset)
    return {
        "size": mc_module._input_history_buffer_size,
        "last_eviction": mc_module._last_eviction_iter,
        "ids": mc_module._history_accumulator[used].cpu(),
        "metadata": {name: value[used].cpu() for name, value in mc_module._history_metadata.items()},
    }


def set_input_history(mc_module: Any, history: Mapping[str, Any] | None) -> None:
    """Put back what :func:`get_input_history` returned; None to forget it, as a new module has."""
    if not isinstance(mc_module, MCHManagedCollisionModule):
        return
    mc_module._input_history_buffer_size = mc_module._current_iter = mc_module._last_eviction_iter = -1
    mc_module._current_history_buffer_offset = 0
    if history is None:
        return
    mc_module._current_iter = int(mc_module._current_iter_tensor)
    mc_module._last_eviction_iter = history["last_eviction"]
    mc_module._input_history_buffer_size = history["size"]
    mc_module._current_history_buffer_offset = used = len(history["ids"])
    unused = (0, history["size"] - used)
    mc_module._history_accumulator = pad(history["ids"].to(mc_module.device), unused)
    for name, value in history["metadata"].items():
        buffer = pad(value.to(mc_module.device), unused)
        mc_module.register_buffer(f"_history_{name}", buffer, persistent=False)
        mc_module._history_metadata[name] = buffer


def _empty_mc_module(mc_module: Any) -> Any:
    size = mc_module.output_size()
    copy = mc_module.rebuild_with_output_id_range((0, size), [0, size], torch.device("meta"))
    if isinstance(copy, MCHManagedCollisionModule):
        copy._buckets = 0  # sharding makes one per rank, whatever there was; the planner must find no remainder
    return copy


def _reset_states(kernel: Any, pruned_indices: Tensor, logical_table_ids: Tensor, **rest: Any) -> None:
    """Reset the state alone: TorchRec draws the rows' weights itself, after this."""
    kernel.get_optimizer_state()[int(logical_table_ids[0])]["sum"][pruned_indices] = 0
