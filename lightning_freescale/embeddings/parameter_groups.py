"""The user's optimizer over tables that backward updates: who drives which table, and with what options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings, followed_options, unsupported_options
from lightning_freescale.embeddings.sharding import TableSharding


class ParameterGroups:
    """The parameter groups of the user's optimizer, which of them drives which table, and how many updates are done.

    The tables are updated during backward, so creating this takes them out of the optimizer; but its parameter groups go on
    setting their options, and checkpoints list its parameters as the user gave them.

    Args:
        optimizer: built over the unsharded parameters; its tables are removed.
        sharding: what stands in for the tables; optimizers that the user has applied in backward stay.

    Attributes:
        optimizers: how each table is updated while it is not frozen, by table key; tables without an optimizer are missing.
        in_backward: keys of the tables that keep an optimizer of their own.
        step: optimizer steps done so far.
        updates: how many each table's optimizer has done, by table key.

    Raises:
        ValueError: no fused optimizer does what the user's does.
    """

    def __init__(self, optimizer: Optimizer, sharding: TableSharding) -> None:
        key_of = {weight: key for key, weight in sharding.parameters.items()}
        names = {parameter: name for name, parameter in sharding.root.named_parameters()} | key_of
        self.root = sharding.root
        self.step, self.updates = 0, sharding.updates
        self.tables = frozenset(sharding.parameters)
        self.in_backward = frozenset(sharding.in_backward)
        self.optimizers = dict(sharding.in_backward)
        self._optimizer = optimizer
        self._device, self._sparse_adam = sharding.device, sharding.sparse_adam
        self._stuck: dict[str, str] = {}  # why a frozen table cannot be unfrozen
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
        """This rank's weights of every table that has been sharded, by table key; the user freezes tables by them."""
        parameters = dict(self.root.named_parameters(remove_duplicate=False))
        return {key: parameters[key] for key in self.updates}

    def layout(self) -> list[list[str]]:
        """Return the parameter names of every group as the user gave them, tables included.

        After them come the groups that a callback has added since, such as Lightning's finetuning callbacks.

        Raises:
            ValueError: a group has gained or lost parameters.
        """
        self._adopt_new_groups()
        for index, (names, group) in enumerate(zip(self._layout, self._optimizer.param_groups)):
            dense = sum(name not in self.tables for name in names)
            if dense != len(group["params"]):
                raise ValueError(
                    f"parameter group {index} of {type(self._optimizer).__name__} had {dense} dense parameters when training "
                    f"began and has {len(group['params'])} now: add parameters as a new group"
                )
        return self._layout

    def settings(self) -> dict[str, UpdateSettings]:
        """Return what the next step updates each table with, by table key: what schedulers and callbacks have set by now.

        Raises:
            ValueError: an option was changed that updates of tables cannot follow, or a table unfrozen that cannot be
                updated, or frozen or unfrozen before the gradients of earlier batches have been applied.
        """
        self._adopt_new_groups()
        frozen_now = {key for key, weight in self.weights.items() if not weight.requires_grad}
        if self._window_open and frozen_now != self._frozen:
            raise ValueError(
                f"embedding tables {sorted(frozen_now ^ self._frozen)} were frozen or unfrozen (requires_grad) while gradients "
                "are accumulated: do it before the first batch after an optimizer step"
            )
        self._frozen, self._window_open = frozen_now, True
        for key in sorted(self._stuck.keys() - frozen_now):
            raise ValueError(f"requires_grad of the embedding table {key!r} was set during training, but {self._stuck[key]}")
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
        """Refuse options that have changed since the tables' gradients of the step were sent with those ``used``, by table key.

        Raises:
            ValueError: the optimizer step would use other options for the dense parameters.
        """
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
                    f"{now[group]}: the embedding table {key!r} has been updated with the former. Change them before backward"
                )

    def count_step(self, idle: Iterable[str] = ()) -> None:
        """Note that an optimizer step has been done, in which the tables ``idle``, by key, had no gradient."""
        self.step, self._window_open = self.step + 1, False
        for key in self.optimizers.keys() - self._frozen - set(idle):
            self.updates[key] += 1

    def uncount(self, idle_steps: Mapping[str, int]) -> None:
        """Take back, by table key, steps that were counted and in which a table had no gradient."""
        for key, count in idle_steps.items():
            if key in self.updates:
                self.updates[key] -= count

    def has_state(self, table: str) -> bool:
        """Return whether torch's optimizer would have a state of a table by now, if it has any."""
        how = self.optimizers.get(table)
        return how is not None and (how.state_from_start or self.updates[table] > 0)

    def _options(self, group: int, table: str) -> dict[str, float]:
        for name, value, demanded in unsupported_options(self._optimizer, group):
            raise ValueError(
                f"parameter group {group} of {type(self._optimizer).__name__} holds the embedding table {table!r}, and its "
                f"{name} was changed from {demanded!r} to {value!r} during training, which updates of tables cannot follow: "
                f"leave it at {demanded!r}, or put the tables into a parameter group of their own"
            )
        return followed_options(self._optimizer, group)

    def _adopt_new_groups(self) -> None:
        """Take tables out of the groups that a callback has added since, as out of the first ones."""
        groups = self._optimizer.param_groups
        while len(groups) > len(self._layout):
            index, key_of = len(self._layout), {weight: key for key, weight in self.weights.items()}
            given, held = groups[index]["params"], {name for names in self._layout for name in names}
            # a table that an earlier group holds stays there, as in an unsharded optimizer
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
                f"parameter group {group} was added to {type(self._optimizer).__name__} during training and holds the "
                f"embedding table {key!r}, whose shards have no room for that optimizer's state: list the table in "
                "configure_optimizers from the start; as long as its requires_grad is False, it stays as it is"
            )
        return derived
