"""Plan the parts of tables that each rank holds, and check plans."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.optimizer import TableOptimizer

_FUSED = ("fused", "fused_uvm", "fused_uvm_caching")


def memory_for_tables(root: nn.Module, tables: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup) -> int | None:
    """Return the bytes of a GPU that dense part and its optimizer leave free, the least of all ranks. Collective.

    TorchRec's planner takes 32 GB for granted otherwise. None on the CPU.

    Args:
        root: the module that is trained.
        tables: those of its parameters that are sharded.
        device: of this rank.
        group: of all ranks.

    Raises:
        ValueError: nothing is left.
    """
    if device.type != "cuda":
        return None
    sharded = set(map(id, tables))
    dense = sum(p.nbytes for p in root.parameters() if id(p) not in sharded)
    buffers = sum(buffer.nbytes for buffer in root.buffers())
    # each with a gradient, its place in a bucket of DDP, and two states of Adam
    free = torch.cuda.get_device_properties(device).total_memory - 5 * dense - buffers
    least = torch.tensor(free, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    if least <= 0:
        raise ValueError(
            f"a dense part of {dense / 2**30:.1f} GiB, with gradients and optimizer states, leaves no memory for embedding "
            "tables on the smallest GPU: pass FreeScaleStrategy(plan=...), a plan or a planner that knows their memory"
        )
    return int(least)


def row_wise_planner(
    collections: list[Collection],
    device: torch.device,
    world_size: int,
    local_world_size: int,
    memory: int | None = None,
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner, held to row-wise sharding with the optimizer fused into backward.

    EmbeddingBagCollections may be sharded table-wise as well: on CPU, TorchRec plans nothing else for them. Tables too small
    to give every rank a row are sharded table-wise.

    Args:
        collections: whose tables are planned.
        device: the kind of device.
        world_size: ranks.
        local_world_size: ranks per node.
        memory: bytes of a GPU that tables may take, less 15 % for activations; TorchRec's default if not given.

    Raises:
        ValueError: a table with managed collisions, which TorchRec shards row-wise only, is too small for that.
    """
    constraints = {
        table.name: ParameterConstraints(sharding_types=_types(table, collection, world_size), compute_kernels=["fused"])
        for collection in collections
        for table in collection.tables
    }
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local_world_size, hbm_cap_bytes=memory),
        kernel_config=KernelConfig(compute_device=device.type),
    )
    # 15 % is TorchRec's own default share; its default estimate of the dense part warns that it is unreliable
    return EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, storage_reservation=FixedPercentageStorageReservation(0.15)
    )


def check_tables(collection: Collection, overlap: bool) -> None:
    """Check that TorchRec's kernels can hold the tables of a collection and update them as the unsharded module's.

    Args:
        collection: unsharded.
        overlap: whether the overlap engine will run, which pads widths and follows the unsharded module.

    Raises:
        ValueError: names the table and the fix.
    """
    for table in collection.tables:
        of_collection = f"table {table.name!r} of embedding collection {collection.path!r}"
        if table.data_type != DataType.FP32:
            raise ValueError(
                f"{of_collection} has data_type={table.data_type.name}: FBGEMM keeps its optimizer state in float32 and rounds "
                "otherwise than torch, so it would not be trained as unsharded. Use DataType.FP32"
            )
        if table.dim != table.kernel_dim and (collection.managed or not (overlap or collection.embedding)):
            where = "managed collisions" if collection.managed else 'exchange="torchrec"'
            raise ValueError(
                f"{of_collection} has embedding_dim={table.dim}, but FBGEMM's tables need a multiple of 4, and tables are not "
                f"padded with {where}: use embedding_dim={table.kernel_dim}"
            )
        if collection.weighted and table.mean and overlap:
            raise ValueError(
                f"{of_collection} pools weighted rows by the mean, which the unsharded module refuses: pool by the sum"
            )


def padded_plan(collection: Collection, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan for the tables of a collection with the width of their kernels; split columns stay as they are."""
    padded = {}
    for table in collection.tables:
        padded[table.name] = each = copy.deepcopy(plan[table.name])
        for shard in each.sharding_spec.shards if table.dim != table.kernel_dim and each.sharding_spec is not None else ():
            if shard.shard_sizes[1] == table.dim:
                shard.shard_sizes[1] = table.kernel_dim
    return padded


def check_plan(collection: Collection, plan: Mapping[str, Any], optimizers: Mapping[str, TableOptimizer]) -> None:
    """Check that a plan can be trained and checkpointed as if the tables were unsharded.

    Raises:
        ValueError: names the table, what the plan says of it, and the fix.
    """
    for table in collection.tables:
        kind, kernel = plan[table.name].sharding_type, plan[table.name].compute_kernel
        optimizer = optimizers[table.key].fused_class.__name__
        given = f"the sharding plan gives table {table.name!r}"
        both = f"{given} sharding_type={kind!r} and compute_kernel={kernel!r}"
        if collection.managed and kind != "row_wise":
            raise ValueError(
                f"{given} sharding_type={kind!r}, but TorchRec shards tables with managed collisions row-wise only: use "
                "row_wise"
            )
        if collection.managed and kernel == "fused_uvm_caching":
            raise ValueError(
                f'{given} compute_kernel={kernel!r}, whose cache would keep the rows of evicted ids: use "fused" or "fused_uvm"'
            )
        if kernel not in _FUSED or kind == "data_parallel":
            raise ValueError(
                f'{both}: tables are updated by fused kernels, use compute_kernel="fused" and a type other than data_parallel'
            )
        rowwise = "rowwise" in optimizer.lower()
        if ("column" in kind or "grid" in kind) and rowwise:
            raise ValueError(
                f"the sharding plan splits the columns of table {table.name!r} (sharding_type={kind!r}), but its optimizer "
                f"{optimizer} keeps one state per row: use row_wise or table_wise"
            )
        if table.dim != table.kernel_dim and rowwise:
            raise ValueError(
                f"table {table.name!r} has embedding_dim={table.dim}, which is padded to {table.kernel_dim} columns, but its "
                f"optimizer {optimizer} averages over all columns of a row: use embedding_dim={table.kernel_dim}, or Adagrad"
            )
        widths = sorted({int(shard.shard_sizes[1]) for shard in plan[table.name].sharding_spec.shards})
        if len(widths) > 1 or widths[0] % 4:
            raise ValueError(
                f"the sharding plan splits the columns of table {table.name!r} into shards of {widths} columns: use shards of "
                "one width that is a multiple of 4"
            )


def _types(table: Table, collection: Collection, world_size: int) -> list[str]:
    block = -(-table.rows // world_size)
    if (world_size - 1) * block >= table.rows:  # a rank would get no row, which FBGEMM's kernels do not take
        if collection.managed:
            raise ValueError(
                f"table {table.name!r} of collection {collection.path!r} has managed collisions and num_embeddings="
                f"{table.rows}, which leaves one of {world_size} ranks without rows: give it more"
            )
        return ["table_wise"]
    return ["row_wise", "table_wise"] if collection.pooled else ["row_wise"]
