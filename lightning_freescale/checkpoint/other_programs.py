"""Checkpoints of other programs, such as a loop with TorchRec, as files or folders, in the form of a checkpoint of the Trainer.

The Trainer's optimizer states have the numbers of parameters, which depend on the module. So a converted checkpoint has the
states by the names of parameters, and :func:`with_optimizer_states` numbers them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_freescale._runtime.error_text import error_text
from lightning_freescale.checkpoint import sharded_folder
from lightning_freescale.checkpoint.held_files import CONVERTED, MANIFEST, OF_TORCH, VERSION, HeldFiles
from lightning_freescale.checkpoint.sharded_folder import StoredPieces, StoredTensor
from lightning_freescale.checkpoint.unsharded import differences, merge
from lightning_freescale.embeddings.optimizer import state_shapes
from lightning_freescale.embeddings.parameter_groups import ParameterGroups
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import ShardedTables

_MODELS = ("state_dict", "model", "module")
_WRAPPERS = ("_dmp_wrapped_module.", "module.")
_EXTRA_STATE = "_extra_state"
"""The end of the names of what modules save with ``get_extra_state``."""
_Named = dict[str, list[tuple[str, bool, dict[str, Any]]]]
"""States by parameter: the entry of each, whether it has the parameter's exact name, and the states."""
_TO_FILE = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"


def read(folder: HeldFiles) -> dict[str, Any]:
    """Read a folder of torch.distributed.checkpoint (DCP); large tensors stay in the folder, and objects are None."""
    pieces, found = StoredPieces(folder), dict[str, Any]()
    for name, stored in pieces.tensors.items():
        value: StoredTensor | Tensor | None = None
        if isinstance(stored, TensorStorageMetadata):
            order = RowOrder(stored.size[0]) if stored.size else None
            tensor = StoredTensor(name, stored.size, stored.properties.dtype, order, pieces)
            value = tensor if prod(tensor.shape) * tensor.dtype.itemsize >= sharded_folder.LARGE else tensor.whole()
        set_element(found, pieces.metadata.planner_data.get(name, (name,)), value)
    return found


def damage(folder: HeldFiles) -> str:
    """Return a description of the damage to a folder of DCP; empty if there is none.

    Raises:
        OSError: a file that is there could not be read.
    """
    try:
        pieces = StoredPieces(folder) if (folder / OF_TORCH).is_file() else None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damage makes pickle raise errors of many types
        return f"its {OF_TORCH} cannot be read ({error_text(error)})"
    # DCP's planner notes nested names, and an incomplete folder of strategy 'freescale' has none
    if pieces is None or pieces.metadata.planner_data is None:
        return (
            f"it has no {MANIFEST} of strategy 'freescale', and it is not a folder of torch.distributed.checkpoint, or it is "
            "incomplete"
        )
    ends: dict[str, int] = {}
    for each in pieces.metadata.storage_data.values():
        ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    for name, size in ends.items():
        if not (folder / name).is_file():
            return f"the file {name} is missing"
        if (folder / name).stat().st_size < size:
            return f"the file {name} has {(folder / name).stat().st_size} bytes instead of {size}"
    return ""


def as_checkpoint(found: dict[str, Any], path: Any, is_folder: bool) -> dict[str, Any]:
    """Return a checkpoint of another program in the form of a checkpoint of the Trainer.

    Raises:
        ValueError: it is not known which entries are the weights.
    """
    models = [name for name in _MODELS if isinstance(found.get(name), dict)]
    if not models and len(found) == 1 and isinstance(inner := next(iter(found.values())), dict):
        return as_checkpoint(inner, path, is_folder)  # such as {"app": {"model": ..., "optimizer": ...}}
    entries = found[models[0]] if models else found
    weights = {name: value for name, value in entries.items() if isinstance(value, (Tensor, StoredTensor))}
    left_out = [name for name in entries if name not in weights]
    kind = "a folder of torch.distributed.checkpoint" if is_folder else "a file of torch.save"
    has_others = not models and any(not str(name).endswith(_EXTRA_STATE) for name in left_out)
    if len(models) > 1 or not weights or has_others or not all(isinstance(name, str) for name in weights):
        raise ValueError(
            f"{path} is {kind} and not a checkpoint of the Trainer. It has no state dict of a model: a state dict has tensors "
            f"by name, alone or as one of the entries {', '.join(_MODELS)}, but the entries are {', '.join(map(str, found))}. "
            f"Write a file with '{_TO_FILE}', save only the state dict with torch.save, and load this file or run 'freescale "
            "convert FILE TARGET'."
        )
    for wrapper in _WRAPPERS * 2:
        if all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    named: _Named = defaultdict(list)
    if models:
        left_out = [f"{models[0]}.{name}" for name in left_out]
        for name, value in found.items():
            left_out += _add_states(named, weights, name, value) if name != models[0] else ()
    states = _chosen(named, left_out)
    converted = {"format": kind, "optimizer_states": states, "left_out": left_out}
    # Lightning resumes a fit only if a checkpoint has lists for optimizers and schedulers
    lists: dict[str, Any] = {"optimizer_states": [], "lr_schedulers": []}
    return {"state_dict": weights, **lists, VERSION: version("lightning"), CONVERTED: converted}


