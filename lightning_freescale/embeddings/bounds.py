"""Refuse ids that no row exists for, instead of training some other row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection

_UNBOUNDED = torch.iinfo(torch.int64).max


def check_rows(collections: list[Collection], needed: dict[str, int]) -> None:
    """Before training: does each feature's table have the rows that the data set needs?

    Raises:
        ValueError: a table is too small; names feature, table and the size it needs.
    """
    for collection in collections:
        for table in collection.tables:
            for feature in table.features:
                if needed.get(feature, 0) > table.rows:
                    raise ValueError(
                        f"the data has {needed[feature]} different ids of feature {feature!r}, but table {table.name!r} has "
                        f"num_embeddings={table.rows}: build it with num_embeddings={needed[feature]} or more"
                    )


def check_ids(collection: Collection, module: nn.Module) -> None:
    """Check the ids of every batch that ``module`` looks up. Row-wise sharding would map an id beyond the table to another row.

    On CPU the error names feature, id and table; on a GPU a device-side assertion fires, so that nobody waits for a check
    (not tested on GPU).
    """
    module.register_forward_pre_hook(_Check(collection))


class _Check:
    def __init__(self, collection: Collection) -> None:
        self.rows = {feature: table.rows for table in collection.tables for feature in table.features}
        self.tables = {feature: table.name for table in collection.tables for feature in table.features}
        self.limits: dict[tuple[str, ...], Tensor] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not isinstance(args[0], KeyedJaggedTensor):
            return
        if args[0].values().is_cuda:
            torch._assert_async(self._inside(args[0]).all())
            return
        for key in args[0].keys():  # noqa: SIM118 (a KeyedJaggedTensor is no dict)
            self._check_feature(key, args[0])

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
