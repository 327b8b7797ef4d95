"""Plan the parts of tables that each rank holds, check plans, and place the rows of row-wise tables on ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embeddings.collections import Collection, Table
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.shards import shards_of

_TRAINED = (DataType.FP32, DataType.FP16, DataType.BF16)
_FUSED = ("fused", "fused_uvm", "fused_uvm_caching")
_OF_SEQUENCES = ("row_wise", "table_wise", "column_wise", "data_parallel")  # TorchRec's types for an EmbeddingCollection


def memory_for_tables(root: nn.Module, tables: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup) -> int | None:
    """Return the GPU memory in bytes that the dense part and its optimizer leave free, the minimum of all ranks. Collective.

    Without this value TorchRec's planner assumes 32 GB. The result is None on the CPU.
    """
    if device.type != "cuda":
        return None
    sharded = set(map(id, tables))
    dense = sum(p.nbytes for p in root.parameters() if id(p) not in sharded)
    buffers = sum(buffer.nbytes for buffer in root.buffers())
    # each parameter has a gradient, a place in a DDP bucket and two states of Adam
    free = torch.cuda.get_device_properties(device).total_memory - 5 * dense - buffers
    least = torch.tensor(free, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    if least <= 0:
        raise ValueError(
            f"a dense part of {dense / 2**30:.1f} GiB, with gradients and optimizer states, leaves no memory for embedding "
            "tables on the smallest GPU. Pass a plan, or a planner that knows the memory, as FreeScaleStrategy(plan=...)."
        )
    return int(least)


def row_wise_planner(
    collections: list[Collection],
    device: torch.device,
    world_size: int,
    local_world_size: int,
    memory: int | None = None,
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner, restricted to row-wise sharding with the optimizer fused into backward.

    EmbeddingBagCollections may also be sharded table-wise, because TorchRec supports only this on the CPU. Tables with too few
    rows for all ranks are sharded table-wise. ``memory`` is the GPU memory for tables in bytes, including 15 % for activations.
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
    # 15 % is TorchRec's default share. TorchRec warns that its default estimate of the dense part is unreliable
    return EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, storage_reservation=FixedPercentageStorageReservation(0.15)
    )


def check_tables(collection: Collection, overlap: bool, device: torch.device) -> None:
    """Raise a ValueError if TorchRec cannot hold a collection's tables on ``device`` and update them.

    If ``overlap``, the overlap engine will run. It pads widths and computes like the unsharded module.
    """
    for table in collection.tables:
        of_collection = f"table {table.name!r} of embedding collection {collection.path!r}"
        if table.data_type not in _TRAINED:
            raise ValueError(
                f"{of_collection} has data_type={table.data_type.name}, which cannot be trained. Use DataType.FP32, FP16 or "
                "BF16."
            )
        if table.data_type == DataType.BF16 and device.type == "cpu" and (collection.managed or not overlap):
            raise ValueError(
                f"{of_collection} has data_type=BF16, which TorchRec does not support on the CPU. Tables with managed "
                'collisions and overlap="torchrec" need DataType.FP32 or FP16 there.'
            )
        if table.dim != table.kernel_dim and (collection.managed or not (overlap or collection.embedding)):
            where = "managed collisions" if collection.managed else 'overlap="torchrec"'
            raise ValueError(
                f"{of_collection} has embedding_dim={table.dim}. FBGEMM's tables need a multiple of 4, and tables are not "
                f"padded with {where}. Use embedding_dim={table.kernel_dim}."
            )
        if collection.weighted and table.mean:
            raise ValueError(
                f"{of_collection} pools weighted rows by the mean, which the unsharded module does not support. Use "
                "PoolingType.SUM to pool by the sum."
            )


def padded_plan(collection: Collection, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with the kernels' widths and fused kernels; shards with a part of the columns do not change.

    TorchRec's functions, such as ``row_wise()``, write "dense" for tables without an optimizer. Some cannot write "fused".
    """
    padded = {}
    for table in collection.tables:
        padded[table.name] = each = copy.deepcopy(plan[table.name])
        if each.compute_kernel == "dense" and each.sharding_type != "data_parallel":
            each.compute_kernel = "fused"
        for shard in each.sharding_spec.shards if table.dim != table.kernel_dim and each.sharding_spec is not None else ():
            if shard.shard_sizes[1] == table.dim:
                shard.shard_sizes[1] = table.kernel_dim
    return padded


def check_plan(
    collection: Collection, plan: Mapping[str, Any], optimizers: Mapping[str, TableOptimizer], overlap: bool = False
) -> None:
    """Raise a ValueError if tables that are sharded by a plan cannot be trained and saved like unsharded tables."""
    for table in collection.tables:
        kind = plan[table.name].sharding_type
        optimizer = optimizers[table.key].fused_class.__name__
        _check_options(collection, table, plan[table.name], overlap)
        rowwise = "rowwise" in optimizer.lower()
        if ("column" in kind or "grid" in kind) and rowwise:
            raise ValueError(
                f"the sharding plan splits the columns of table {table.name!r} (sharding_type={kind!r}), but its optimizer "
                f"{optimizer} keeps one state per row. Use row_wise or table_wise."
            )
        if table.dim != table.kernel_dim and rowwise:
            raise ValueError(
                f"table {table.name!r} has embedding_dim={table.dim}, which is padded to {table.kernel_dim} columns, but its "
                f"optimizer {optimizer} averages over all columns of a row. Use embedding_dim={table.kernel_dim}, or Adagrad."
            )
        widths = sorted({int(shard.shard_sizes[1]) for shard in plan[table.name].sharding_spec.shards})
        if len(widths) > 1 or widths[0] % 4:
            raise ValueError(
                f"the sharding plan splits the columns of table {table.name!r} into shards of {widths} columns. Use one width "
                "that is a multiple of 4."
            )


