"""State dicts of sharded modules and their optimizers in the form of the unsharded module.

Saving gathers the tables. Any other strategy and the plain module can read the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.checkpoint.sharded_folder import StoredTensor, materialized
from lightning_freescale.checkpoint.spread_tensors import Key, Piece, SpreadTensors
from lightning_freescale.embeddings.id_remapping import id_remappings
from lightning_freescale.embeddings.managed_collision import get_input_history, set_input_history
from lightning_freescale.embeddings.parameter_groups import ParameterGroups
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import Shard, ShardedTables

_LISTED = 3
"""The number of keys of each kind that an error lists."""

Hold = Callable[[SpreadTensors], Mapping[Key, Tensor]]
"""A function that returns the entries of a state dict for spread tensors: whole tensors on rank 0, or placeholders."""


def module_state_dict(
    tables: ShardedTables,
    sharded: Mapping[str, Any],
    hold: Hold = SpreadTensors.gather_all,
    shards: Iterable[Shard] | None = None,
    kind: Key = (),
) -> dict[str, Any]:
    """Return the unsharded form of this rank's ``sharded`` state dict of a module, or of a copy. Collective.

    By default rank 0 gets the whole tables, and other ranks get the dense part only. For a copy, ``shards`` are its shards, and
    ``kind`` is the suffix of its keys, which distinguishes it from the live tables in a checkpoint with both.
    """
    shards = tables.shards() if shards is None else shards
    own = [(Piece.of(shard, (shard.table.key, *kind), shard.weight), shard.weight) for shard in shards]
    names = {name: (key, *kind) for name, key in tables.state_dict_keys().items()}
    for remapping in id_remappings(tables):
        by_row = remapping.row_tensors()
        for name, value in remapping.tensors().items():
            key = (remapping.prefixes[0] + name,)
            names |= {f"{prefix}{name}": key for prefix in remapping.prefixes}
            if name in by_row:
                shape = (remapping.ends[-1], *value.shape[1:])
                own.append((Piece(key, shape, value.dtype, (remapping.rows,), RowOrder(remapping.ends[-1])), value))
            elif remapping.rank == 0:
                own.append((Piece(key, tuple(value.shape), value.dtype), value))
    whole = hold(SpreadTensors(own, tables.group, tables.message_device()))
    dense = {name: value for name, value in sharded.items() if name not in names}
    return dense | {name: whole[key] for name, key in names.items() if key in whole}


@torch.no_grad()
def load_module_state_dict(module: nn.Module, tables: ShardedTables, whole: Mapping[str, Any], strict: bool) -> None:
    """Load an unsharded state dict into a sharded module. Each rank loads its part of the tables."""
    module.load_state_dict(loaded_module_state(module, tables, whole, strict), strict=strict)


@torch.no_grad()
def loaded_module_state(
    module: nn.Module, tables: ShardedTables, whole: Mapping[str, Any], strict: bool = True
) -> dict[str, Any]:
    """Load the tables of an unsharded state dict, and return it with the sharded module's entries instead of the tables."""
    for remapping in id_remappings(tables):
        for prefix in remapping.prefixes:
            found = {name: whole[prefix + name] for name in remapping.tensors() if prefix + name in whole}
            remapping.load(materialized(found))
    held = {
        name: value
        for collection, sharded in tables.modules
        for inner, value in sharded.state_dict().items()
        if inner not in collection.data_parallel
        for name in collection.names(inner)
    }
    return loaded_state(module, tables, tables.shards(), whole, held, strict)


@torch.no_grad()
def loaded_state(
    module: nn.Module,
    tables: ShardedTables,
    shards: Iterable[Shard],
    whole: Mapping[str, Any],
    held: Mapping[str, Any],
    strict: bool = True,
) -> dict[str, Any]:
    """Load this rank's rows of an unsharded state dict into ``shards``.

    Return the state dict with the values of ``held`` for keys that both have, and for tables that it does not have.
    """
    names = tables.state_dict_keys()
    _refuse_another_module(module, tables, whole, strict)
    weights = {key: whole[name] for name, key in names.items() if name in whole}
    for shard in shards:
        if shard.table.key in weights:
            _read(weights[shard.table.key], shard, shard.weight)
    others = module.state_dict().keys() - names.keys()
    dense = materialized({name: value for name, value in whole.items() if name in others})
    return {**whole, **dense, **{name: value for name, value in held.items() if name in whole or name in names}}


