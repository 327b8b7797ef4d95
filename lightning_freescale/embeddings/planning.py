"""Which rank holds which part of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.optimizer import TableOptimizer, has_row_wise_state

_FUSED = ("fused", "fused_uvm", "fused_uvm_caching")


def row_wise_planner(
    collections: list[Collection], device: torch.device, world_size: int, local_world_size: int
) -> EmbeddingShardingPlanner:
    """TorchRec's planner, held to row-wise sharding with the optimizer fused into backward.

    EmbeddingBagCollections may be sharded table-wise as well: on CPU, TorchRec plans nothing else for them. Tables too small
    to give every rank a row are sharded table-wise.
    """
    constraints = {}
    for collection in collections:
        for table in collection.tables:
            types = _types(table, collection.pooled, world_size)
            constraints[table.name] = ParameterConstraints(sharding_types=types, compute_kernels=["fused"])
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local_world_size),
        kernel_config=KernelConfig(compute_device=device.type),
    )
    # 15 % is TorchRec's own default share; its default estimate of the dense part warns that it is unreliable
    return EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, storage_reservation=FixedPercentageStorageReservation(0.15)
    )


def check_plan(collection: Collection, plan: Mapping[str, Any], optimizers: Mapping[str, TableOptimizer]) -> None:
    """Refuse what cannot be trained or checkpointed as if it were unsharded.

    Raises:
        ValueError: names the table, what the plan says of it, and the fix.
    """
    for table in collection.tables:
        kind, kernel = plan[table.name].sharding_type, plan[table.name].compute_kernel
        if kernel not in _FUSED or kind == "data_parallel":
            raise ValueError(
                f"the sharding plan gives table {table.name!r} sharding_type={kind!r} and compute_kernel={kernel!r}: tables "
                'are updated by fused kernels, use compute_kernel="fused" and a type other than data_parallel'
            )
        if ("column" in kind or "grid" in kind) and has_row_wise_state(optimizers[table.key]):
            raise ValueError(
                f"the sharding plan splits the columns of table {table.name!r} (sharding_type={kind!r}), but its optimizer "
                f"{optimizers[table.key].fused_class.__name__} keeps one state per row: use row_wise or table_wise"
            )


def _types(table: Table, pooled: bool, world_size: int) -> list[str]:
    block = -(-table.rows // world_size)
    if (world_size - 1) * block >= table.rows:  # a rank would get no row, which FBGEMM's kernels do not take
        return ["table_wise"]
    return ["row_wise", "table_wise"] if pooled else ["row_wise"]
