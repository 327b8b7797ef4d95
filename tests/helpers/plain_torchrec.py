"""The loop a careful user would write by hand: plain TorchRec, plain DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.helpers.recommender import OPTIMIZERS

Parts = dict[str, tuple[EmbeddingCollection, Any]]
FUSED = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-10}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-10}),
}


def train(net: Any, optimizer: str, batches: Any, parts: Parts | None = None) -> dict[str, Any]:
    """Losses, whole weights and whole optimizer states (rank 0) after one pass over ``batches``.

    ``parts`` are the modules of ``net`` that are sharded, by name: the collection with the tables, and the sharder.
    """
    kind, arguments = FUSED[optimizer]
    parts, world, plans = parts or {"embeddings": (net.embeddings, EmbeddingCollectionSharder())}, dist.get_world_size(), {}
    for name, (collection, sharder) in parts.items():
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
        sharders=[sharder for _, sharder in parts.values()],
        # DDP's own default; a static graph has other buckets, and with them another order of summation at 3 ranks
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    assert isinstance(model._dmp_wrapped_module, DistributedDataParallel)
    dense = {name: p for name, p in model.named_parameters() if name.startswith("hidden")}
    step = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: OPTIMIZERS[optimizer](params))]
    )
    losses = []
    torch.manual_seed(dist.get_rank())  # managed collisions draw the rows of new ids
    for batch in batches.batches:
        step.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch["features"]), batch["label"])
        loss.backward()
        step.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": _whole(model.state_dict()), "states": _states(model)}


def _states(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    state = model.fused_optimizer.state_dict()["state"]
    return _whole({key: value for table in state.values() for key, value in table.items()})


def _whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: _gather(value) if hasattr(value, "local_shards") else value.detach() for key, value in state.items()}


def _gather(value: Any) -> torch.Tensor:
    whole = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
    value.gather(0, whole, dtype=value.dtype)
    return whole if whole is not None else torch.empty(0)
