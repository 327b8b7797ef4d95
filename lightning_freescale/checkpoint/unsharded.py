"""Checkpoints of a sharded module that look as if nothing were sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_freescale.checkpoint.optimizer_state import merge, split
from lightning_freescale.checkpoint.tables import gather_states, gather_weights, scatter_states, scatter_weights
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.embeddings.training import TableGroups

IN_BACKWARD = "in_backward_optimizer_states"
"""Checkpoint key of the states of tables that have an optimizer of their own."""


def state_dict(tables: ShardedTables, sharded: Mapping[str, Any]) -> dict[str, Any]:
    """The unsharded form of a module's state dict on rank 0; other ranks get its dense part. Collective."""
    whole, keys = gather_weights(tables), {table.key for table in tables.tables}
    return {key: whole.get(key, value) for key, value in sharded.items() if key in whole or key not in keys}


def load_state_dict(module: nn.Module, tables: ShardedTables, whole: Mapping[str, Any], strict: bool) -> None:
    """Load an unsharded state dict; errors are those of ``torch.nn.Module.load_state_dict``."""
    scatter_weights(tables, whole)
    # the tables are in place: torch gets their shards, so that it finds missing and unexpected keys as it always does
    shards = {key: value for key, value in tables.sharded_weights().items() if key in whole}
    module.load_state_dict({**whole, **shards}, strict=strict)


def optimizer_state(tables: ShardedTables, groups: TableGroups, dense: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict of the user's optimizer with its tables in it, whole on rank 0. Collective.

    Returns:
        That state dict, and the states of the tables that have an optimizer of their own.
    """
    states = gather_states(tables)
    own = {key: states.pop(key) for key in groups.given if key in states}
    return merge(dense, groups.layout, groups.tables, states, groups.step), own


def load_optimizer_state(
    tables: ShardedTables, groups: TableGroups, full: dict[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Load what :func:`optimizer_state` returned into the tables; returns what is left for the dense optimizer."""
    dense, states, groups.step = split(full, groups.layout, groups.tables)
    scatter_states(tables, {**states, **own})
    return dense
