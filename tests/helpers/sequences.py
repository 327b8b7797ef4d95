"""A sequence model with attention, its data, and two loops that train it: plain TorchRec, and the overlap engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.embeddings.optimizer import TableOptimizer, UpdateSettings
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.embeddings.shards import ShardedTables

ITEMS, CATEGORIES, TAGS, DIM, LONGEST = 601, 41, 3, 8, 12
ADAGRAD = {"lr": 0.1, "eps": 1e-10}
OPTIMIZERS = {
    "sgd": TableOptimizer(torch.optim.SGD, {"lr": 0.5}, group=0),
    "adagrad": TableOptimizer(torch.optim.Adagrad, ADAGRAD, group=0),
    "rowwise_adagrad": TableOptimizer(RowWiseAdagrad, ADAGRAD, group=0),
}
PATHS = ("items", "tags")
Batch = dict[str, Any]
Rate = Callable[[int], float]
NextIds = dict[str, KeyedJaggedTensor]
SubmitIds = Callable[[int, Batch | None], tuple[NextIds | None, NextIds]]
Between = Callable[[int, ShardedTables, OverlapEngine | None], None]


class Sequences(nn.Module):
    """Has two collections. The first has a table shared by two features and another one; the second has one tiny table.

    ``types`` are those of the tables: items, categories and tags.
    """

    def __init__(self, types: Sequence[DataType] = (DataType.FP32,) * 3, dim: int = DIM) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        item, category, tag = (
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, data_type=kind)
            for (name, rows, features), kind in zip(
                (("item", ITEMS, ["history", "candidate"]), ("category", CATEGORIES, ["category"]), ("tag", TAGS, ["tag"])),
                types,
            )
        )
        self.items, self.tags = EmbeddingCollection(tables=[item, category]), EmbeddingCollection(tables=[tag])
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)

    def forward(self, batch: Batch) -> Tensor:
        found = self.items(batch["ids"])
        tags = self.tags(batch["tags"])["tag"].to_padded_dense(LONGEST)
        history = found["history"].to_padded_dense(LONGEST) + found["category"].to_padded_dense(LONGEST) + tags
        hidden = torch.tanh(self.query(history))
        attention = torch.softmax(hidden @ hidden.transpose(1, 2) / hidden.shape[-1] ** 0.5, dim=-1)
        user = self.out((attention @ hidden).mean(dim=1))
        scores = (found["candidate"].to_padded_dense(2) @ user[:, :, None]).squeeze(2)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["labels"])


def batches(rank: int, steps: int, samples: int = 6) -> list[Batch]:
    """Return Zipf-distributed ids. Some ranks have no ids at all, and some features have none."""
    weights, result = 1 / torch.arange(1, ITEMS + 1) ** 1.1, []
    shuffled = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(9))
    for step in range(steps):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        lengths = torch.randint(0, LONGEST + 1, (samples,), generator=draw)
        if (step + rank) % 7 == 0:
            lengths[:] = 0
        total = int(lengths.sum())
        pairs = torch.full((samples,), 0 if step % 5 == 4 else 2)
        items = shuffled[torch.multinomial(weights, total + int(pairs.sum()) + 1, replacement=True, generator=draw)[:-1]]
        categories = torch.randint(0, CATEGORIES, (total,), generator=draw)
        ids = KeyedJaggedTensor(
            keys=["history", "candidate", "category"],
            values=torch.cat([items, categories]),
            lengths=torch.cat([lengths, pairs, lengths]),
        )
        tags = KeyedJaggedTensor(keys=["tag"], values=torch.randint(0, TAGS, (total,), generator=draw), lengths=lengths)
        labels = torch.randint(0, 2, (samples, 2), generator=draw).float()
        result.append({"ids": ids, "tags": tags, "labels": labels})
    return result


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    tables: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)


@contextmanager
def sharded(
    optimizer: TableOptimizer, make: Callable[[], nn.Module] = Sequences, overlap: bool = False
) -> Iterator[tuple[nn.Module, nn.Module, ShardedTables, Any]]:
    """Yield the sharded model, the same wrapped by DDP, its tables, and Adam for the rest."""
    model = make()
    sharding = TableSharding(model, torch.device("cpu"), overlap)
    optimizers = dict.fromkeys(sharding.parameters, optimizer)
    tables = sharding.shard(group=dist.new_group(), local_world_size=dist.get_world_size(), optimizers=optimizers)
    keys = [table.key for table in tables.tables]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, keys)
    dense = [parameter for name, parameter in model.named_parameters() if name not in keys]
    yield model, DistributedDataParallel(model), tables, torch.optim.Adam(dense, lr=1e-2)


def result_of(model: nn.Module, tables: ShardedTables, losses: list[float]) -> Run:
    run = Run(losses)
    for shard in tables.shards():
        run.tables[shard.table.name] = shard.weight.clone()
        run.tables |= {f"{shard.table.name}.{name}": value.clone() for name, value in shard.state.items()}
    run.dense = {name: p.detach().clone() for name, p in model.named_parameters() if "weight" in name and p.dim() == 2}
    run.dense = {name: p for name, p in run.dense.items() if name.startswith(("query", "out"))}
    return run


def differences(mine: Run, other: Run, exact: bool = True) -> list[str]:
    """Return the names of differences: in any bit or, if not ``exact``, by more than the order of summation."""
    found, expected = {**mine.tables, **mine.dense}, {**other.tables, **other.dense}
    if exact:
        names = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        return names + ["losses"] * (mine.losses != other.losses)
    # of the whole, not of every number: Adagrad makes a full step of a first gradient that cancels out to rounding
    limits = {name: 1e-6 * value.norm() + 1e-9 for name, value in expected.items()}
    names = [name for name, value in expected.items() if not (found[name] - value).norm() <= limits[name]]
    return names + ["losses"] * (mine.losses != pytest.approx(other.losses, rel=1e-6))


def train_plain(
    optimizer: TableOptimizer,
    data: list[Batch],
    rate: Rate | None = None,
    between: Between | None = None,
    make: Callable[[], nn.Module] = Sequences,
) -> Run:
    with sharded(optimizer, make=make) as (model, ddp, tables, dense):
        losses = []
        for step, batch in enumerate(data):
            tables.prepare_update(settings_at(rate, tables, step))
            dense.zero_grad()
            loss = ddp(batch)
            loss.backward()
            dense.step()
            losses.append(loss.item())
            if between is not None:
                between(step, tables, None)
        return result_of(model, tables, losses)


def train_overlapped(
    optimizer: TableOptimizer,
    data: list[Batch],
    dedup: bool = False,
    submit: SubmitIds | None = None,
    rate: Rate | None = None,
    between: Between | None = None,
    make: Callable[[], nn.Module] = Sequences,
    ends_forward: bool = False,
    **options: Any,
) -> Run:
    """Train with the engine; ``submit`` returns the ids of the next batch that it gets before and after the forward."""
    with sharded(optimizer, make=make, overlap=True) as (model, ddp, tables, dense):
        engine = OverlapEngine(tables, dedup=dedup, **options)
        losses = []
        for step, batch in enumerate(data):
            following = data[step + 1] if step + 1 < len(data) else None
            early, late = submit(step, following) if submit is not None else (known(following), {})
            engine.begin_step(early, settings=settings_at(rate, tables, step))
            dense.zero_grad()
            loss = ddp(batch)
            engine.submit_next_ids(late)
            if ends_forward:
                engine.end_forward()
            loss.backward()
            engine.end_backward()
            dense.step()
            losses.append(loss.item())
            if between is not None:
                between(step, tables, engine)
        engine.drain()
        statistics = engine.statistics()
        engine.close()
        run = result_of(model, tables, losses)
        run.statistics = statistics
        return run


def known(following: Batch | None) -> NextIds | None:
    return None if following is None else {"items": following["ids"], "tags": following["tags"]}


def _others(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), (features.values() + 1) % 3, lengths=features.lengths())


def ids_by_turns(step: int, following: Batch | None) -> tuple[NextIds | None, NextIds]:
    """Return ids by step and rank: early, late, wrong, empty, half, nothing."""
    ids = known(following)
    if ids is None:
        return None, {}
    items, tags = {"items": ids["items"]}, {"tags": ids["tags"]}
    wrong = {"items": _others(ids["items"])}
    ways: list[tuple[NextIds | None, NextIds]] = [
        (ids, {}),
        ({}, ids),
        (wrong, tags),
        ({}, {}),
        (items, tags),
        (tags, wrong),
    ]
    return ways[(step * (1 + dist.get_rank())) % len(ways)]


def settings_at(rate: Rate | None, tables: ShardedTables, step: int) -> dict[str, UpdateSettings]:
    options = {} if rate is None else {"lr": rate(step)}
    return dict.fromkeys(tables.optimizers, UpdateSettings(step, options))