def _check_options(collection: Collection, table: Table, planned: Any, overlap: bool) -> None:
    kind, kernel, output = planned.sharding_type, planned.compute_kernel, planned.output_dtype
    given = f"the sharding plan gives table {table.name!r} of embedding collection {collection.path!r}"
    of, types = ("managed collisions", _OF_SEQUENCES[:1]) if collection.managed else ("an EmbeddingCollection", _OF_SEQUENCES)
    if not collection.pooled and kind not in types:
        raise ValueError(f"{given} sharding_type={kind!r}, but TorchRec shards tables of {of} only as {', '.join(types)}.")
    if collection.managed and kernel == "fused_uvm_caching":
        raise ValueError(
            f'{given} compute_kernel={kernel!r}, but its cache would keep the rows of evicted ids. Use "fused" or "fused_uvm".'
        )
    if kernel not in _FUSED or kind == "data_parallel":
        raise ValueError(
            f"{given} sharding_type={kind!r} and compute_kernel={kernel!r}, but fused kernels update the tables. Use one of "
            f"the compute kernels {_FUSED}. For data_parallel, pass the planner's plan, plan=planner.plan(module, sharders)."
        )
    if overlap and not collection.managed and output not in (None, DataType.FP32):
        raise ValueError(
            f"{given} output_dtype={output.name}, but an overlapped exchange returns FP32. Convert the results in the module, "
            'or use FreeScaleStrategy(overlap="torchrec"). For 16-bit messages, use FreeScaleStrategy(wire=...).'
        )


def _types(table: Table, collection: Collection, world_size: int) -> list[str]:
    block = -(-table.rows // world_size)
    if (world_size - 1) * block >= table.rows:  # FBGEMM's kernels do not support a rank without rows
        if collection.managed:
            raise ValueError(
                f"table {table.name!r} of collection {collection.path!r} has managed collisions and num_embeddings="
                f"{table.rows}, which leaves one of {world_size} ranks without rows. Increase num_embeddings."
            )
        return ["table_wise"]
    return ["row_wise", "table_wise"] if collection.pooled else ["row_wise"]


def row_orders(collection: Collection, plan: Mapping[str, Any], ranks: int) -> dict[str, RowOrder]:
    """Return the order of the rows of each table, by name. Each owner has one block of the ordered rows.

    Neighbouring ids are spread over the ranks. Tables that are not row-wise keep the order of their ids. So do tables with
    managed collisions, whose map chooses the row of an id.
    """
    orders = {}
    for table in collection.tables:
        hashed = ranks > 1 and plan[table.name].sharding_type == "row_wise" and not collection.managed
        orders[table.name] = RowOrder.hashed(table.rows) if hashed else RowOrder(table.rows)
    return orders


def place_rows(collection: Collection, module: Any, orders: Mapping[str, RowOrder]) -> None:
    """Make TorchRec's sharded ``module`` look up rows, and load them from an unsharded state dict, by their positions.

    Ids are replaced by positions after TorchRec has sorted them by table, because a feature may look up several tables. The
    results for the caller contain the original ids.
    """
    padded = any(table.dim != table.kernel_dim for table in collection.tables)
    if all(order.by_id for order in orders.values()) and not padded:
        return
    handle = module.register_load_state_dict_pre_hook(partial(_read_whole_tables, collection))
    module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # before TorchRec's hook, which reads a block of rows
    shardings = module._embedding_shardings if collection.pooled else module._sharding_type_to_sharding.values()
    for sharding in shardings:
        if isinstance(sharding, BaseRwEmbeddingSharding):  # excludes sharding within a node and grids
            of_features = [orders[table.name] for table in sharding.embedding_tables() for _ in table.feature_names]
            # TorchRec calls it in the first lookup
            sharding.create_input_dist = partial(_placing, sharding.create_input_dist, of_features)


def _read_whole_tables(collection: Collection, module: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    found: dict[str, Tensor] = {}
    for shard in shards_of(collection, module):
        table = shard.table
        key = prefix + table.key.removeprefix(f"{collection.path}.")
        whole: Any = state_dict.get(key)
        is_whole = type(whole) in (Tensor, nn.Parameter) and whole.shape == (table.rows, table.dim)
        if is_whole and (not shard.order.by_id or table.dim != table.kernel_dim):
            # TorchRec reads only this rank's rows of it
            in_order = found.setdefault(key, whole.new_zeros(table.rows, table.kernel_dim))
            shard.read(whole.detach(), into=in_order[shard.rows, shard.columns])
    state_dict.update(found)


def _placing(create: Any, orders: list[RowOrder], *arguments: Any, **options: Any) -> nn.Module:
    input_dist: nn.Module = create(*arguments, **options)
    largest = max(order.rows for order in orders) - 1
    input_dist.register_forward_pre_hook(partial(_place_ids, orders[:1] if len(set(orders)) == 1 else orders, largest))
    return input_dist


def _place_ids(orders: list[RowOrder], largest: int, module: nn.Module, args: tuple[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Replace ids by positions before TorchRec sends them. ``orders`` has the order of each feature, or one for all."""
    (features,) = args
    ids, varies = features.values(), features.variable_stride_per_key()
    # the host may wait for the lengths here. It does not wait for them again in TorchRec's next lines
    parts = ids.split(features.length_per_key()) if len(orders) > 1 else [ids]
    placed = [order.positions(part) for order, part in zip(orders, parts)]
    positions = torch.cat(placed) if len(placed) > 1 else placed[0]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=positions.to(ids.dtype) if largest <= torch.iinfo(ids.dtype).max else positions,  # keep the message's size
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        length_per_key=features.length_per_key_or_none(),
    )
