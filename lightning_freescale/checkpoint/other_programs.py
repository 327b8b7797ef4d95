"""Checkpoints of other programs, such as a loop with TorchRec, in the form of a checkpoint of the Trainer.

The Trainer's optimizer states have the numbers of parameters, which depend on the module. So a converted checkpoint has the
states by the names of parameters, and :func:`with_optimizer_states` numbers them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_freescale.checkpoint.held_files import VERSION
from lightning_freescale.checkpoint.sharded_folder import StoredObject, StoredTensor
from lightning_freescale.checkpoint.unsharded import differences, merge
from lightning_freescale.embeddings.optimizer import state_shapes
from lightning_freescale.embeddings.parameter_groups import ParameterGroups
from lightning_freescale.embeddings.shards import ShardedTables

CONVERTED = "freescale_converted"
"""The entry of a converted checkpoint with its former format, the optimizer states by parameter, and what is left out."""
_MODELS = ("state_dict", "model", "module")
_WRAPPERS = ("_dmp_wrapped_module.", "module.")
_TO_FILE = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"


def as_checkpoint(found: dict[str, Any], path: Any, is_folder: bool) -> dict[str, Any]:
    """Return a checkpoint of another program in the form of a checkpoint of the Trainer.

    Raises:
        ValueError: it is not known which entries are the weights.
    """
    entries = found
    while len(entries) == 1 and not _model_of(entries) and isinstance(inner := next(iter(entries.values())), dict):
        entries = inner  # such as {"app": {"model": ..., "optimizer": ...}}
    model = _model_of(entries)
    weights = entries[model] if model else entries
    kind = "a folder of torch.distributed.checkpoint" if is_folder else "a file of torch.save"
    if not weights or not all(isinstance(value, (Tensor, StoredTensor)) for value in weights.values()):
        raise ValueError(
            f"{path} is {kind} and not a checkpoint of the Trainer. It has no state dict of a model: a state dict has only "
            f"tensors, alone or as the entry {', '.join(_MODELS)}, but the entries are {', '.join(map(str, found))}. Write a "
            f"file with '{_TO_FILE} FOLDER FILE', save only the state dict with torch.save, and load this file or run "
            "'freescale convert FILE TARGET'."
        )
    for wrapper in _WRAPPERS * 2:
        if all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    states: dict[str, dict[str, Any]] = {}
    left_out = [
        left for name, value in entries.items() if model and name != model for left in _add_states(states, weights, name, value)
    ]
    converted = {"format": kind, "optimizer_states": states, "left_out": left_out}
    # Lightning resumes a fit only if a checkpoint has lists for optimizers and schedulers
    return {
        "state_dict": weights,
        "optimizer_states": [],
        "lr_schedulers": [],
        VERSION: version("lightning"),
        CONVERTED: converted,
    }


def _model_of(entries: Mapping[str, Any]) -> str:
    found = [name for name in _MODELS if isinstance(entries.get(name), dict)]
    return found[0] if len(found) == 1 else ""


def _add_states(states: dict[str, dict[str, Any]], weights: Mapping[str, Any], entry: str, value: Any) -> Iterator[str]:
    """Add the optimizer states in an entry, by parameter, and yield the names of what is left out."""
    of_optimizer = value.get("state") if isinstance(value, dict) else None
    if of_optimizer is None:
        yield entry
    elif not isinstance(of_optimizer, dict) or not all(isinstance(name, str) for name in of_optimizer):
        yield f"{entry} (its states have numbers instead of names; torchrec.optim.keyed.KeyedOptimizerWrapper saves names)"
    else:
        yield from (f"{entry}.{name}" for name in value if name != "state")
        for name, of_parameter in of_optimizer.items():
            # CombinedOptimizer puts the names of its optimizers before those of the parameters
            parameter = next((end for end in _ends(name) if end in weights), None)
            if parameter is None or not isinstance(of_parameter, dict):
                yield f"{entry}.state.{name}"
            elif parameter in states:
                raise ValueError(f"the checkpoint has states of {parameter} in two optimizers, and one of them is {entry}")
            else:
                states[parameter] = _torch_states(of_parameter, tuple(weights[parameter].shape))


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _torch_states(states: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the states of a parameter with torch's names and shapes instead of TorchRec's."""
    found = {name.rpartition(".")[2]: value for name, value in states.items()}  # TorchRec puts the table before the name
    is_adam = not found.keys().isdisjoint(("momentum2", "exp_avg_sq"))
    names = {"momentum1": "exp_avg" if is_adam else "sum", "momentum2": "exp_avg_sq"}
    return {names.get(name, name): _torch_value(value, shape) for name, value in found.items()}


def _torch_value(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, StoredObject):
        return value.read()
    if len(shape) == 2 and getattr(value, "shape", ()) == shape[:1]:  # a row-wise state has one column
        column = torch.Size((shape[0], 1))
        return replace(value, shape=column) if isinstance(value, StoredTensor) else value.view(column)
    return value


