"""Methods to train a row-wise sharded table that the overlap benchmark compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from overlap_wire import Wire
from overlap_workload import Batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.embeddings.collections import find_collections
from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine, hot_route
from lightning_freescale.embeddings.overlap.hot_rows import HotList
from lightning_freescale.embeddings.overlap.split_backward import after_the_others
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds
from lightning_freescale.embeddings.row_order import RowOrder
from lightning_freescale.embeddings.sharding import TableSharding

CPU = torch.device("cpu")
ADAGRAD = {"lr": 0.1, "eps": 1e-10}


weights_share = 0.15
"""Of a step's compute, the gradients of linear layers' weights: ``split_backward.py`` measures it."""


class _Compute(torch.autograd.Function):
    """The device's work: a third of the seconds in forward, after the lookup, the rest before the lookup's backward.

    The work for the gradient that goes to ``late`` is excluded.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, late: Tensor | None, seconds: float) -> Tensor:
        ctx.seconds = seconds * (2 / 3 - (weights_share if late is not None else 0))
        time.sleep(seconds / 3)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], gradients[0] if ctx.needs_input_grad[1] else None, None


class _WeightGradients(torch.autograd.Function):
    """The part of the device's work that no exchange waits for."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds * weights_share, weight.shape
        return rows.new_empty(1).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        time.sleep(ctx.seconds)
        return None, gradients[0].new_zeros(ctx.shape), None


@torch.fx.wrap
def compute(rows: Tensor, inverse: Tensor | None, seconds: float) -> Tensor:
    """Return the row of each item, after the device's work."""
    return _Compute.apply(rows if inverse is None else rows.index_select(0, inverse), None, seconds)


def compute_split(rows: Tensor, seconds: float, late_seconds: float, weight: Tensor) -> Tensor:
    """Compute as a split backward does: the gradients of weights such as ``weight`` come after those of the rows.

    All late gradients of micro-batches come with the last one: ``late_seconds`` is the compute of those whose weights come with
    this one.
    """
    late = after_the_others(_WeightGradients.apply(rows.detach(), weight, late_seconds), 1)
    return _Compute.apply(rows, late, seconds)


class Recommender(nn.Module):
    """A table of item embeddings and a small dense part, which gives each row a different gradient."""

    def __init__(self, rows: int, dim: int, seconds: float) -> None:
        super().__init__()
        config = EmbeddingConfig(num_embeddings=rows, embedding_dim=dim, name="item", feature_names=["item"])
        self.items: nn.Module = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.dense = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, 1))
        self.seconds = self.late_seconds = seconds

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss twice, because TorchRec's pipeline expects a loss and a result."""
        rows = compute(self.items(batch.features)["item"].values(), batch.inverse, self.seconds)
        loss = self.dense(rows).square().mean()
        return loss, loss


class SplitRecommender(Recommender):
    """The recommender under a split backward."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss twice."""
        rows = self.items(batch.features)["item"].values()
        rows = compute_split(rows, self.seconds, self.late_seconds, self.dense[0].weight)
        loss = self.dense(rows).square().mean()
        return loss, loss


class PlainRecommender(Recommender):
    """The recommender with a plain ``nn.Embedding``."""

    def __init__(self, rows: int, dim: int, seconds: float) -> None:
        super().__init__(rows, dim, seconds)
        self.items = nn.Embedding(rows, dim, device=torch.device("meta"))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss twice."""
        rows = compute(self.items(batch.features.values()), batch.inverse, self.seconds)
        loss = self.dense(rows).square().mean()
        return loss, loss


class LocalRows(nn.Module):
    """A replacement for the table without any exchange."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return one row for each id."""
        rows = torch.zeros(len(features.values()), self.dim, requires_grad=True)
        return {"item": JaggedTensor(rows, lengths=features.lengths())}


class Plain:
    """A loop over a model that makes its exchanges itself."""

    def __init__(self, model: nn.Module, wire: Wire, deduplicate: bool = False) -> None:
        self.model, self.wire, self.deduplicate = model, wire, deduplicate
        dense = [parameter for name, parameter in model.named_parameters() if ".dense." in f".{name}"]
        self.optimizer = torch.optim.SGD(dense, lr=1e-3)

    def steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Train one step per batch."""
        ready = [batch.deduplicated() if self.deduplicate else batch for batch in batches]
        with self.wire.patched():
            for batch in ready:
                self.optimizer.zero_grad()
                self.model(batch)[0].backward()
                self.optimizer.step()
                yield

    def sent(self) -> dict[str, float]:
        """Return the bytes sent to other ranks since the start."""
        return {"bytes": self.wire.sent}

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class PlainInMicroBatches(Plain):
    """The plain loop with each batch cut into micro-batches; compute is divided by the number of ids."""

    def __init__(self, model: nn.Module, wire: Wire, micro_batches: int) -> None:
        super().__init__(model, wire)
        self.count = micro_batches

    def steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Train one step per batch."""
        for parts in [batch.in_micro_batches(self.count) for batch in batches]:
            self.optimizer.zero_grad()
            for index, part in enumerate(parts):
                with nullcontext() if index == self.count - 1 else self.model.no_sync():
                    self.model(part)[0].backward()
            self.optimizer.step()
            yield


