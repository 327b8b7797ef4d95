"""Checkpoints of a sharded module that look as if nothing were sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_freescale.checkpoint.managed_collision import (
    cut_keys,
    gather_maps,
    gather_pending,
    scatter_maps,
    scatter_pending,
)
from lightning_freescale.checkpoint.optimizer_state import merge, split
from lightning_freescale.checkpoint.tables import gather_states, gather_weights, scatter_states, scatter_weights
from lightning_freescale.embeddings.parameter_groups import TableGroups
from lightning_freescale.embeddings.shards import ShardedTables


def state_dict(tables: ShardedTables, sharded: Mapping[str, Any]) -> dict[str, Any]:
    """The unsharded form of a module's state dict on rank 0; other ranks get its dense part. Collective."""
    whole, keys, maps = gather_weights(tables), tables.keys(), gather_maps(tables)
    dense = {name: value for name, value in sharded.items() if name not in keys.keys() | cut_keys(tables)}
    return dense | {name: whole[key] for name, key in keys.items() if key in whole} | maps


def load_state_dict(module: nn.Module, tables: ShardedTables, whole: Mapping[str, Any], strict: bool) -> None:
    """Load an unsharded state dict; errors are those of ``torch.nn.Module.load_state_dict``."""
    scatter_weights(tables, {key: whole[name] for name, key in tables.keys().items() if name in whole})
    maps = scatter_maps(tables, whole)
    # all is in place: torch gets the shards, so that it finds missing and unexpected keys as it always does
    shards = {name: value for name, value in tables.sharded_weights().items() if name in whole} | maps
    module.load_state_dict({**whole, **shards}, strict=strict)


def optimizer_state(tables: ShardedTables, groups: TableGroups, dense: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict of the user's optimizer with its tables in it, whole on rank 0. Collective.

    Returns:
        That state dict, and what has no place in it: the number of updates, the states of the tables that have an optimizer
        of their own, and what managed collisions have seen since they last let ids in.
    """
    states = gather_states(tables)
    own = {key: states.pop(key) for key in groups.given if key in states}
    merged = merge(dense, groups.current_layout(), groups.tables, states, groups.step)
    return merged, {"updates": groups.step, "in_backward_states": own, "id_maps": gather_pending(tables)}


def load_optimizer_state(
    tables: ShardedTables, groups: TableGroups, full: dict[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Load what :func:`optimizer_state` returned into the tables; returns what is left for the dense optimizer.

    A checkpoint of another strategy has no ``extra``.

    Raises:
        ValueError: the checkpoint has updates but no state for a table whose optimizer keeps one.
    """
    dense, states, step = split(full, groups.current_layout(), groups.tables)
    groups.step = extra.get("updates", step)
    states |= extra.get("in_backward_states", {})
    for shard in tables.shards():
        if groups.step and shard.state and shard.table.key not in states:
            raise ValueError(
                f"the checkpoint has no optimizer state for table {shard.table.key!r}, which has seen {groups.step} updates: "
                "load its weights alone with model.load_state_dict, or resume from a checkpoint that was saved during fit"
            )
    scatter_states(tables, states)
    if "id_maps" in extra:
        scatter_pending(tables, extra["id_maps"])
    return dense