def _add_states(named: _Named, weights: Mapping[str, Any], entry: str, value: Any) -> Iterator[str]:
    """Add the optimizer states in an entry, by parameter, and yield the names of what is left out."""
    of_optimizer = value.get("state") if isinstance(value, dict) else None
    if of_optimizer is None:
        yield entry
    # DCP makes texts of numbers
    elif not isinstance(of_optimizer, dict) or not all(isinstance(name, str) and not name.isdecimal() for name in of_optimizer):
        yield f"{entry} (its states have numbers instead of names; torchrec.optim.keyed.KeyedOptimizerWrapper saves names)"
    else:
        yield from (f"{entry}.{name}" for name in value if name != "state")
        parameters = _parameters(of_optimizer, weights)
        for name, of_parameter in of_optimizer.items():
            if name in parameters and isinstance(of_parameter, dict):
                states = _torch_states(of_parameter, tuple(weights[parameters[name]].shape))
                named[parameters[name]].append((f"{entry}.state.{name}", name == parameters[name], states))
            else:
                yield f"{entry}.state.{name}"


def _parameters(names: Collection[str], weights: Collection[str]) -> dict[str, str]:
    """Return the parameters of the names in an optimizer's states that have one.

    CombinedOptimizer and wrappers of a module put a prefix before the names of parameters. A prefix is one only if all names
    that begin with it are parameters without it, except special ones such as "__warmup".
    """
    found = {name: name for name in names if name in weights}
    ends = {name: end for name in names for end in reversed(_ends(name)) if end in weights}  # the longest end of each
    for prefix in sorted({name.removesuffix(end) for name, end in ends.items()}):
        rests = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        of_optimizer = {name: rest for name, rest in rests.items() if not rest.startswith("__")}
        if all(rest in weights for rest in of_optimizer.values()):
            found = of_optimizer | found
    return found


