"""Make a rank's rows of a collection from TorchRec's sharded module."""

from __future__ import annotations

from typing import Any

from lightning_freescale.embeddings.collections import Collection
from lightning_freescale.embeddings.overlap.local_rows import AdamKernel, LocalRows, LocalTable, TableKernel
from lightning_freescale.embeddings.overlap.row_layout import RowLayout
from lightning_freescale.embeddings.shards import ShardedTables, kernels


def local_rows(layout: RowLayout, collection: Collection, module: Any, tables: ShardedTables) -> LocalRows:
    """What ``module`` holds on this rank."""
    rank = tables.group.rank()
    index_of = {table.name: index for index, table in enumerate(collection.tables)}
    found: list[TableKernel] = []
    for kernel in kernels(module):
        specs = kernel._config.embedding_tables
        weights = kernel.emb_module.split_embedding_weights()
        held = {}
        for spec, weight in zip(specs, weights):
            index = index_of[spec.name]
            held[index] = LocalTable(index, int(layout.base[rank, index]), weight)
        features = [index_of[spec.name] for spec in specs for _ in spec.feature_names]
        optimizer = tables.optimizers[collection.tables[features[0]].key]
        plain = (kernel.emb_module, features, held, optimizer.group)
        if optimizer.sparse_adam:
            states = {index_of[name]: state for name, state in kernel.sparse_adam_states.items()}
            found.append(AdamKernel(states, optimizer.arguments, *plain))
        else:
            found.append(TableKernel(*plain))
    return LocalRows(layout, rank, found, collection.tables[0].dim)
