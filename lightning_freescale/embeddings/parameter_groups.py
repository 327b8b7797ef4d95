"""The parameter groups of the user's optimizer as the source of the options of tables that backward updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings, followed_options, unsupported_options
from lightning_freescale.embeddings.sharding import TableSharding


class ParameterGroups:
    """The parameter groups of the user's optimizer, and the optimizers and update counts of the tables.

    Tables are updated during backward, so the constructor removes them from the optimizer. Its parameter groups continue to
    set the options of the tables. Checkpoints list all parameters in the user's order. The constructor raises a ValueError if
    no fused optimizer is equivalent to the user's optimizer.
    """

    def __init__(self, optimizer: Optimizer, sharding: TableSharding) -> None:
        key_of = {weight: key for key, weight in sharding.parameters.items()}
        names = {parameter: name for name, parameter in sharding.root.named_parameters()} | key_of
        self.root = sharding.root
        self.step, self.updates = 0, sharding.updates  # numbers of optimizer steps, and of updates of each table by its key
        self.tables = frozenset(sharding.parameters)
        self.in_backward = frozenset(sharding.in_backward)  # keys of the tables with an optimizer applied in backward
        self.optimizers = dict(sharding.in_backward)  # of the tables that have one and are not frozen, by key
        self._optimizer = optimizer
        self._device, self._sparse_adam = sharding.device, sharding.sparse_adam
        self._stuck: dict[str, str] = {}  # the reason why a frozen table cannot be unfrozen
        self._frozen: set[str] = set()
        self._window_open = False
        self._layout = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            for weight in (p for p in group["params"] if key_of.get(p, "") in self.updates.keys() - self.in_backward):
                try:
                    self.optimizers[key_of[weight]] = self._derived(index, key_of[weight])
                except ValueError as error:
                    if weight.requires_grad:
                        raise
                    self._stuck[key_of[weight]] = str(error)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in key_of]
        for weight in key_of:
            optimizer.state.pop(weight, None)

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """This rank's weights of all sharded tables, by table key. The user sets their ``requires_grad``."""
        parameters = dict(self.root.named_parameters(remove_duplicate=False))
        return {key: parameters[key] for key in self.updates}

    def layout(self) -> list[list[str]]:
        """Return the parameter names of every group in the user's order, including tables.

        The last groups are those that callbacks have added, such as Lightning's finetuning callbacks.
        """
        self._adopt_new_groups()
        for index, (names, group) in enumerate(zip(self._layout, self._optimizer.param_groups)):
            dense = sum(name not in self.tables for name in names)
            if dense != len(group["params"]):
                raise ValueError(
                    f"parameter group {index} of {type(self._optimizer).__name__} had {dense} dense parameters at the start of "
                    f"training and has {len(group['params'])} now. Add parameters as a new group instead."
                )
        return self._layout

    def settings(self) -> dict[str, UpdateSettings]:
        """Return the settings of the next update of each table, by table key, with the current options of the groups."""
        self._adopt_new_groups()
        frozen_now = {key for key, weight in self.weights.items() if not weight.requires_grad}
        if self._window_open and frozen_now != self._frozen:
            raise ValueError(
                f"embedding tables {sorted(frozen_now ^ self._frozen)} were frozen or unfrozen (requires_grad) while gradients "
                "are accumulated. Do this before the first batch after an optimizer step."
            )
        self._frozen, self._window_open = frozen_now, True
        for key in sorted(self._stuck.keys() - frozen_now):
            raise ValueError(
                f"requires_grad of the embedding table {key!r} was set during training, but it must stay frozen. "
                f"{self._stuck[key]}"
            )
        moving = self.optimizers.keys() - self._frozen
        options: dict[int | None, dict[str, float]] = {None: {}}
        shared: dict[tuple[int | None, int, bool], UpdateSettings] = {}
        found = {}
        for key, updates in self.updates.items():
            frozen = key not in moving
            group = None if frozen else self.optimizers[key].group
            if group is not None and group not in options:
                options[group] = self._options(group, key)
            alike = (group, updates, frozen)
            found[key] = shared.get(alike) or shared.setdefault(alike, UpdateSettings(updates, options[group], frozen))
        return found

    def refuse_late_changes(self, used: Mapping[str, UpdateSettings]) -> None:
        """Raise a ValueError if options have changed since backward, which has updated tables with the settings ``used``."""
        now: dict[int, dict[str, float]] = {}
        for key, settings in used.items():
            group = self.optimizers[key].group if settings.options else None
            if group is None:
                continue
            if group not in now:
                now[group] = self._options(group, key)
            if now[group] != settings.options:
                raise ValueError(
                    f"options of parameter group {group} were changed after backward from {dict(settings.options)} to "
                    f"{now[group]}, but backward has already updated the embedding table {key!r}. Change them before backward."
                )

    def count_step(self, idle: Iterable[str] = ()) -> None:
        """Count an optimizer step, in which the tables with the keys ``idle`` had no gradient."""
        self.step, self._window_open = self.step + 1, False
        for key in self.optimizers.keys() - self._frozen - set(idle):
            self.updates[key] += 1

    def uncount(self, idle_steps: Mapping[str, int]) -> None:
        """Subtract steps without a gradient from the counts, by table key."""
        for key, count in idle_steps.items():
            if key in self.updates:
                self.updates[key] -= count

    def has_state(self, table: str) -> bool:
        """Return whether torch's optimizer would already have created the state of a table, if it has one."""
        how = self.optimizers.get(table)
        return how is not None and (how.state_from_start or self.updates[table] > 0)

    def _options(self, group: int, table: str) -> dict[str, float]:
        for name, value, demanded in unsupported_options(self._optimizer, group):
            raise ValueError(
                f"parameter group {group} of {type(self._optimizer).__name__} contains the embedding table {table!r}, and its "
                f"{name} was changed from {demanded!r} to {value!r} during training. Tables do not support this value. Keep "
                f"{demanded!r}, or put the tables into a separate parameter group."
            )
        return followed_options(self._optimizer, group)

    def _adopt_new_groups(self) -> None:
        """Remove tables from groups that a callback has added, as from the first groups."""
        groups = self._optimizer.param_groups
        while len(groups) > len(self._layout):
            index, key_of = len(self._layout), {weight: key for key, weight in self.weights.items()}
            given, held = groups[index]["params"], {name for names in self._layout for name in names}
            # a table stays in an earlier group that contains it, as in an unsharded optimizer
            names = [key_of.get(p, "") for p in given if key_of.get(p) not in held]
            if given and not names:
                del groups[index]
                continue
            for key in names:
                if key in self.updates.keys() - self.in_backward:
                    self.optimizers[key] = self._derived_late(index, key)
            groups[index]["params"] = [p for p in given if p not in key_of]
            self._layout.append(names)

    def _derived(self, group: int, key: str) -> TableOptimizer:
        return TableOptimizer.from_parameter_group(self._optimizer, group, key, self._device, key in self._sparse_adam)

    def _derived_late(self, group: int, key: str) -> TableOptimizer:
        derived = self._derived(group, key)
        if derived.fused_class is not torch.optim.SGD:
            raise ValueError(
                f"parameter group {group} was added to {type(self._optimizer).__name__} during training and contains the "
                f"embedding table {key!r}, but its shards have no memory for the optimizer's state. Include the table in "
                "configure_optimizers from the start. It does not change while its requires_grad is False."
            )
        return derived
