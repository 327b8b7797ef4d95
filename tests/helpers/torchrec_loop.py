"""A loop of plain TorchRec with sequences, bags and a data-parallel table, and the LightningModule that replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale._runtime.object_gather import gather_objects
from tests.helpers.recommender import DIM, Net, Recommender, Samples, collate

SHARE = 4
"""The number of samples of a rank of the loop in a step."""
WORDS, TAGS = 30, 5


class BagNet(Net):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"word": WORDS, "tag": TAGS}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
                for name, rows in sizes.items()
            ]
        )
        self.over = nn.Linear(2 * DIM, 1, bias=False)
        for name in ("embeddings.embeddings.item", "embeddings.embeddings.cat", "bags.embedding_bags.word"):
            apply_optimizer_in_backward(RowWiseAdagrad, self.get_submodule(name).parameters(), {"lr": 0.1, "eps": 1e-8})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        bags = self.bags(KeyedJaggedTensor(["word", "tag"], *_bags(features)))
        return super().forward(features) + self.over(torch.tanh(bags.values())).squeeze(1)


def _bags(features: KeyedJaggedTensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    words, tags = features["history"], features["category"]
    values = torch.cat([words.values() % WORDS, tags.values() % TAGS])
    return values, None, torch.cat([words.lengths(), tags.lengths()])


class Ported(Recommender):
    """The LightningModule in place of the loop. The tables have optimizers in backward, except the one for tags."""

    kind = BagNet

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _dense_optimizer(p for p in self.parameters() if not hasattr(p, "_optimizer_classes"))


def _dense_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, eps=1e-8)


def batch(step: int, ranks: Iterable[int]) -> dict[str, Any]:
    samples = Samples()
    return collate([samples[(2 * step + rank) * SHARE + index] for rank in ranks for index in range(SHARE)])


def loop(steps: int, after: int, save: Callable[[DistributedModelParallel, CombinedOptimizer], None]) -> dict[str, Any]:
    """Train on two ranks, call ``save`` after some of the steps, and return the whole weights and states on rank 0."""
    torch.manual_seed(0)
    net, world = BagNet(), dist.get_world_size()
    where = {"local_size": world, "world_size": world, "device_type": "cpu"}
    sequences, bags = EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()
    tables = {"item": row_wise(compute_kernel="fused"), "cat": table_wise(rank=1, compute_kernel="fused")}
    bag_tables = {"word": row_wise(compute_kernel="fused"), "tag": data_parallel()}
    plan = {
        "embeddings": construct_module_sharding_plan(net.embeddings, tables, sharder=sequences, **where),
        "bags": construct_module_sharding_plan(net.bags, bag_tables, sharder=bags, **where),
    }
    model = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan),
        sharders=[sequences, bags],
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer([("fused", model.fused_optimizer), ("dense", KeyedOptimizerWrapper(dense, _dense_optimizer))])
    for step in range(steps):
        if step == after:
            save(model, optimizer)
        optimizer.zero_grad()
        given = batch(step, [dist.get_rank()])
        torch.nn.functional.mse_loss(model(given["features"]), given["label"]).backward()
        optimizer.step()
    return {"weights": gathered(model.state_dict()), "states": gathered(optimizer.state_dict())["state"]}


def gathered(state: Any) -> Any:
    """Return a nested state dict with whole tensors on every rank. Collective.

    TorchRec lists the state of a table only on the ranks that own a part of it.
    """
    found = {}
    for name in dict.fromkeys(name for names in gather_objects(list(state)) for name in names):
        mine = state.get(name)
        found[name] = gathered(mine or {}) if any(gather_objects(isinstance(mine, dict))) else _whole(mine)
    return found


def _whole(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        value = tuple(value.size()), [(each.metadata.shard_offsets, each.tensor.detach()) for each in value.local_shards()]
    of_ranks = [each for each in gather_objects(value) if each is not None]
    if not isinstance(of_ranks[0], tuple):
        return of_ranks[0]
    whole = torch.empty(of_ranks[0][0])
    for _, shards in of_ranks:
        for offsets, part in shards:
            whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape))] = part
    return whole
