"""The user's optimizer over tables that backward updates: who drives which table, and with what options."""

from __future__ import annotations

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
        optimizers: how each table is updated, by table key; tables that nobody updates are missing.
        in_backward: keys of the tables that keep an optimizer of their own.
        step: optimizer steps done so far.
        updates: how many each table's optimizer has done, by table key.

    Raises:
        ValueError: no fused optimizer does what the user's does.
    """

    def __init__(self, optimizer: Optimizer, sharding: TableSharding) -> None:
        names = {parameter: name for name, parameter in sharding.root.named_parameters()}
        key_of = {weight: key for key, weight in sharding.parameters.items()}
        self.root = sharding.root
        self.step, self.updates = 0, sharding.updates
        self.tables = frozenset(sharding.parameters)
        self.in_backward = frozenset(sharding.in_backward)
        self.optimizers = dict(sharding.in_backward)
        self._optimizer = optimizer
        self._layout = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            for key in [key_of[p] for p in group["params"] if p in key_of and p.requires_grad]:
                if key not in self.in_backward:
                    by_engine = key in sharding.sparse_adam
                    derived = TableOptimizer.from_parameter_group(optimizer, index, key, sharding.device, by_engine)
                    self.optimizers[key] = derived
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in key_of]
        for weight in key_of:
            optimizer.state.pop(weight, None)

    def layout(self) -> list[list[str]]:
        """Return the parameter names of every group as the user gave them, tables included.

        After them come the groups that a callback has added since, such as Lightning's finetuning callbacks.

        Raises:
            ValueError: a group has gained or lost parameters.
        """
        groups = self._optimizer.param_groups
        for index, (names, group) in enumerate(zip(self._layout, groups)):
            dense = sum(name not in self.tables for name in names)
            if dense != len(group["params"]):
                raise ValueError(
                    f"parameter group {index} of {type(self._optimizer).__name__} had {dense} dense parameters when training "
                    f"began and has {len(group['params'])} now: add parameters as a new group"
                )
        return self._layout + [[""] * len(group["params"]) for group in groups[len(self._layout) :]]

    def settings(self) -> dict[str, UpdateSettings]:
        """Return what the next step updates each table with, by table key: what schedulers and callbacks have set by now.

        Raises:
            ValueError: an option was changed that updates of tables cannot follow.
        """
        options: dict[int | None, dict[str, float]] = {None: {}}
        for key, how in self.optimizers.items():
            if how.group is not None and how.group not in options:
                options[how.group] = self._options(how.group, key)
        return {key: UpdateSettings(self.updates[key], options[how.group]) for key, how in self.optimizers.items()}

    def count_step(self) -> None:
        """Note that an optimizer step has been done."""
        self.step += 1
        for key in self.optimizers:
            self.updates[key] += 1

    def _options(self, group: int, table: str) -> dict[str, float]:
        for name, value, demanded in unsupported_options(self._optimizer, group):
            raise ValueError(
                f"parameter group {group} of {type(self._optimizer).__name__} holds the embedding table {table!r}, and its "
                f"{name} was changed from {demanded!r} to {value!r} during training, which updates of tables cannot follow: "
                f"leave it at {demanded!r}, or put the tables into a parameter group of their own"
            )
        return followed_options(self._optimizer, group)