def rename_keys(checkpoint: Mapping[str, Any], module: str, expected: Sequence[str], strict: bool, path: Any) -> dict[str, Any]:
    """Return a converted checkpoint with the names ``expected`` of a ``module``, if they differ by one prefix.

    Raises:
        ValueError: they differ in another way, or several prefixes are possible.
    """
    weights, converted = checkpoint["state_dict"], checkpoint[CONVERTED]
    beginnings: dict[str, list[list[str]]] = defaultdict(list)
    for name in expected:
        for start, end in enumerate(_ends(name)):
            beginnings[end].append(name.split(".")[:start])
    columns = zip(*(name.split(".")[:-1] for name in weights))
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]
    matches: Counter[tuple[int, str]] = Counter()  # by the number of parts to remove, and the prefix to add
    for name in weights:
        for removed, end in enumerate(_ends(name)[: len(common) + 1]):
            # it is the same to remove a part and to add it again
            new = [each for each in beginnings[end] if not removed or each[-1:] != common[removed - 1 : removed]]
            matches.update((removed, "".join(f"{part}." for part in each)) for each in new)
    most = max(matches.values(), default=0)
    best = [(0, "")] if matches[0, ""] == most else [change for change, number in matches.items() if number == most]
    removed, prefix = best[0]
    names = {name: prefix + _ends(name)[removed] for name in weights}
    wrong = differences(dict.fromkeys(expected, ()), dict.fromkeys(names.values(), ()))
    if not most or len(best) > 1 or (strict and wrong):
        several = f"several prefixes are possible, {', '.join(repr(prefix) for _, prefix in best)}" if len(best) > 1 else wrong
        raise ValueError(
            f"{path} was {converted['format']}, whose keys, such as {next(iter(weights))}, are not those of {module}, such as "
            f"{next(iter(expected))}: {several}. Write a file with 'freescale convert {path} FILE' or, from a folder, with "
            f"'{_TO_FILE} FOLDER FILE', rename the keys of its state dict with torch.load and torch.save, and load this file. "
            "With strict_loading=False in the LightningModule, only the keys that both have are loaded."
        )
    states = {names[name]: value for name, value in converted["optimizer_states"].items()}
    renamed = {names[name]: value for name, value in weights.items()}
    return {**checkpoint, "state_dict": renamed, CONVERTED: {**converted, "optimizer_states": states}}


def with_optimizer_states(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    tables: ShardedTables | None,
    groups: ParameterGroups | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a converted checkpoint with the optimizer states that strategy "freescale" would save, and what is left out."""
    states, left_out = checkpoint[CONVERTED]["optimizer_states"], list(checkpoint[CONVERTED]["left_out"])
    steps = {int(each["step"]) for each in states.values() if "step" in each}
    step = steps.pop() if len(steps) == 1 else None

    def fitting(
        name: str, shape: tuple[int, ...], kind: Any, options: Mapping[str, Any], counted: Iterable[str]
    ) -> dict[str, Any]:
        """Return the states of a parameter with the number of updates; empty if the optimizer ``kind`` has other states.

        An optimizer with one of the states ``counted`` needs the number of updates.
        """
        found, expected = dict(states.get(name, {})), state_shapes(kind, options, shape)
        given = found.pop("step", step)
        if {key: tuple(value.shape) for key, value in found.items()} != expected:
            left_out.append(f"{' and '.join(found) or 'optimizer states'} of {name}")
        elif given is None and not found.keys().isdisjoint(counted):
            left_out.append(f"{' and '.join(found)} of {name}, because the number of updates is missing")
        elif expected:
            return found if given is None else {**found, "step": torch.tensor(float(given))}
        return {}

    saved, names = [], {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        state = optimizer.state_dict()
        every = ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])
        for index, (group, parameter) in enumerate(every):
            # torch's Adagrad stores the number of its updates, and FBGEMM's does not
            if found := fitting(names[parameter], tuple(parameter.shape), type(optimizer), group, ("exp_avg", "sum")):
                state["state"][index] = found
        saved.append(state)
    if tables is None or groups is None:
        return {**checkpoint, "optimizer_states": saved}, left_out
    of_tables, keys = {}, tables.state_dict_keys()
    for table in tables.tables:
        kind = groups.optimizers[table.key].fused_class if table.key in groups.optimizers else torch.optim.SGD
        name = next((name for name, key in keys.items() if key == table.key and name in states), table.key)
        of_tables[table.key] = fitting(name, (table.rows, table.dim), kind, {}, ("exp_avg",))
    updates = {key: int(each.get("step", 0)) for key, each in of_tables.items()}
    in_backward = {key: of_tables.pop(key) for key in groups.in_backward}
    in_groups = {key: each for key, each in of_tables.items() if each}
    full = merge(saved[0], groups.layout(), groups.tables, in_groups, updates)
    extra = {"updates": step or 0, "table_updates": updates, "in_backward_states": in_backward}
    return {**checkpoint, "optimizer_states": [full], "freescale": extra}, left_out


def notice(checkpoint: Mapping[str, Any], left_out: Sequence[str], fits: bool) -> str:
    """Return the text of a warning about what a run does not load from a converted checkpoint."""
    missing = f"It is loaded without {', '.join(left_out)}. " if left_out else ""
    anew = "Loops, schedulers, callbacks and random states start anew, with the options of configure_optimizers" if fits else ""
    return f"the checkpoint was {checkpoint[CONVERTED]['format']}, written by another program. {missing}{anew}"
