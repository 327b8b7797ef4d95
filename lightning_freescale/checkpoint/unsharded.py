"""Checkpoints of a sharded module that look as if nothing were sharded.

That costs a gather, and gives files that any other strategy and the plain module can read.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_freescale._objects import gather_objects
from lightning_freescale.embeddings.id_remapping import id_remappings
from lightning_freescale.embeddings.managed_collision import get_input_history, set_input_history
from lightning_freescale.embeddings.optimizer import ParameterGroups
from lightning_freescale.embeddings.shards import Shard, ShardedTables

_ROWS_PER_MESSAGE = 1 << 20


def module_state_dict(tables: ShardedTables, sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the unsharded form of a module's state dict on rank 0; other ranks get its dense part. Collective."""
    whole, keys, maps = gather_weights(tables), tables.state_dict_keys(), gather_id_remappings(tables)
    dense = {name: value for name, value in sharded.items() if name not in keys.keys() | id_remapping_keys(tables)}
    return dense | {name: whole[key] for name, key in keys.items() if key in whole} | maps


def load_module_state_dict(module: nn.Module, tables: ShardedTables, whole: Mapping[str, Any], strict: bool) -> None:
    """Load an unsharded state dict; errors are those of ``torch.nn.Module.load_state_dict``."""
    scatter_weights(tables, {key: whole[name] for name, key in tables.state_dict_keys().items() if name in whole})
    maps = scatter_id_remappings(tables, whole)
    # all is in place: torch gets the shards, so that it finds missing and unexpected keys as it always does
    shards = {name: value for name, value in tables.sharded_weights().items() if name in whole} | maps
    module.load_state_dict({**whole, **shards}, strict=strict)


