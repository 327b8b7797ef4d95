"""Check what is looked up: refuse ids that no row exists for, and tell when a table is looked up twice in a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.optimizer import TableOptimizer

_UNBOUNDED = torch.iinfo(torch.int64).max


def check_num_embeddings(collections: Sequence[Collection], needed: Mapping[str, int]) -> None:
    """Check before training that each feature's table has the rows that the data set needs.

    Args:
        collections: the collections of a module; those with managed collisions have a row for any id.
        needed: number of different ids by feature; features that it misses are not checked.

    Raises:
        ValueError: a table is too small; names feature, table and the size it needs.
    """
    for table in (table for collection in collections if not collection.managed for table in collection.tables):
        for feature in table.features:
            if needed.get(feature, 0) > table.rows:
                raise ValueError(
                    f"the data has {needed[feature]} different ids of feature {feature!r}, but table {table.name!r} has "
                    f"num_embeddings={table.rows}: build it with num_embeddings={needed[feature]} or more"
                )


def check_id_ranges(lookups: Iterable[tuple[str, Table, Tensor]]) -> None:
    """Check that each feature's table has a row for each of its ids; the host waits for the device, once.

    Args:
        lookups: feature, table, and ids, integers of any shape.

    Raises:
        ValueError: an id has no row; names feature, id and table.
    """
    given = [lookup for lookup in lookups if lookup[2].numel()]
    if not given:
        return
    bounds = torch.stack([bound for *_, ids in given for bound in torch.aminmax(ids)]).tolist()
    for (feature, table, ids), low, high in zip(given, bounds[::2], bounds[1::2]):
        if low < 0 or high >= table.rows:
            outside = ids[(ids < 0) | (ids >= table.rows)]
            raise ValueError(
                f"feature {feature!r} holds id {outside[0].item()}, but table {table.name!r} has num_embeddings={table.rows}, "
                f"ids 0 to {table.rows - 1}: remap the ids or enlarge the table"
            )


class LookupChecks:
    """Checks every lookup of a sharded collection, as its forward pre-hook: its ids, and how many a step makes.

    Row-wise sharding would map an id beyond the table to another table's row. On CPU the error names feature, id and table;
    on a GPU a device-side assertion fires, so that the host need not wait for the device (not tested on GPU).

    A second lookup in a step is warned of, once, if a table has a stateful optimizer: each lookup's backward updates the
    table by itself, where an unsharded module adds the gradients up first. It is not refused, because plain TorchRec does the
    same, which is what exact means here.

    Attributes:
        ids: whether ids are checked. Those of managed collisions have a row, whatever they are.
        lookups: those with gradients in this step.
        enabled: whether lookups are checked by this; the overlap engine does it itself.
    """

    def __init__(self, collection: Collection, optimizers: Mapping[str, TableOptimizer]) -> None:
        self.ids, self.enabled = not collection.managed, True
        self._path = collection.path
        self._tables = {feature: table for table in collection.tables for feature in table.features}
        self._limits: dict[tuple[str, ...], Tensor] = {}
        self._stateful = sorted({o.fused_class.__name__ for o in optimizers.values() if o.fused_class is not torch.optim.SGD})
        self.lookups = 0
        self._warned = False

    def reset_count(self) -> None:
        """Count lookups from 0 again, at the beginning of a training step."""
        self.lookups = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a lookup that is about to run, as :meth:`torch.nn.Module.register_forward_pre_hook` calls it."""
        if not self.enabled:
            return
        if self.ids:
            self.check_ids(args[0] if args else kwargs.get("features"))
        self.lookups += torch.is_grad_enabled()
        if self.lookups > 1 and self._stateful and not self._warned:
            self._warned = True
            warnings.warn(
                f"collection {self._path!r} is looked up {self.lookups} times in one step: {', '.join(self._stateful)} "
                "updates its tables once per lookup, as in plain TorchRec, not once per step. Look all features up in one call",
                stacklevel=2,
            )

    def check_ids(self, features: Any) -> None:
        """Check the ids of one lookup; features that the collection has no table for are passed over.

        Raises:
            ValueError: an id on the CPU has no row.
        """
        if not isinstance(features, KeyedJaggedTensor):
            return
        if features.values().is_cuda:
            torch._assert_async(self.in_range(features).all())
            return
        known = [feature for feature in features.keys() if feature in self._tables]  # noqa: SIM118 (it is no dict)
        check_id_ranges((feature, self._tables[feature], features[feature].values()) for feature in known)

    def in_range(self, features: KeyedJaggedTensor) -> Tensor:
        """Return whether each id has a row, as booleans of shape ``[ids]``, without a copy from device to host."""
        keys, values = tuple(features.keys()), features.values()
        if keys not in self._limits:
            rows = [self._tables[key].rows if key in self._tables else _UNBOUNDED for key in keys]
            self._limits[keys] = torch.tensor(rows, device=values.device)
        per_key = features.lengths().view(len(keys), -1).sum(dim=1)  # splitting the values by feature would need that copy
        limit = torch.repeat_interleave(self._limits[keys], per_key, output_size=values.numel())
        return (values >= 0) & (values < limit)