def _refuse_another_module(module: nn.Module, tables: ShardedTables, whole: Mapping[str, Any], strict: bool) -> None:
    """Raise a RuntimeError if the state dict has no or other tables; torch compares the other entries."""
    sizes = {table.key: (table.rows, table.dim) for table in tables.tables}
    expected: dict[str, tuple[int, ...]] = {name: sizes[key] for name, key in tables.state_dict_keys().items()}
    found = {name: tuple(getattr(value, "shape", ())) for name, value in whole.items()}
    if all(found.get(name, () if strict else size) == size for name, size in expected.items()):
        return
    sharded = {*expected, *tables.names_in_module()}
    dense = {name: tuple(getattr(value, "shape", ())) for name, value in module.state_dict().items() if name not in sharded}
    raise RuntimeError(
        f"the checkpoint is of another model: {differences(expected | dense, found)}. Resume with the module that wrote it"
    )


def differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first keys that are missing in ``found``, unexpected, or of another shape; empty if there are none."""
    kinds = {
        "missing keys": [key for key in expected if key not in found],
        "unexpected keys": [key for key in found if key not in expected],
        "keys of another shape": [
            f"{key} of {found[key]} instead of {shape}" for key, shape in expected.items() if found.get(key, shape) != shape
        ],
    }
    return "; ".join(
        f"{kind} {', '.join(keys[:_LISTED])}" + f" and {len(keys) - _LISTED} more" * (len(keys) > _LISTED)
        for kind, keys in kinds.items()
        if keys
    )


def optimizer_state_dict(
    tables: ShardedTables, groups: ParameterGroups, dense: dict[str, Any], hold: Hold = SpreadTensors.gather_all
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict of the user's optimizer with the states of the tables, by default whole on rank 0. Collective.

    The second result has the values that the state dict cannot hold: the number of optimizer steps, the number of updates of
    each table, the states of tables with their own optimizer, and the input histories of each rank's id maps.
    """
    states: dict[str, dict[str, Tensor]] = {}
    shards = [shard for shard in tables.shards() if groups.has_state(shard.table.key)]
    values = [(shard, name, value) for shard in shards for name, value in shard.state.items()]
    own = [(Piece.of(shard, (shard.table.key, name), value), value) for shard, name, value in values]
    for (key, name), whole in hold(SpreadTensors(own, tables.group, tables.message_device())).items():
        states.setdefault(key, {})[name] = whole
    in_backward = {key: states.pop(key) for key in groups.in_backward if key in states}
    histories = {remapping.prefixes[0]: get_input_history(remapping.mc_module) for remapping in id_remappings(tables)}
    extra = {"updates": groups.step, "table_updates": dict(groups.updates), "in_backward_states": in_backward}
    extra["id_maps"] = gather_objects(histories, tables.group) if histories else []
    return merge(dense, groups.layout(), groups.tables, states, groups.updates), extra


