"""The loop that plain TorchRec users write for managed collisions: DistributedModelParallel, and DDP for the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.helpers.managed_tables import ManagedBatches, ManagedNet
from tests.helpers.plain_torchrec import FUSED, _states, _whole
from tests.helpers.recommender import OPTIMIZERS


def _reset_on_cpu(kernel: Any, pruned_indices: torch.Tensor, logical_table_ids: torch.Tensor, **rest: Any) -> None:
    """What FBGEMM has for CUDA only: the row-wise states of some rows of one table become zero."""
    table = int(logical_table_ids[0])
    if kernel.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        kernel.momentum1_host[pruned_indices + int(kernel.momentum1_physical_offsets[table])] = 0


def train(net: ManagedNet, optimizer: str, batches: ManagedBatches) -> dict[str, Any]:
    """Losses, remapped ids, and the whole state dict and optimizer states (rank 0) after one pass over ``batches``."""
    setattr(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", _reset_on_cpu)  # noqa: B010
    kind, arguments = FUSED[optimizer]
    world, plans = dist.get_world_size(), {}
    sharders: list[Any] = [ManagedCollisionEmbeddingCollectionSharder(), EmbeddingCollectionSharder()]
    inner = {"items": net.items._embedding_module, "categories": net.categories}
    for (name, collection), sharder in zip(inner.items(), sharders):
        apply_optimizer_in_backward(kind, collection.parameters(), dict(arguments))
        plans[name] = construct_module_sharding_plan(
            getattr(net, name),
            {config.name: row_wise(compute_kernel="fused") for config in collection.embedding_configs()},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
    model = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plans),
        sharders=sharders,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    dense = {name: p for name, p in model.named_parameters() if name.startswith("hidden")}
    step = CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda p: OPTIMIZERS[optimizer](p))])
    losses = []
    torch.manual_seed(dist.get_rank())  # rows of new ids are drawn anew
    for batch in batches.batches:
        step.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch["features"]), batch["label"])
        loss.backward()
        step.step()
        losses.append(loss.item())
    return {"losses": losses, "remapped": net.remapped, "weights": _whole(model.state_dict()), "states": _states(model)}
