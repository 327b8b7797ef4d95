"""One update per row and optimizer step, against the unsharded module in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.sharding import TableSharding
from lightning_freescale.embeddings.sparse_adam import new_state, update_rows
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, Batch, Run, Sequences, batches, known, result_of, sharded

STEPS = 21
ADAM = TableOptimizer(torch.optim.Adam, {"lr": 0.05, "eps": 1e-12}, sparse_adam=True)


def _unsharded(ranks: int, every: int, make: Callable[[Any], torch.optim.Optimizer], sparse: bool = False) -> list[float]:
    """Losses of rank 0's batches, with the gradient of the mean over ranks and ``every`` batches."""
    model, data = Sequences(), [batches(rank, STEPS) for rank in range(ranks)]
    tables = [p for name, p in model.named_parameters() if name.startswith(("items", "tags"))]
    dense = torch.optim.Adam([p for name, p in model.named_parameters() if name.startswith(("query", "out"))], lr=1e-2)
    optimizer, losses = make(tables), []
    for step in range(STEPS):
        for rank in range(ranks):
            loss = model(data[rank][step]) / every
            (loss / ranks).backward()
            losses += [loss.item()] if rank == 0 else []
        if (step + 1) % every == 0:
            if sparse:
                _make_sparse(model, [batch for seen in data for batch in seen[step + 1 - every : step + 1]])
            for each in (optimizer, dense):
                each.step()
                each.zero_grad()
    return losses


def _make_sparse(model: Sequences, seen: list[Batch]) -> None:
    """Gradients of the rows that were looked up, also where they are zero."""
    for collection, ids in ((model.items, "ids"), (model.tags, "tags")):
        for config in collection.embedding_configs():
            rows = torch.cat([batch[ids][name].values() for batch in seen for name in config.feature_names]).unique()
            table = collection.embeddings[config.name].weight
            table.grad = torch.sparse_coo_tensor(rows[None], table.grad[rows], table.shape)


def _overlapped(optimizer: TableOptimizer, every: int, dedup: bool = True, **options: Any) -> Run:
    data = batches(dist.get_rank(), STEPS)
    with sharded(optimizer) as (model, ddp, tables, dense):
        engine, losses = OverlapEngine(tables, dedup=dedup, **options), []
        for step, batch in enumerate(data):
            updates = (step + 1) % every == 0
            engine.begin_step(known(data[step + 1] if step + 1 < STEPS else None), updates=updates)
            ddp.require_backward_grad_sync = updates
            loss = ddp(batch) / every
            loss.backward()
            engine.end_backward()
            if updates:
                dense.step()
                dense.zero_grad()
            losses.append(loss.item())
        engine.drain()
        return result_of(model, tables, losses)


_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-10),
    "rowwise_adagrad": lambda params: RowWiseAdagrad(params, lr=0.1, eps=1e-10),
}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), "adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)],
)
def test_accumulated_gradients_are_applied_once(optimizer: str, every: int) -> None:
    expected = _unsharded(2, every, _TORCH[optimizer])
    for dedup in (True, False):
        assert run_distributed(_overlapped, 2, OPTIMIZERS[optimizer], every, dedup)[0].losses == pytest.approx(
            expected, rel=1e-5
        )


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)])
def test_gradients_that_cross_nodes_once_are_those_of_the_unsharded_module(optimizer: str, every: int) -> None:
    expected = _unsharded(4, every, _TORCH[optimizer])
    options = {"exchange": "two_level", "ranks_per_node": 2}
    found = run_distributed(_overlapped, 4, OPTIMIZERS[optimizer], every, **options)
    assert found[0].losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("every", [1, 2])
def test_adam_on_cpu_is_torchs_sparse_adam(every: int) -> None:
    expected = _unsharded(3, every, lambda params: torch.optim.SparseAdam(params, lr=0.05, eps=1e-12), sparse=True)
    found = run_distributed(_overlapped, 3, ADAM, every)
    assert found[0].losses == pytest.approx(expected, rel=1e-6)
    assert any(value.abs().max() > 0 for name, value in found[1].tables.items() if name.endswith("exp_avg_sq"))


