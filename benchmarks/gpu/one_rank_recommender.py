"""Module, batches and training loop of plain TorchRec that part_numbers compares with the strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

CATEGORIES = 13
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-10}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-10}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-8}),
}
Batch = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Rows of the item table, width of a row, samples of a batch, items of the longest history, and optimizer steps."""

    items: int
    dim: int
    samples: int
    longest: int
    steps: int


@dataclass
class Run:
    """The results of a run, on the CPU; ``states`` are those of the optimizer, if requested."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)


class Net(nn.Module):
    """Compares a history with a candidate by attention over the jagged part of the batch, padded."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tables = [
            EmbeddingConfig(
                name="item", num_embeddings=size.items, embedding_dim=size.dim, feature_names=["history", "candidate"]
            ),
            EmbeddingConfig(name="category", num_embeddings=CATEGORIES, embedding_dim=size.dim, feature_names=["category"]),
        ]
        self.embeddings = EmbeddingCollection(tables=self.tables)
        self.longest = size.longest
        self.hidden = nn.Sequential(  # without biases: RowWiseAdagrad takes matrices only
            nn.Linear(size.dim, 2 * size.dim, bias=False), nn.Tanh(), nn.Linear(2 * size.dim, size.dim, bias=False)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        found = self.embeddings(batch["features"])
        history = found["history"].to_padded_dense(self.longest)
        weights = torch.softmax(history @ history.transpose(1, 2) / history.shape[2] ** 0.5, dim=2)
        user = self.hidden((weights @ history).mean(dim=1) + found["category"].values())
        return nn.functional.mse_loss((user * found["candidate"].values()).sum(dim=1), batch["label"])


class Recommender(L.LightningModule):
    """Trains :class:`Net` and records its losses."""

    def __init__(self, size: Size, optimizer: str) -> None:
        super().__init__()
        self.net, self.optimizer = Net(size), optimizer
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return and record the loss."""
        loss = self.net(batch)
        self.losses.append(loss.detach())  # not its number, for which the host would wait
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Look up rows without gradients."""
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for the tables and the other parameters."""
        kind, arguments = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), **arguments)


class Batches:
    """A loader that supports resuming within an epoch."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches so far."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after that number of batches."""
        self.position = state["position"]


def batches(size: Size, device: torch.device, seed: int = 0) -> list[Batch]:
    """Return one batch for each step, in pinned memory if the device is a GPU; a few items are in most histories."""
    popular = 1 / torch.arange(1, size.items + 1) ** 1.1
    return [_batch(size, popular, 1000 * seed + step, device.type == "cuda") for step in range(size.steps)]


def _batch(size: Size, popular: Tensor, seed: int, pin: bool) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(size.samples, generator=draw) ** 4 * size.longest).int() + 1
    lengths = torch.cat([lengths, torch.ones(2 * size.samples, dtype=torch.int32)])  # candidate and category: one each
    items = torch.multinomial(popular, int(lengths[: -size.samples].sum()), replacement=True, generator=draw)
    categories = torch.randint(0, CATEGORIES, (size.samples,), generator=draw)
    ids = KeyedJaggedTensor(["history", "candidate", "category"], torch.cat([items, categories]), lengths=lengths)
    label = torch.rand(size.samples, generator=draw)
    return {"features": ids.pin_memory(), "label": label.pin_memory()} if pin else {"features": ids, "label": label}


def train_plain(size: Size, optimizer: str, data: list[Batch], device: torch.device, autocast: bool = False) -> Run:
    """Train as a careful user would write it by hand: plain TorchRec, plain DDP."""
    torch.manual_seed(0)
    net = Net(size)
    kind, arguments = OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(kind, net.embeddings.parameters(), dict(arguments))
    sharder = EmbeddingCollectionSharder()
    how = {config.name: row_wise(compute_kernel="fused") for config in net.tables}
    plan = construct_module_sharding_plan(
        net.embeddings, how, sharder=sharder, local_size=1, world_size=1, device_type=device.type
    )
    model = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),  # as Lightning's DDP has it
    )
    dense = {name: parameter for name, parameter in model.named_parameters() if name.startswith("hidden")}
    step = CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda given: kind(given, **arguments))])
    losses = []
    for batch in data:
        step.zero_grad()
        moved = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
            loss = model(moved)
        loss.backward()
        step.step()
        losses.append(loss.detach())
    return Run([loss.item() for loss in losses], {name: _whole(each) for name, each in model.state_dict().items()})


def _whole(value: Any) -> Tensor:
    """Return a parameter, or a whole table, which one rank holds."""
    if hasattr(value, "local_shards"):
        (shard,) = value.local_shards()
        value = shard.tensor
    return value.detach().cpu().clone()