def _chosen(named: _Named, left_out: list[str]) -> dict[str, dict[str, Any]]:
    """Return the states of each parameter: those with its exact name, or else the only ones. Add the others to ``left_out``."""
    chosen = {}
    for parameter, found in named.items():
        exact = [states for _, is_exact, states in found if is_exact]
        if len(exact) > 1:
            entries = " and ".join(entry for entry, is_exact, _ in found if is_exact)
            raise ValueError(f"the checkpoint has states of {parameter} in two optimizers: {entries}")
        if exact or len(found) == 1:
            chosen[parameter] = exact[0] if exact else found[0][2]
        left_out += [entry for entry, is_exact, _ in found if len(found) > 1 and not is_exact]
    return chosen


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _torch_states(states: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the states of a parameter with torch's names and shapes instead of TorchRec's."""
    found = {name.rpartition(".")[2]: value for name, value in states.items()}  # TorchRec puts the table before the name
    is_adam = not found.keys().isdisjoint(("momentum2", "exp_avg_sq"))
    names = {"momentum1": "exp_avg" if is_adam else "sum", "momentum2": "exp_avg_sq"}
    for name, value in found.items():
        if len(shape) == 2 and getattr(value, "shape", ()) == shape[:1]:  # a row-wise state has one column
            column = torch.Size((shape[0], 1))
            found[name] = replace(value, shape=column) if isinstance(value, StoredTensor) else value.view(column)
    return {names.get(name, name): value for name, value in found.items() if value is not None}


def rename_keys(checkpoint: Mapping[str, Any], module: str, expected: Sequence[str], strict: bool, path: Any) -> dict[str, Any]:
    """Return a converted checkpoint with the names ``expected`` of a ``module``, if they differ by one prefix.

    Raises:
        ValueError: they differ in another way, or several prefixes are possible.
    """
    weights, converted = checkpoint["state_dict"], checkpoint[CONVERTED]
    same_end = defaultdict(list)
    for name in expected:
        for end in _ends(name):
            same_end[end].append(name)
    examples: dict[tuple[str, str], list[str]] = defaultdict(list)  # new names, by removed and added prefix
    for name in weights:
        # the longest common end of two names, because a change need not remove a part and add it again
        ends = {other: end for end in reversed(_ends(name)) for other in same_end[end]}
        for other, end in ends.items():
            examples[name.removesuffix(end), other.removesuffix(end)].append(other)
    most = len(weights) if strict else max(map(len, examples.values()), default=0)
    fits = [change for change, others in examples.items() if len(others) == most]
    if ("", "") in (fits if strict else examples):
        fits = [("", "")]
    old, new = fits[0] if fits else ("", "")
    names = {name: new + name.removeprefix(old) if name.startswith(old) else name for name in weights}
    wrong = ""
    if len(fits) > 1:
        wrong = f"several prefixes fit, such as in {' and '.join(sorted(examples[change][0] for change in fits[:2]))}"
    elif strict or not fits:
        wrong = differences(dict.fromkeys(expected, ()), dict.fromkeys(names.values(), ()))
    if wrong:
        first, other = next(iter(weights)), next(iter(expected), "(it has none)")
        loose = " With strict_loading=False in the LightningModule, only the keys that both have are loaded."
        raise ValueError(
            f"{path} was {converted['format']}, whose keys, such as {first}, are not those of {module}, such as {other}: "
            f"{wrong}. Write a file with 'freescale convert {path} FILE' or, from a folder, with '{_TO_FILE}', rename the keys "
            f"of its state dict with torch.load and torch.save, and load this file.{loose if strict else ''}"
        )
    states = {names[name]: value for name, value in converted["optimizer_states"].items()}
    renamed = {names[name]: value for name, value in weights.items()}
    return {**checkpoint, "state_dict": renamed, CONVERTED: {**converted, "optimizer_states": states}}


def _step(states: Mapping[str, Any]) -> int | None:
    """Return the number of updates, or None if the states have no single number."""
    step = states.get("step")
    if isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1):
        return int(step)
    return None


def with_optimizer_states(
    converted: Mapping[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    tables: ShardedTables | None,
    groups: ParameterGroups | None,
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Return the optimizer states as :func:`.optimizer_state_dict` returns them, and the names of what is left out."""
    states, left_out = converted["optimizer_states"], list(converted["left_out"])
    most_steps = max((step for each in states.values() if (step := _step(each)) is not None), default=None)

    def fitting(name: str, expected: Mapping[str, tuple[int, ...]] | None, uncounted: str = "") -> dict[str, Any]:
        """Return the states of a parameter with the number of updates, which only an ``uncounted`` state does not need."""
        found = dict(states.get(name, {}))
        given = most_steps if (own := _step(found)) is None else own
        found.pop("step", None)
        if {key: getattr(value, "shape", None) for key, value in found.items()} != expected:
            left_out.append(f"{' and '.join(found) or 'optimizer states'} of {name}")
        elif given is None and not found.keys() <= {uncounted, "momentum_buffer"}:
            left_out.append(f"{' and '.join(found)} of {name}, because the number of updates is missing")
        else:
            has_count = bool(found) and "momentum_buffer" not in found
            return {**found, **({"step": torch.tensor(float(given or 0))} if has_count else {})}
        return {}

    saved, names = [], {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        saved.append(optimizer.state_dict())
        every = ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])
        for index, (group, parameter) in enumerate(every):
            name = names.get(parameter)  # None for a parameter outside of the module
            if name and (found := fitting(name, state_shapes(type(optimizer), group, tuple(parameter.shape)))):
                saved[-1]["state"][index] = found
    if tables is None or groups is None:
        return saved, {}, left_out
    of_tables, keys = {}, tables.state_dict_keys()
    for table in tables.tables:
        kind = groups.optimizers[table.key].fused_class if table.key in groups.optimizers else torch.optim.SGD
        name = next((name for name, key in keys.items() if key == table.key and name in states), table.key)
        of_tables[table.key] = fitting(name, state_shapes(kind, {}, (table.rows, table.dim)), uncounted="sum")
    updates = {key: int(each.get("step", 0)) for key, each in of_tables.items()}
    in_backward = {key: of_tables.pop(key) for key in groups.in_backward}
    in_groups = {key: each for key, each in of_tables.items() if each}
    full = merge(saved[0], groups.layout(), groups.tables, in_groups, updates)
    return [full], {"updates": most_steps or 0, "table_updates": updates, "in_backward_states": in_backward}, left_out


def notice(converted: Mapping[str, Any], left_out: Sequence[str], fits: bool) -> str:
    """Return the text of a warning about what a run does not load from a converted checkpoint."""
    missing = f" It is loaded without {', '.join(left_out)}." if left_out else ""
    anew = " Loops, schedulers, callbacks and random states start anew. Optimizers have the options of configure_optimizers"
    return f"the checkpoint was {converted['format']}, written by another program.{missing}{anew if fits else ''}"