def test_adam_of_all_rows_is_torchs_adamw() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(7, 4, generator=draw), torch.randn(9, 7, 4, generator=draw)
    expected = torch.nn.Parameter(weight.clone())
    optimizer, state = torch.optim.AdamW([expected], lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2), new_state(weight)
    arguments = {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.2}
    for step, gradient in enumerate(gradients):
        expected.grad = gradient
        optimizer.step()
        update_rows(weight, state, torch.arange(7), gradient, arguments, step)
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-6, atol=1e-7)
    for name, value in state.items():
        torch.testing.assert_close(value, optimizer.state[expected][name], rtol=1e-6, atol=1e-7)


def _whole_numbers(dedup: bool) -> dict[str, torch.Tensor]:
    """Numbers whose sums are exact: small integers, and learning rates that are powers of two."""
    sgd = TableOptimizer(torch.optim.SGD, {"lr": 0.25})
    draw = torch.Generator().manual_seed(3)
    data = batches(dist.get_rank(), 12)
    with sharded(sgd) as (model, _, tables, _):
        for shard in tables.shards():
            shard.weight.copy_(torch.randint(-4, 5, shard.weight.shape, generator=draw))
        engine = OverlapEngine(tables, dedup=dedup)
        for step, batch in enumerate(data):
            engine.begin_step(known(data[step + 1] if step + 1 < len(data) else None))
            found = model.items(batch["ids"])
            factors = torch.randint(-2, 3, found["history"].values().shape, generator=draw).float()
            (found["history"].values() * factors).sum().add(found["candidate"].values().sum()).backward()
            engine.end_backward()
        engine.drain()
        return {shard.table.name: shard.weight.clone() for shard in tables.shards()}


@pytest.mark.slow
def test_dedup_is_bitwise_where_sums_are_exact() -> None:
    for dedup, without in zip(run_distributed(_whole_numbers, 4, True), run_distributed(_whole_numbers, 4, False)):
        for name, weight in without.items():
            assert torch.equal(dedup[name], weight), name
            assert name != "item" or weight.frac().abs().max() > 0, "must have moved"


def _restarted(restart: bool) -> dict[str, torch.Tensor]:
    """A batch that no step follows, and then a window of its own."""
    data = batches(dist.get_rank(), 3)
    with sharded(OPTIMIZERS["adagrad"]) as (model, _, tables, _):
        engine = OverlapEngine(tables)
        for step, batch in enumerate(data if restart else data[1:], start=0 if restart else 1):
            engine.begin_step({}, updates=step == 2, restart=step == 1)
            model(batch).backward()
            engine.end_backward()
        engine.drain()
        return {shard.table.name: shard.weight.clone() for shard in tables.shards()}


def test_a_window_that_was_left_open_is_forgotten() -> None:
    for with_it, without in zip(run_distributed(_restarted, 2, True), run_distributed(_restarted, 2, False)):
        for name, weight in without.items():
            assert torch.equal(with_it[name], weight), name


def _two_rates() -> dict[str, float]:
    """How far the rows of each table move: one has a learning rate of zero."""
    rates = {"item": 0.05, "category": 0.0, "tag": 0.05}
    model = Sequences()
    sharding = TableSharding(model, torch.device("cpu"), overlap=True)
    optimizers = {
        key: TableOptimizer(torch.optim.Adam, {"lr": rates[key.split(".")[-2]]}, sparse_adam=True)
        for key in sharding.parameters
    }
    tables = sharding.shard(group=dist.new_group(), local_world_size=2, optimizers=optimizers)
    before = {shard.table.name: shard.weight.clone() for shard in tables.shards()}
    engine = OverlapEngine(tables)
    engine.begin_step()
    model(batches(dist.get_rank(), 2)[1]).backward()
    engine.end_backward()
    engine.drain()
    return {shard.table.name: float((shard.weight - before[shard.table.name]).abs().max()) for shard in tables.shards()}


def test_tables_keep_their_own_adam() -> None:
    moved = run_distributed(_two_rates, 2)[0]
    assert moved["item"] == pytest.approx(0.05, rel=1e-3)
    assert moved["category"] == 0.0
