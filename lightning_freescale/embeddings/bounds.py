"""Refuse ids that no row exists for, instead of training some other row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.collections import Collection


def check_ids(collection: Collection, module: nn.Module) -> None:
    """Check the ids of every batch that ``module`` looks up. Row-wise sharding would map an id beyond the table to another row.

    On CPU the error names feature, id and table; on a GPU a device-side assertion fires, so that nobody waits for a check.
    """
    rows = {feature: table.rows for table in collection.tables for feature in table.features}
    tables = {feature: table.name for table in collection.tables for feature in table.features}

    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        features = args[0]
        if not isinstance(features, KeyedJaggedTensor):
            return
        for key in features.keys():
            ids = features[key].values() if key in rows else None
            if ids is None or not ids.numel():
                continue
            inside = (ids >= 0) & (ids < rows[key])
            if ids.is_cuda:
                torch._assert_async(inside.all())
            elif not inside.all():
                raise ValueError(
                    f"feature {key!r} holds id {ids[~inside][0].item()}, but table {tables[key]!r} has "
                    f"num_embeddings={rows[key]}, ids 0 to {rows[key] - 1}: remap the ids or enlarge the table"
                )

    module.register_forward_pre_hook(check)


def check_rows(collections: list[Collection], needed: dict[str, int]) -> None:
    """Before training: does each feature's table have the rows that the data set needs?"""
    for collection in collections:
        for table in collection.tables:
            for feature in table.features:
                if needed.get(feature, 0) > table.rows:
                    raise ValueError(
                        f"the data has {needed[feature]} different ids of feature {feature!r}, but table {table.name!r} has "
                        f"num_embeddings={table.rows}: build it with num_embeddings={needed[feature]} or more"
                    )