def optimizer_state_dict(
    tables: ShardedTables, groups: ParameterGroups, dense: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict of the user's optimizer with its tables in it, whole on rank 0. Collective.

    Returns:
        That state dict, and what has no place in it: the number of updates, the states of the tables that have an optimizer
        of their own, and the ids that managed collisions have seen since they last let new ones in.
    """
    states = gather_states(tables)
    own = {key: states.pop(key) for key in groups.in_backward if key in states}
    merged = merge(dense, groups.layout(), groups.tables, states, groups.step)
    return merged, {"updates": groups.step, "in_backward_states": own, "id_maps": gather_input_histories(tables)}


def load_optimizer_state_dict(
    tables: ShardedTables, groups: ParameterGroups, full: dict[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Load what :func:`optimizer_state_dict` returned into the tables.

    Args:
        tables: the sharded tables.
        groups: the user's parameter groups.
        full: the state dict with the tables in it.
        extra: what had no place in it; empty for a checkpoint of another strategy.

    Returns:
        What is left for the dense optimizer.

    Raises:
        ValueError: the checkpoint has updates but no state for a table whose optimizer keeps one.
    """
    dense, states, step = split(full, groups.layout(), groups.tables)
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
        scatter_input_histories(tables, extra["id_maps"])
    return dense


def merge(
    dense: dict[str, Any], layout: list[list[str]], tables: Collection[str], states: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """Return the state dict that the user's optimizer would have if it had updated the tables too.

    Args:
        dense: state dict of the optimizer that holds the dense parameters only.
        layout: parameter names of every group in the order the user gave them, tables included.
        tables: names in ``layout`` that are tables.
        states: states of the tables by name.
        step: updates done so far.
    """
    if "param_groups" not in dense:  # Lightning's stand-in for a module without optimizer
        return dense
    merged, groups, index = {}, [], 0
    for group, names in zip(dense["param_groups"], layout):
        old, new = iter(group["params"]), []
        for name in names:
            if name not in tables:
                state = dense["state"].get(next(old))
            else:
                state = {"step": torch.tensor(float(step)), **states[name]} if name in states else None
            if state is not None:
                merged[index] = state
            new.append(index)
            index += 1
        groups.append({**group, "params": new})
    return {"state": merged, "param_groups": groups}


def split(
    full: dict[str, Any], layout: list[list[str]], tables: Collection[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], int]:
    """Take a state dict of :func:`merge` apart.

    Returns:
        The state dict for the dense optimizer, the states of the tables by name, and the number of updates done.

    Raises:
        ValueError: the checkpoint's parameter groups are not those of this optimizer.
    """
    if "param_groups" not in full:
        return full, {}, 0
    sizes, expected = [len(g["params"]) for g in full["param_groups"]], [len(names) for names in layout]
    if sizes != expected:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {sizes} parameters, configure_optimizers returned one with "
            f"{expected}: resume with the optimizer that wrote the checkpoint"
        )
    dense: dict[str, Any] = {"state": {}, "param_groups": []}
    states: dict[str, dict[str, Tensor]] = {}
    step, index = 0, 0
    for group, names in zip(full["param_groups"], layout):
        kept = []
        for name, old in zip(names, group["params"]):
            state = full["state"].get(old)
            if state and "step" in state:
                step = max(step, int(state["step"]))
            if name in tables:
                if state:
                    states[name] = {key: value for key, value in state.items() if key != "step"}
                continue
            if state is not None:
                dense["state"][index] = state
            kept.append(index)
            index += 1
        dense["param_groups"].append({**group, "params": kept})
    return dense, states, step


@dataclass(frozen=True)
class _Part:
    """Where a tensor of one rank belongs: all that rank 0 must know to receive it.

    Attributes:
        key: of the whole tensor.
        shape: of the whole tensor.
        place: which part of it this is.
        dtype: of both.
    """

    key: tuple[str, str]
    shape: tuple[int, ...]
    place: tuple[slice, ...]
    dtype: torch.dtype


def gather_weights(tables: ShardedTables) -> dict[str, Tensor]:
    """Return whole weights on the CPU of rank 0, by state-dict key; empty on other ranks. Collective."""
    parts = [(_part_of(shard, "weight", shard.weight), shard.weight) for shard in tables.shards()]
    return {key: whole for (key, _), whole in _gather(tables, parts)}


def gather_states(tables: ShardedTables) -> dict[str, dict[str, Tensor]]:
    """Return whole optimizer states on the CPU of rank 0, by table key and torch's state name. Collective.

    A row-wise state has one column, as that of ``torchrec.optim.RowWiseAdagrad`` has. Empty on other ranks.
    """
    parts = [(_part_of(shard, name, value), value) for shard in tables.shards() for name, value in shard.state.items()]
    found: dict[str, dict[str, Tensor]] = {}
    for (key, name), whole in _gather(tables, parts):
        found.setdefault(key, {})[name] = whole
    return found


@torch.no_grad()
def scatter_weights(tables: ShardedTables, whole: Mapping[str, Tensor]) -> None:
    """Copy each rank's part of ``whole`` (by state-dict key) into its shards; keys that are missing are left alone.

    Raises:
        RuntimeError: a tensor has another shape than its table.
    """
    for table in tables.tables:
        source = whole.get(table.key)
        if source is not None and source.shape != (table.rows, table.dim):
            raise RuntimeError(
                f"size mismatch for {table.key}: the checkpoint has {tuple(source.shape)}, the table is "
                f"({table.rows}, {table.dim})"
            )
    for shard in tables.shards():
        if shard.table.key in whole:
            shard.weight.copy_(whole[shard.table.key][shard.rows, shard.columns])


@torch.no_grad()
def scatter_states(tables: ShardedTables, whole: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy each rank's part of the optimizer states (by table key and state name) into its shards."""
    for shard in tables.shards():
        for name, value in shard.state.items():
            source = whole.get(shard.table.key, {}).get(name)
            if source is not None:
                value.copy_(source[_place_in(shard, source.shape)].reshape(value.shape))


def gather_id_remappings(tables: ShardedTables) -> dict[str, Tensor]:
    """Return whole maps on the CPU of rank 0, by state-dict key, under all their names; empty on other ranks. Collective."""
    maps, parts = id_remappings(tables), []
    for one in maps:
        for name, value in one.row_tensors().items():
            shape = (one.ends[-1], *value.shape[1:])
            parts.append((_Part((one.prefixes[0], name), shape, (one.rows,), value.dtype), value))
    whole = dict(_gather(tables, parts)) if maps else {}
    found = {}
    for one in maps if tables.group.rank() == 0 else ():
        for name, value in one.tensors().items():
            gathered = whole.get((one.prefixes[0], name))
            found.update({f"{prefix}{name}": value.cpu().clone() if gathered is None else gathered for prefix in one.prefixes})
    return found


def id_remapping_keys(tables: ShardedTables) -> set[str]:
    """Return every name that a state dict has for a tensor of a map."""
    return {f"{prefix}{name}" for one in id_remappings(tables) for prefix in one.prefixes for name in one.tensors()}


def scatter_id_remappings(tables: ShardedTables, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Copy each rank's part of ``whole`` (by state-dict key) into its maps.

    Returns:
        What ``load_state_dict`` of the sharded module takes instead, for the keys that ``whole`` has.

    Raises:
        ValueError: a map cannot be cut for this number of ranks.
        RuntimeError: a map has another size than its table.
    """
    for one in id_remappings(tables):
        for prefix in one.prefixes:
            one.load({name: whole[prefix + name] for name in one.tensors() if prefix + name in whole})
    found = {}
    for collection, module in tables.modules:
        if collection.managed:
            state = module.state_dict()
            for path in (collection.path, *collection.aliases):
                found.update({f"{path}.{name}" if path else name: value for name, value in state.items()})
    return {key: found[key] for key in id_remapping_keys(tables) if key in whole}


def gather_input_histories(tables: ShardedTables) -> list[dict[str, Any]]:
    """Return for every rank the ids that its maps have seen since they last let new ones in; empty without maps. Collective."""
    maps = id_remappings(tables)
    return gather_objects({one.prefixes[0]: get_input_history(one.mc_module) for one in maps}, tables.group) if maps else []


def scatter_input_histories(tables: ShardedTables, histories: Sequence[dict[str, Any]]) -> None:
    """Put back what :func:`gather_input_histories` returned; on another number of ranks warn and start the counting anew."""
    maps, ranks = id_remappings(tables), tables.group.size()
    if maps and len(histories) != ranks:
        warnings.warn(
            f"the checkpoint holds what the id maps of {len(histories)} ranks had seen since they last let ids in, this run "
            f"has {ranks}: those counts start anew",
            stacklevel=2,
        )
        return
    for one in maps:
        set_input_history(one.mc_module, histories[tables.group.rank()].get(one.prefixes[0]))


def _part_of(shard: Shard, name: str, value: Tensor) -> _Part:
    shape = (shard.table.rows, 1 if value.dim() == 1 else shard.table.dim)
    return _Part((shard.table.key, name), shape, _place_in(shard, shape), value.dtype)


def _place_in(shard: Shard, shape: Sequence[int]) -> tuple[slice, ...]:
    return (shard.rows,) if shape[1] == 1 else (shard.rows, shard.columns)


def _gather(tables: ShardedTables, mine: Sequence[tuple[_Part, Tensor]]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield whole tensors on rank 0, one after the other by key; nothing on other ranks."""
    rank = tables.group.rank()
    parts: list[list[_Part]] = gather_objects([part for part, _ in mine], tables.group)
    for key in sorted({part.key for of_rank in parts for part in of_rank}):
        whole: Tensor | None = None
        for owner, of_owner in enumerate(parts):
            for index, part in enumerate(of_owner):
                if part.key != key:
                    continue
                if rank == 0:
                    whole = torch.empty(part.shape, dtype=part.dtype) if whole is None else whole
                    place = whole[part.place]
                    if owner == 0:
                        place.copy_(mine[index][1].reshape(place.shape))
                    else:
                        _receive(tables, owner, place)
                elif owner == rank:
                    _send(tables, mine[index][1])
        if whole is not None:
            yield key, whole


def _send(tables: ShardedTables, value: Tensor) -> None:
    for rows in value.contiguous().split(_ROWS_PER_MESSAGE):
        if rows.numel():
            dist.send(rows, 0, group=tables.group)


def _receive(tables: ShardedTables, owner: int, place: Tensor) -> None:
    for rows in place.split(_ROWS_PER_MESSAGE):
        if rows.numel():
            buffer = torch.empty(rows.shape, dtype=place.dtype, device=tables.device)
            dist.recv(buffer, owner, group=tables.group)
            rows.copy_(buffer)
