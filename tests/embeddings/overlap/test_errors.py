"""Wrong input and ranks that go away: an error on every rank, that says what and where, and no hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.sequences import OPTIMIZERS, Batch, Sequences, batches, known, sharded, train_overlapped

SGD = OPTIMIZERS["sgd"]
Change = Callable[[Batch], None]


def _caught(change: Change, rank: int) -> str:
    """What this rank raises if ``rank`` changes its fourth batch."""
    data = batches(dist.get_rank(), 8)
    if dist.get_rank() == rank:
        change(data[3])
    try:
        train_overlapped(SGD, data)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def _with(batch: Batch, **changed: Any) -> None:
    old = batch["ids"]
    parts = {"keys": old.keys(), "values": old.values().clone(), "lengths": old.lengths()} | changed
    batch["ids"] = KeyedJaggedTensor(**parts)


def _outside(batch: Batch) -> None:
    _with(batch)
    batch["ids"].values()[-1] = 41


def _negative(batch: Batch) -> None:
    _with(batch)
    batch["ids"].values()[0] = -7


def _reordered(batch: Batch) -> None:
    _with(batch, keys=["candidate", "history", "category"])


def _missing(batch: Batch) -> None:
    _with(batch, keys=["history", "candidate", "brand"])


def _weighted(batch: Batch) -> None:
    _with(batch, weights=torch.ones(len(batch["ids"].values())))


def _floating(batch: Batch) -> None:
    _with(batch, values=batch["ids"].values().float())


FURTHER = [
    (_negative, "rank 1: feature 'history' holds id -7, but table 'item' has num_embeddings=601, ids 0 to 600"),
    (_reordered, "rank 1: the KeyedJaggedTensor has features ['candidate', 'history', 'category'], in earlier lookups"),
    (_missing, "rank 1: the KeyedJaggedTensor has features ['history', 'candidate', 'brand']"),
    (_weighted, "rank 1: the KeyedJaggedTensor with features ['history', 'candidate', 'category'] is weighted, but tables"),
    (_floating, "rank 1: feature 'history' of table 'item' has ids of torch.float32: pass integers"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, "rank 1: feature 'category' holds id 41, but table 'category' has num_embeddings=41, ids 0 to 40"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER),
    ],
)
def test_every_rank_raises(change: Change, message: str) -> None:
    for told in run_distributed(_caught, 3, change, 1):
        assert message in told


def _disagreeing() -> str:
    data = batches(dist.get_rank(), 4)
    if dist.get_rank() == 2:
        for batch in data:
            _with(batch, keys=["candidate", "history", "category"])
    try:
        train_overlapped(SGD, data)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_disagree_on_the_features() -> None:
    for told in run_distributed(_disagreeing, 3):
        assert "rank 0 has ['history', 'candidate', 'category']" in told
        assert "rank 2 has ['candidate', 'history', 'category']" in told


def _submitted_only() -> float:
    """Wrong ids that the model never asks for."""
    data = batches(dist.get_rank(), 5)

    def submit(step: int, following: Batch | None) -> Any:
        told = known(following)
        if told is not None and step == 2:
            wrong = dict(following or {})
            _outside(wrong)
            told["items"] = wrong["ids"]
        return told, {}

    return train_overlapped(SGD, data, submit=submit).statistics["mispredicted_lookups"]


def test_wrong_ids_that_are_only_submitted_ahead_are_no_error() -> None:
    assert run_distributed(_submitted_only, 2) == [1.0, 1.0]


def _uneven() -> str:
    data = batches(dist.get_rank(), 6 - dist.get_rank())
    try:
        train_overlapped(SGD, data)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_with_fewer_batches() -> None:
    told = run_distributed(_uneven, 2)
    assert "ranks [1] have no batch after step 5, others have: give every rank the same number of batches" in told[0]


def _alone() -> None:
    def between(step: int, tables: Any, engine: OverlapEngine | None) -> None:
        if step == 3 and dist.get_rank() == 1:
            for _, module in tables.modules:
                module.state_dict()

    train_overlapped(SGD, batches(dist.get_rank(), 8), between=between)


def test_a_rank_that_reads_the_tables_alone_is_an_error() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: (.|\n)*ranks \[1\] bring the tables up to date.*do it on every rank"):
        run_distributed(_alone, 3)


def _killed(how: int) -> str:
    data, began = batches(dist.get_rank(), 60), time.monotonic()

    def between(step: int, *_: Any) -> None:
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), how)
        time.sleep(0.01)

    try:
        train_overlapped(SGD, data, between=between)
    except RuntimeError as error:
        assert time.monotonic() - began < 60
        raise RuntimeError(f"told of it: {error}") from error
    return "nothing"


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_killed_ends_the_others() -> None:
    with pytest.raises(RankFailed, match=r"rank 0: (.|\n)*told of it") as failed:
        run_distributed(_killed, 2, signal.SIGKILL)
    assert "died with exit code -9" in str(failed.value)


def _late() -> str:
    from datetime import timedelta

    data = batches(dist.get_rank(), 2)
    with sharded(SGD) as (model, _, tables, _):
        engine = OverlapEngine(tables, timeout=timedelta(seconds=2))
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["given up"])
            return "late"
        engine.begin_step(known(data[1]))
        try:
            model(data[0])
        except RuntimeError as error:
            engine.close()
            return str(error)
        finally:
            store.set("given up", "")
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_never_comes() -> None:
    told = run_distributed(_late, 2)
    assert "embedding exchange of collection 'items'" in told[0]
    assert "timed out" in told[0].lower() or "timeout" in told[0].lower()


ADAM = TableOptimizer(torch.optim.Adam, {"lr": 0.05}, sparse_adam=True)


def _steps(optimizer: TableOptimizer, act: Callable[[Any, Any, Batch, OverlapEngine], None], **options: Any) -> str:
    """What ``act`` raises in the second of two steps."""
    data = batches(dist.get_rank(), 3)
    with sharded(optimizer) as (model, _, tables, _):
        engine = OverlapEngine(tables, **options)
        try:
            for batch, following in zip(data, data[1:]):
                engine.begin_step(known(following))
                act(model, tables, batch, engine)
                engine.end_backward()
            engine.drain()
        except (ValueError, RuntimeError) as error:
            return str(error)
    return "nothing"


def _no_backward(model: Any, tables: Any, batch: Batch, engine: OverlapEngine) -> None:
    model(batch)


def _twice(model: Any, tables: Any, batch: Batch, engine: OverlapEngine) -> None:
    (model(batch) + model(batch)).backward()


def _backward_twice(model: Any, tables: Any, batch: Batch, engine: OverlapEngine) -> None:
    loss = model(batch)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("optimizer", "act", "message"),
    [
        (SGD, _no_backward, "nothing"),
        (ADAM, _no_backward, "nothing"),
        (ADAM, _twice, "nothing"),
        (SGD, _backward_twice, "a second backward through the rows of one lookup"),
    ],
)
def test_what_a_step_may_not_do(optimizer: TableOptimizer, act: Any, message: str) -> None:
    for told in run_distributed(_steps, 2, optimizer, act):
        assert message in told


def _other_windows() -> str:
    data = batches(dist.get_rank(), 3)
    with sharded(SGD) as (model, _, tables, _):
        engine = OverlapEngine(tables)
        try:
            for batch, following in zip(data, data[1:]):
                engine.begin_step(known(following), updates=dist.get_rank() == 0)
                model(batch).backward()
                engine.end_backward()
            engine.drain()
        except ValueError as error:
            return str(error)
    return "nothing"


def test_ranks_that_accumulate_differently() -> None:
    for told in run_distributed(_other_windows, 2):
        assert "after this batch ranks [0] take an optimizer step, the others go on accumulating gradients" in told


def _adam_beside_columns() -> None:
    model, world = Sequences(), dist.get_world_size()
    plan = {"item": row_wise(compute_kernel="fused"), "category": column_wise(ranks=[0, 1], compute_kernel="fused")}
    entries = {
        "items": construct_module_sharding_plan(model.items, plan, local_size=world, world_size=world, device_type="cpu"),
        "tags": construct_module_sharding_plan(
            model.tags, {"tag": row_wise(compute_kernel="fused")}, local_size=world, world_size=world, device_type="cpu"
        ),
    }
    sharding = TableSharding(model, torch.device("cpu"), overlap=True)
    optimizers = {key: ADAM for key in sharding.parameters if "item.weight" in key}
    sharding.shard(group=dist.new_group(), local_world_size=world, plan=ShardingPlan(entries), optimizers=optimizers)


def test_adam_on_cpu_needs_the_whole_collection() -> None:
    with pytest.raises(
        RankFailed, match=r"table 'category' sharding_type='column_wise'.*Adam of 'items.embeddings.item.weight'"
    ):
        run_distributed(_adam_beside_columns, 2)
