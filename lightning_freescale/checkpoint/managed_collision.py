"""The id maps of managed-collision collections in a checkpoint: whole, as the unsharded module has them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.checkpoint.tables import receive_rows, send_rows
from lightning_freescale.embeddings.id_remapping import IdRemapping, id_maps
from lightning_freescale.embeddings.pending_ids import get_pending, set_pending
from lightning_freescale.embeddings.shards import ShardedTables


def gather_maps(tables: ShardedTables) -> dict[str, Tensor]:
    """Whole maps on the CPU of rank 0, by state-dict key, under every name they have; empty on other ranks. Collective."""
    found = {}
    for one in id_maps(tables):
        for name, mine in one.tensors().items():
            whole = _gather(tables, one, mine) if name in one.cut() else mine.cpu().clone()
            if tables.group.rank() == 0:
                found.update({f"{prefix}{name}": whole for prefix in one.keys})
    return found


def cut_keys(tables: ShardedTables) -> set[str]:
    """Every name that a state dict has for a tensor of a map."""
    return {f"{prefix}{name}" for one in id_maps(tables) for prefix in one.keys for name in one.tensors()}


def scatter_maps(tables: ShardedTables, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Copy each rank's part of ``whole`` (by state-dict key) into its maps.

    Returns:
        What ``load_state_dict`` of the sharded module takes instead, for the keys that ``whole`` has.

    Raises:
        ValueError: a map cannot be cut for this number of ranks.
        RuntimeError: a map has another size than its table.
    """
    for one in id_maps(tables):
        for prefix in one.keys:
            one.load({name: whole[prefix + name] for name in one.tensors() if prefix + name in whole})
    found = {}
    for collection, module in tables.modules:
        if collection.managed:
            state = module.state_dict()
            for path in (collection.path, *collection.aliases):
                found.update({f"{path}.{name}" if path else name: value for name, value in state.items()})
    return {key: found[key] for key in cut_keys(tables) if key in whole}


def gather_pending(tables: ShardedTables) -> list[dict[str, Any]]:
    """For every rank what its maps have seen since they last let ids in; empty without maps. Collective."""
    maps = id_maps(tables)
    if not maps:
        return []
    everyone: list[Any] = [None] * tables.group.size()
    dist.all_gather_object(everyone, {one.keys[0]: get_pending(one.manager) for one in maps}, group=tables.group)
    return everyone


def scatter_pending(tables: ShardedTables, everyone: list[dict[str, Any]]) -> None:
    """Put back what :func:`gather_pending` returned; on another number of ranks warn and start the counting anew."""
    maps, ranks = id_maps(tables), tables.group.size()
    if maps and len(everyone) != ranks:
        warnings.warn(
            f"the checkpoint holds what the id maps of {len(everyone)} ranks had seen since they last let ids in, this run has "
            f"{ranks}: those counts start anew",
            stacklevel=2,
        )
        return
    for one in maps:
        set_pending(one.manager, everyone[tables.group.rank()].get(one.keys[0]))


def _gather(tables: ShardedTables, one: IdRemapping, mine: Tensor) -> Tensor:
    if tables.group.rank() != 0:
        send_rows(tables, mine)
        return mine
    whole = torch.empty(one.ends[-1], *mine.shape[1:], dtype=mine.dtype)
    for owner in range(tables.group.size()):
        place = whole[one.ends[owner] : one.ends[owner + 1]]
        place.copy_(mine) if owner == 0 else receive_rows(tables, owner, place)
    return whole
