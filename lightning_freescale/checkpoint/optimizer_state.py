"""Merge the tables' optimizer states into the user's optimizer state dict, as if nothing were sharded; and split them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

StateDict = dict[str, Any]


def merge(
    dense: StateDict, layout: list[list[str]], tables: Collection[str], states: Mapping[str, Any], step: int
) -> StateDict:
    """The state dict that the user's optimizer would have if it had updated the tables too.

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
    full: StateDict, layout: list[list[str]], tables: Collection[str]
) -> tuple[StateDict, dict[str, dict[str, Tensor]], int]:
    """The inverse of :func:`merge`.

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
    dense: StateDict = {"state": {}, "param_groups": []}
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
