"""Collections with managed collisions: checks, blueprints and input histories.

TorchRec's managed-collision module (MC module) of a table has a map from ids to rows, which training changes.
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

from lightning_freescale._runtime.error_text import a

_KNOWN = (MCHManagedCollisionModule, HashZchManagedCollisionModule)
_OWNERS = (BaseManagedCollisionEmbeddingCollection, ManagedCollisionCollection, ManagedCollisionModule)


def is_managed(module: nn.Module) -> bool:
    """Return whether a module has managed collisions."""
    return isinstance(module, _OWNERS)


def refuse_unshardable(path: str, module: Any) -> None:
    """Raise a ValueError if TorchRec cannot shard a module with managed collisions. Replicas of an id map would diverge."""
    because = f"module {path!r} ({type(module).__name__}) maps ids to rows. Its map must be sharded with the table, but"
    if type(module) is not ManagedCollisionEmbeddingCollection:
        raise ValueError(
            f"{because} strategy 'freescale' supports only torchrec's ManagedCollisionEmbeddingCollection, without subclasses "
            "and bags. Put the map into such a module together with its EmbeddingCollection, and pool the result."
        )
    inner = module._embedding_module
    if type(inner) is not EmbeddingCollection:
        raise ValueError(f"{because} its collection is {a(type(inner))}. Use a plain torchrec.EmbeddingCollection.")
    seen: dict[str, str] = {}
    for config in inner.embedding_configs():
        mc_module = mc_modules(module)[config.name]
        if type(mc_module) not in _KNOWN:
            raise ValueError(
                f"{because} the map of table {config.name!r} is {a(type(mc_module))}. Use one of "
                f"{[kind.__name__ for kind in _KNOWN]}."
            )
        for feature in config.feature_names:
            if feature in seen:
                raise ValueError(
                    f"{because} feature {feature!r} looks up table {seen[feature]!r} and table {config.name!r}. Use one table "
                    "per feature."
                )
            seen[feature] = config.name


def refuse_device(path: str, module: Any, device: torch.device, training: bool) -> None:
    """Raise a ValueError if the id maps of a collection do not work on ``device``."""
    for table, mc_module in mc_modules(module).items() if device.type == "cpu" else ():
        evicts = getattr(mc_module, "_eviction_policy_name", None) is not None
        if isinstance(mc_module, HashZchManagedCollisionModule) and (training or evicts):
            raise ValueError(
                f"table {table!r} of collection {path!r} uses HashZchManagedCollisionModule, but FBGEMM's "
                "zero_collision_hash neither adds nor evicts ids on CPU. Use a GPU, or MCHManagedCollisionModule."
            )


def mc_modules(module: Any) -> dict[str, Any]:
    """Return the MC modules of a sharded or unsharded collection, by table name."""
    return dict(module._managed_collision_collection._managed_collision_modules.items())


def managed_blueprint(module: Any) -> Callable[..., nn.Module]:
    """Return a function of table configs that builds an unsharded copy on the meta device, without references to ``module``."""
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
    module._lookups = module._embedding_module._lookups  # other sharded collections have this attribute
    for kernel, _ in module._table_to_tbe_and_index.values():
        # FBGEMM resets the row-wise states of evicted rows only on CUDA. It also counts features where TorchRec passes tables:
        # if the first of two tables in a kernel has two features, it would reset the first table instead of the second
        if kernel.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            kernel.reset_embedding_weight_momentum = partial(_reset_states, kernel)


def get_input_history(mc_module: Any) -> dict[str, Any] | None:
    """Return the ids that a map has seen since it last added ids; None if it does not record them.

    A resumed run needs them, but TorchRec does not include them in the state dict.
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
    """Restore a result of :func:`get_input_history`; None resets the history to that of a new module."""
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
        copy._buckets = 0  # sharding creates one per rank. The planner requires a number without remainder
    return copy


def _reset_states(kernel: Any, pruned_indices: Tensor, logical_table_ids: Tensor, **rest: Any) -> None:
    # TorchRec draws the weights of the rows itself afterwards
    kernel.get_optimizer_state()[int(logical_table_ids[0])]["sum"][pruned_indices] = 0