@torch.no_grad()
def load_optimizer_state_dict(
    tables: ShardedTables, groups: ParameterGroups, full: dict[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Load the results of :func:`optimizer_state_dict` into the tables, and return the state dict of the dense optimizer.

    Each rank loads its part. ``extra`` is empty for a checkpoint of another strategy.
    """
    dense, states, step = split(full, groups.layout(), groups.tables)
    groups.step = extra.get("updates", step)
    states |= extra.get("in_backward_states", {})
    for key, weight in groups.weights.items():
        # a table has no state if it was frozen or if torch's Adam has never updated it
        stateful = weight.requires_grad and (key in groups.in_backward or groups.has_state(key))
        updates = int(states.get(key, {}).get("step", groups.step if stateful else 0))
        groups.updates[key] = extra.get("table_updates", {}).get(key, updates)
    _refuse_another_optimizer(tables, groups, states)
    for shard in tables.shards():
        for name, value in shard.state.items():
            source = states.get(shard.table.key, {}).get(name)
            if source is not None:
                _read(source, shard, value)
    remappings, ranks, histories = id_remappings(tables), tables.group.size(), extra.get("id_maps", [])
    if remappings and "id_maps" in extra and len(histories) != ranks:
        warnings.warn(
            f"the checkpoint has the input histories of the id maps of {len(histories)} ranks, but this run has {ranks} ranks. "
            "The id maps start with empty histories.",
            stacklevel=2,
        )
    for remapping in remappings if len(histories) == ranks else ():
        set_input_history(remapping.mc_module, histories[tables.group.rank()].get(remapping.prefixes[0]))
    return dense


def _refuse_another_optimizer(tables: ShardedTables, groups: ParameterGroups, states: Mapping[str, Any]) -> None:
    """Raise a ValueError on every rank if the states of the tables on any rank are not those of their optimizer. Collective."""
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for shard in tables.shards():
        key, state = shard.table.key, states.get(shard.table.key, {})
        if shard.state and groups.updates[key]:
            shapes = {name: Piece.of(shard, (key, name), value).shape for name, value in shard.state.items()}
            expected |= {f"{key} {name}": shape for name, shape in shapes.items()}
            found |= {f"{key} {name}": tuple(value.shape) for name, value in state.items() if name != "step"}
    if wrong := next(filter(None, gather_objects(differences(expected, found), tables.group)), ""):
        raise ValueError(
            f"the checkpoint has other optimizer states than those of the tables: {wrong}. Resume with the optimizer that "
            "wrote it, or load only the weights with model.load_state_dict"
        )


def _read(source: Tensor | StoredTensor, shard: Shard, into: Tensor) -> None:
    if isinstance(source, StoredTensor):
        source.read(shard.place_in(source.shape), shard.order, into)
    else:
        shard.read(source, into)


def merge(
    dense: dict[str, Any],
    layout: list[list[str]],
    tables: Collection[str],
    states: Mapping[str, Any],
    updates: Mapping[str, int],
) -> dict[str, Any]:
    """Return the state dict that the user's optimizer would have if it had also updated the tables.

    ``dense`` is the state dict without the tables, and ``states`` and ``updates`` have the state and the number of updates of
    each table. ``layout`` has the parameter names of every group in the user's order, including the tables.
    """
    if "param_groups" not in dense:  # Lightning's placeholder for a module without optimizer
        return dense
    merged, groups, first = {}, [], 0
    for group, names in zip(dense["param_groups"], layout):
        old = iter(group["params"])
        for index, name in enumerate(names, first):
            state = states.get(name) if name in tables else dense["state"].get(next(old))
            if state is not None:
                merged[index] = {"step": torch.tensor(float(updates[name])), **state} if name in tables else state
        groups.append({**group, "params": [*range(first, first + len(names))]})
        first += len(names)
    return {"state": merged, "param_groups": groups}


def split(
    full: dict[str, Any], layout: list[list[str]], tables: Collection[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], int]:
    """Return the state dict without the tables, the states of the tables, and the number of updates; see :func:`merge`."""
    if "param_groups" not in full:
        return full, {}, 0
    sizes, expected = [len(g["params"]) for g in full["param_groups"]], [len(names) for names in layout]
    if sizes != expected:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {sizes} parameters, but the optimizer from "
            f"configure_optimizers has {expected}. Resume with the optimizer that wrote the checkpoint."
        )
    dense: dict[str, Any] = {"state": {}, "param_groups": []}
    states: dict[str, dict[str, Tensor]] = {}
    index = 0
    for group, names in zip(full["param_groups"], layout):
        kept = []
        for name, old in zip(names, group["params"]):
            state = full["state"].get(old)
            if name in tables:
                if state:
                    states[name] = state
                continue
            if state is not None:
                dense["state"][index] = state
            kept.append(index)
            index += 1
        dense["param_groups"].append({**group, "params": kept})
    return dense, states, max((int(state["step"]) for state in full["state"].values() if "step" in state), default=0)
