"""Watch the lookups: refuse ids that no row exists for, and tell when a table is looked up twice in a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.optimizer import TableOptimizer

_UNBOUNDED = torch.iinfo(torch.int64).max


def check_rows(collections: list[Collection], needed: dict[str, int]) -> None:
    """Before training: does each feature's table have the rows that the data set needs?

    Raises:
        ValueError: a table is too small; names feature, table and the size it needs.
    """
    for collection in (c for c in collections if not c.managed):
        for table in collection.tables:
            for feature in table.features:
                if needed.get(feature, 0) > table.rows:
                    raise ValueError(
                        f"the data has {needed[feature]} different ids of feature {feature!r}, but table {table.name!r} has "
                        f"num_embeddings={table.rows}: build it with num_embeddings={needed[feature]} or more"
                    )


def check_ids(collection: Collection, module: Any) -> None:
    """Check the ids of every batch that ``module`` looks up. Row-wise sharding would map an id beyond the table to another row.

    On CPU the error names feature, id and table; on a GPU a device-side assertion fires, so that nobody waits for a check
    (not tested on GPU).
    """
    module.freescale_ids = _Check(collection)
    module.register_forward_pre_hook(module.freescale_ids, with_kwargs=True)


class LookupCount:
    """Warns, once, when a table with a stateful optimizer is looked up more than once in a step.

    Each lookup's backward updates the table by itself, as in plain TorchRec, where an unsharded module adds the gradients up
    first. For SGD that is the same.
    """

    def __init__(self, collection: Collection, optimizers: Mapping[str, TableOptimizer]) -> None:
        self.path, self.lookups, self.warned = collection.path, 0, False
        self.stateful = sorted({o.fused_class.__name__ for o in optimizers.values() if o.fused_class is not torch.optim.SGD})

    def begin_step(self) -> None:
        """A training step begins."""
        self.lookups = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before a lookup."""
        self.lookups += torch.is_grad_enabled()
        if self.lookups > 1 and self.stateful and not self.warned:
            self.warned = True
            warnings.warn(
                f"collection {self.path!r} is looked up {self.lookups} times in one step: {', '.join(self.stateful)} updates "
                "its tables once per lookup, as in plain TorchRec, not once per step. Look all features up in one call",
                stacklevel=2,
            )


class _Check:
    def __init__(self, collection: Collection) -> None:
        self.rows = {feature: table.rows for table in collection.tables for feature in table.features}
        self.tables = {feature: table.name for table in collection.tables for feature in table.features}
        self.limits: dict[tuple[str, ...], Tensor] = {}
        self.on = True
        """Whether to check every lookup."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.on:
            self.check(args[0] if args else kwargs.get("features"))

    def check(self, features: Any) -> None:
        """Check one lookup."""
        if not isinstance(features, KeyedJaggedTensor):
            return
        if features.values().is_cuda:
            torch._assert_async(self._inside(features).all())
            return
        for key in features.keys():  # noqa: SIM118 (a KeyedJaggedTensor is no dict)
            self._check_feature(key, features)

    def _check_feature(self, key: str, features: KeyedJaggedTensor) -> None:
        ids, rows = features[key].values(), self.rows.get(key, _UNBOUNDED)
        outside = ids[(ids < 0) | (ids >= rows)]
        if key in self.rows and outside.numel():
            raise ValueError(
                f"feature {key!r} holds id {outside[0].item()}, but table {self.tables[key]!r} has num_embeddings={rows}, ids "
                f"0 to {rows - 1}: remap the ids or enlarge the table"
            )

    def _inside(self, features: KeyedJaggedTensor) -> Tensor:
        """Without a word from device to host: splitting the values by feature would need one."""
        keys, values = tuple(features.keys()), features.values()
        if keys not in self.limits:
            self.limits[keys] = torch.tensor([self.rows.get(key, _UNBOUNDED) for key in keys], device=values.device)
        per_key = features.lengths().view(len(keys), -1).sum(dim=1)
        limit = torch.repeat_interleave(self.limits[keys], per_key, output_size=values.numel())
        return (values >= 0) & (values < limit)
