"""Which of the user's parameter groups drives which table."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_freescale.embeddings.optimizer import TableOptimizer, derive


class TableGroups:
    """Takes the tables out of the user's optimizer and remembers where they were.

    The tables are updated during backward, so the optimizer must not hold them; but its parameter groups go on setting their
    learning rates, and checkpoints list its parameters as the user gave them.

    Args:
        optimizer: built over the unsharded parameters; its tables are removed.
        root: the module, for the names of its parameters.
        tables: weight of every table by its key.
        given: optimizers that the user has applied in backward, by table key; they stay.
        device: where the tables will live.
        by_row: keys of the tables that the overlap engine can update.

    Attributes:
        layout: parameter names of every group as the user gave them.
        optimizers: how each table is updated, by table key; tables that nobody updates are missing.
        given: keys of the tables that keep an optimizer of their own.
        step: updates done so far.

    Raises:
        ValueError: no fused optimizer does what the user's does.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        root: nn.Module,
        tables: Mapping[str, nn.Parameter],
        given: Mapping[str, TableOptimizer],
        device: torch.device,
        by_row: Set[str] = frozenset(),
    ) -> None:
        names = {parameter: name for name, parameter in root.named_parameters()}
        key_of = {weight: key for key, weight in tables.items()}
        self.optimizer, self.root, self.step = optimizer, root, 0
        self.tables, self.given = frozenset(tables), frozenset(given)
        self.layout = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        self.optimizers = dict(given)
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                key = key_of.get(parameter)
                if key is not None and key not in given and parameter.requires_grad:
                    self.optimizers[key] = derive(optimizer, index, key, device, key in by_row)
        for group in optimizer.param_groups:
            for parameter in [p for p in group["params"] if p in key_of]:
                optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if p not in key_of]

    def current_layout(self) -> list[list[str]]:
        """``layout``, and after it the groups that a callback has added since, such as Lightning's finetuning callbacks.

        Raises:
            ValueError: a group has gained or lost parameters.
        """
        groups = self.optimizer.param_groups
        for index, (names, group) in enumerate(zip(self.layout, groups)):
            dense = sum(name not in self.tables for name in names)
            if dense != len(group["params"]):
                raise ValueError(
                    f"parameter group {index} of {type(self.optimizer).__name__} had {dense} dense parameters when training "
                    f"began and has {len(group['params'])} now: add parameters as a new group"
                )
        return self.layout + [[""] * len(group["params"]) for group in groups[len(self.layout) :]]

    def learning_rate(self, group: int) -> float:
        """The rate that the user's schedulers have set for a parameter group."""
        return float(self.optimizer.param_groups[group]["lr"])
