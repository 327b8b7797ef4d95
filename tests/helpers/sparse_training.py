"""What TorchRec users train: tables sharded in all ways, their optimizer in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

KEYS = ["table", "rows", "columns", "copies"]
BATCH, ROWS, DIM = 4, 40, 8


class Net(nn.Module):
    """Pooled embeddings of four tables and the embedding sequences of two."""

    def __init__(self) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        shape = {"embedding_dim": DIM, "num_embeddings": ROWS}
        bags = [EmbeddingBagConfig(name=f"bag_{key}", feature_names=[key], **shape) for key in KEYS]
        sequences = [EmbeddingConfig(name=f"sequence_{key}", feature_names=[key], **shape) for key in KEYS[:2]]
        self.pooled = EmbeddingBagCollection(device=cpu, tables=bags)
        self.sequences = EmbeddingCollection(device=cpu, tables=sequences)
        self.over_pooled, self.over_sequences = nn.Linear(DIM * len(KEYS), 1), nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found = self.sequences(features)
        pooled = self.over_pooled(self.pooled(features).values()).square().mean()
        loss = pooled + sum(self.over_sequences(found[key].values()).square().sum() for key in KEYS[:2]) / 10
        return loss, loss.detach()


def build(group: Any) -> DistributedModelParallel:
    """Over a group of all ranks; the same weights for any."""
    torch.manual_seed(7)
    net, size = Net(), group.size()
    for module in (net.pooled, net.sequences):
        apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.05, "eps": 1e-8})
    ways: dict[str, Any] = {"table": table_wise(rank=size - 1), "rows": row_wise(), "copies": data_parallel()}
    ways["columns"] = column_wise(ranks=[0, 1])
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plans = {}
    for name, kind, sharder in (("pooled", "bag", sharders[0]), ("sequences", "sequence", sharders[1])):
        module = getattr(net, name)
        chosen = {f"{kind}_{key}": ways[key] for key in (KEYS if kind == "bag" else KEYS[:2])}
        plans[name] = construct_module_sharding_plan(
            module, chosen, sharder=sharder, local_size=size, world_size=size, device_type="cpu"
        )
    return DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan(plans),
        sharders=sharders,
    )


def batches(steps: int) -> list[KeyedJaggedTensor]:
    """This rank's, with empty bags and one key without ids in every other batch."""
    draw, made = torch.Generator().manual_seed(5 + dist.get_rank()), []
    for step in range(steps):
        lengths = torch.randint(0, 6, (len(KEYS), BATCH), generator=draw)
        lengths[1, 0] += 1
        lengths[0] *= step % 2
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
        made.append(KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths.reshape(-1)))
    return made


def train(group: Any, pipelined: bool, steps: int = 5) -> dict[str, Any]:
    """Losses, this rank's parts of all weights, and those of the optimizer's state."""
    model = build(group)
    dense = [parameter for name, parameter in model.named_parameters() if "over" in name or "copies" in name]
    optimizer, losses = torch.optim.SGD(dense, lr=0.05), []
    if pipelined:
        pipeline, left = TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), iter(batches(steps))
        losses = [pipeline.progress(left).item() for _ in range(steps)]
    else:
        for batch in batches(steps):
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    states = model.fused_optimizer.state_dict()["state"]
    parts = {f"{table}.{name}": value for table, kept in states.items() for name, value in kept.items()}
    return {"losses": losses, "weights": _mine(model.state_dict()), "states": _mine(parts)}


def _mine(state: dict[str, Any]) -> dict[str, list[Tensor]]:
    return {
        name: [shard.tensor.detach() for shard in value.local_shards()] if hasattr(value, "local_shards") else [value.detach()]
        for name, value in state.items()
        if isinstance(value, Tensor) or hasattr(value, "local_shards")
    }