class Pipelined(Plain):
    """TorchRec's pipeline, which exchanges the ids of the next batch while this one trains."""

    def __init__(self, model: nn.Module, wire: Wire) -> None:
        super().__init__(model, wire)
        self.pipeline = TrainPipelineSparseDist(model, self.optimizer, CPU)

    def steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Train one step per batch."""
        source = iter(batches)
        with self.wire.patched():
            for _ in batches:
                self.pipeline.progress(source)
                yield


class Ours:
    """The engine, which waits only for rows that the previous batch also updates; ``options`` are its other options."""

    def __init__(self, model: Recommender, **options: Any) -> None:
        plain = isinstance(model.items, nn.Embedding)
        sharding = TableSharding(model, CPU, found=find_collections(model, {model.items} if plain else ()))
        self._ids: Callable[[Any], Any] = (lambda kjt: EmbeddingIds("items", kjt.values())) if plain else (lambda kjt: kjt)
        names = list(sharding.parameters)
        optimizers = {name: TableOptimizer(RowWiseAdagrad, dict(ADAGRAD)) for name in names}
        world = dist.get_world_size()
        with patch.object(RowOrder, "hashed", RowOrder):  # the same owners as in the variants of plain TorchRec
            tables = sharding.shard(group=dist.new_group(), local_world_size=world, optimizers=optimizers)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.dense.parameters(), lr=1e-3)
        self.engine = OverlapEngine(tables, dedup=True, timeout=timedelta(seconds=120), **options)
        self._before: dict[str, float] = {}

    def steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Train one step per batch; nothing is pending at the end."""
        for batch, upcoming in zip(batches, [*batches[1:], None]):
            self.engine.begin_step(upcoming=None if upcoming is None else {"items": self._ids(upcoming.features)})
            self.optimizer.zero_grad()
            self.model(batch)[0].backward()
            self.engine.end_backward()
            self.optimizer.step()
            yield
        self.engine.drain()

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Take steps without compute, in which the engine chooses hot rows."""
        recommender = self.model.module
        seconds, recommender.seconds = recommender.seconds, 0.0
        for _ in self.steps(batches):
            pass
        recommender.seconds = seconds

    def count_anew(self) -> None:
        """Begin the counts of :meth:`sent`."""
        self._before = self.engine.statistics()

    def sent(self) -> dict[str, float]:
        """Return the counters of the engine, with the bytes sent to other ranks, since the start or :meth:`count_anew`."""
        counted = {name: value - self._before.get(name, 0.0) for name, value in self.engine.statistics().items()}
        return {**counted, "bytes": sum(counted[name] for name in ("ids_bytes", "colliding_bytes", "non_colliding_bytes"))}

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class ByThreshold(Ours):
    """The engine with a threshold instead of exact knowledge: it also waits for rows that occur in half of the steps.

    The owners count occurrences, which decay by half in 50 steps. Results are exact, because the engine still waits for
    colliding rows below the threshold.
    """

    def __init__(self, model: Recommender, **options: Any) -> None:
        super().__init__(model, hot_rows=0, **options)
        (collection,) = self.engine.collections.values()
        collisions = collection._exchange._collisions
        occurred, weight, decay = torch.zeros(collection.local.count), 0.0, 0.5 ** (1 / 50)
        exact = collisions.compare

        def compare(following: Any, current: Any) -> Any:
            nonlocal weight
            rows = following.requested.incoming.rows
            colliding, urgent = exact(following, current)
            frequent = occurred[rows] >= weight / 2
            occurred.mul_(decay)
            weight = weight * decay + 1
            occurred[rows] = occurred[rows] + 1  # once per row
            return colliding | frequent, urgent

        collisions.compare = compare


class InMicroBatches(Ours):
    """The engine with each batch cut into micro-batches: only the first waits for rows, and only the last for gradients."""

    def __init__(self, model: Recommender, micro_batches: int) -> None:
        super().__init__(model)
        self.count = micro_batches

    def steps(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Train one step per batch; compute is divided by the number of ids."""
        recommender, seconds = self.model.module, self.model.module.seconds
        parts = [(part, index) for batch in batches for index, part in enumerate(batch.in_micro_batches(self.count))]
        ids = [len(batch.features.values()) for batch in batches]
        for number, ((part, index), upcoming) in enumerate(zip(parts, [*parts[1:], None])):
            last = index == self.count - 1
            recommender.seconds = seconds * len(part.features.values()) / ids[number // self.count]
            recommender.late_seconds = seconds if last else 0.0
            following = None if upcoming is None else {"items": self._ids(upcoming[0].features)}
            self.engine.begin_step(upcoming=following, updates=last, restart=index == 0)
            if index == 0:
                self.optimizer.zero_grad()
            with nullcontext() if last else self.model.no_sync():
                self.model(part)[0].backward()
            self.engine.end_backward()
            if last:
                self.optimizer.step()
                yield
        recommender.seconds = recommender.late_seconds = seconds
        self.engine.drain()


class _AllRows(HotList):
    """A list of all rows, for which nothing is counted."""

    begun = True

    def contain(self, keys: Tensor) -> Tensor:
        return torch.ones_like(keys, dtype=torch.bool)

    def count(self, *requests: Any) -> None:
        pass


def every_row_hot() -> AbstractContextManager[Any]:
    """Return a context in which engines are made that send every row of other nodes in two hops."""
    return patch.object(hot_route, "HotList", _AllRows)


def build(names: Sequence[str], rows: int, dim: int, seconds: float, ranks_per_node: int = 1) -> dict[str, Any]:
    """Create the variants called ``names``; variants that look up as TorchRec does share a table. Collective.

    ``"micro-4"`` is the engine with 4 micro-batches, ``"split"`` and ``"split-4"`` are these under a split backward,
    ``"floor-micro-4"`` is the floor with 4 micro-batches. On nodes of ``ranks_per_node`` ranks, ``"hot-rows"`` is the engine
    with the hot rows that it chooses, ``"hot-1.25"`` with those that 1.25 of a node's ranks request, and ``"two-level"`` with
    every row hot. ``"threshold"`` also waits for frequent rows.
    """
    made: dict[str, Any] = {}
    shared: nn.Module | None = None
    for name in names:
        torch.manual_seed(0)
        model = Recommender(rows, dim, seconds)
        if name.startswith("floor"):
            model.items = LocalRows(dim)
            floor = DistributedDataParallel(model)
            parts = int(name.removeprefix("floor-micro-")) if name != "floor" else 1
            made[name] = Plain(floor, Wire()) if parts == 1 else PlainInMicroBatches(floor, Wire(), parts)
        elif name.startswith(("ours", "micro-", "split")):
            if name.startswith("split"):
                torch.manual_seed(0)
                model = SplitRecommender(rows, dim, seconds)
            parts = int(name.rpartition("-")[2]) if "-" in name else 1
            made[name] = Ours(model, hot_rows=0, ranks_per_node=ranks_per_node) if parts == 1 else InMicroBatches(model, parts)
        elif name == "two-level":
            with every_row_hot():
                made[name] = Ours(model, hot_rows=1, ranks_per_node=ranks_per_node)
        elif name.startswith("hot-"):
            readers = name.removeprefix("hot-")
            hot_rows = "auto" if readers == "rows" else float(readers) / ranks_per_node
            made[name] = Ours(model, hot_rows=hot_rows, ranks_per_node=ranks_per_node)
        elif name == "threshold":
            made[name] = ByThreshold(model, ranks_per_node=ranks_per_node)
        elif name == "embedding":
            torch.manual_seed(0)
            made[name] = Ours(PlainRecommender(rows, dim, seconds))
        elif name == "pipeline":
            made[name] = Pipelined(_with_torchrec(model), Wire())
        else:
            shared = shared or _with_torchrec(model)
            made[name] = Plain(shared, Wire("gloo" if name == "plain-gloo" else "freescale"), deduplicate=name == "dedup")
    return made


def _with_torchrec(model: Recommender) -> nn.Module:
    apply_optimizer_in_backward(RowWiseAdagrad, model.items.parameters(), dict(ADAGRAD))
    return with_torchrec(model)


def with_torchrec(model: Any, **ddp_options: Any) -> nn.Module:
    """Shard the collection ``items`` of a model by rows with TorchRec, and wrap the model. Collective."""
    sharder, world, group = EmbeddingCollectionSharder(), dist.get_world_size(), dist.new_group()
    how = {"item": row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(
        model.items, how, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=CPU,
        plan=ShardingPlan({"items": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, **ddp_options),
    )
