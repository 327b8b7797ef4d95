"""Every way off the beaten path, and back: the numbers stay those of plain TorchRec."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.shards import ShardedTables
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import (
    OPTIMIZERS,
    Batch,
    NextIds,
    Run,
    batches,
    ids_by_turns,
    known,
    sharded,
    train_overlapped,
    train_plain,
)

STEPS = 24
HOW = OPTIMIZERS["rowwise_adagrad"]


def same(a: Run, b: Run) -> None:
    """Bitwise."""
    assert a.losses == b.losses
    for name, value in {**a.tables, **a.dense}.items():
        assert torch.equal({**b.tables, **b.dense}[name], value), name


def _mixed() -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    return {"plain": train_plain(HOW, data), "mixed": train_overlapped(HOW, data, submit=ids_by_turns)}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ids_that_are_late_wrong_or_unknown(ranks: int) -> None:
    results = run_distributed(_mixed, ranks)
    for runs in results:
        same(runs["plain"], runs["mixed"])
    for name in ("mispredicted_lookups", "unpredicted_lookups", "predicted_lookups"):
        assert sum(runs["mixed"].statistics[name] for runs in results) > 4 * ranks, name


def _in_turns() -> dict[str, float]:
    """A batch shares no row with the one before, and many with the one before that."""
    data = batches(dist.get_rank(), 12)
    for step, batch in enumerate(data):
        for name, rows in (("ids", 20), ("tags", 1)):
            old = batch[name]
            batch[name] = KeyedJaggedTensor(old.keys(), old.values() % rows * 2 + step % 2, lengths=old.lengths())
    return train_overlapped(HOW, data).statistics


def test_only_the_rows_of_the_batch_before_collide() -> None:
    for statistics in run_distributed(_in_turns, 2):
        assert statistics["colliding_incoming_rows"] == 0 < statistics["incoming_rows"]


def _in_parts(parts: int) -> dict[str, float]:
    """Every part of every step has the same rows."""
    batch = batches(dist.get_rank(), 3)[2]
    with sharded(HOW) as (_, ddp, tables, _):
        engine = OverlapEngine(tables)
        totals = []
        for steps in (4, 16):  # what the first step looks up was not known ahead, so not compared
            for index in range(steps * parts):
                engine.begin_step(known(batch), updates=index % parts == parts - 1)
                ddp(batch).backward()
                engine.end_backward()
            engine.drain()
            totals.append(engine.statistics())
        engine.close()
        return {name: total - totals[0][name] for name, total in totals[1].items()}


@pytest.mark.parametrize("parts", [1, 2])
def test_only_the_first_micro_batch_of_a_step_collides(parts: int) -> None:
    """Parts are counted alike: of those of a step all or none."""
    for statistics in run_distributed(_in_parts, 2, parts):
        assert statistics["steps"] == 16
        assert statistics["colliding_incoming_rows"] * parts == statistics["incoming_rows"] > 0


def _schedule(step: int) -> float:
    return 0.3 / (1 + step)


def _scheduled() -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    return {
        "plain": train_plain(HOW, data, rate=_schedule),
        "scheduled": train_overlapped(HOW, data, rate=_schedule),
        "constant": train_overlapped(HOW, data),
    }


@pytest.mark.slow
def test_learning_rates_are_those_of_their_own_step() -> None:
    for runs in run_distributed(_scheduled, 2):
        same(runs["plain"], runs["scheduled"])
        assert runs["constant"].losses != runs["plain"].losses


def _read() -> list[Any]:
    data, seen = batches(dist.get_rank(), 9), []

    def between(step: int, tables: ShardedTables, engine: OverlapEngine | None) -> None:
        if step % 3 == 2:
            if engine is not None and step % 2:
                engine.drain()  # else reading the state dict does it
            state = [module.state_dict() for _, module in tables.modules]
            seen.append([value.local_tensor().clone() for part in state for value in part.values()])

    train_plain(HOW, data, between=between)
    train_overlapped(HOW, data, between=between)
    return seen


def test_tables_are_up_to_date_when_read() -> None:
    for seen in run_distributed(_read, 2):
        plain, mine = seen[:3], seen[3:]
        for expected, found in zip(plain, mine):
            assert all(torch.equal(a, b) for a, b in zip(expected, found))


def _write(inside: bool) -> dict[str, Run]:
    data = batches(dist.get_rank(), 8)

    def halve(tables: ShardedTables) -> None:
        for shard in tables.shards():
            shard.weight.mul_(0.5)

    def between(step: int, tables: ShardedTables, engine: OverlapEngine | None) -> None:
        if step == 4 and engine is not None and inside:
            with engine.writing():
                halve(tables)
        elif step == 4:
            halve(tables)

    return {"plain": train_plain(HOW, data, between=between), "mine": train_overlapped(HOW, data, between=between)}


def test_writing_the_tables() -> None:
    for runs in run_distributed(_write, 2, True):
        same(runs["plain"], runs["mine"])


def test_writing_the_tables_without_saying_so() -> None:
    with pytest.raises(RuntimeError, match=r"tables of embedding collection 'items' were written.*writing_tables\(\)"):
        run_distributed(_write, 2, False)


def _looked_up_again(engine: bool) -> tuple[Run, list[str]]:
    """Every third step looks up once more, without gradients."""
    from tests.helpers import sequences

    data, once = batches(dist.get_rank(), 12), sequences.Sequences.forward

    def forward(self: Any, batch: Batch) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        extra = torch.zeros(())
        if self.calls % 3 == 0:
            with torch.no_grad():
                extra = extra + self.items(batch["ids"])["history"].values().sum()
        return once(self, batch) + 0.01 * extra

    sequences.Sequences.forward = forward
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if engine:
            run = train_overlapped(HOW, data, submit=_early_or_late, rate=_schedule)
        else:
            run = train_plain(HOW, data, rate=_schedule)
    return run, [str(warning.message) for warning in caught]


def _early_or_late(step: int, following: Batch | None) -> tuple[NextIds | None, NextIds]:
    """One rank knows the ids before the forward, the other after it."""
    told = known(following)
    return (told, {}) if dist.get_rank() == 0 or told is None else ({}, told)


@pytest.mark.slow
def test_lookups_without_gradients_in_a_step() -> None:
    plain, mine = run_distributed(_looked_up_again, 2, False), run_distributed(_looked_up_again, 2, True)
    for (expected, _), (found, told) in zip(plain, mine):
        same(expected, found)
        assert not [text for text in told if "looked up" in text]


def _not_looked_up(engine: bool) -> Run:
    """The second collection is used in every other step only."""
    from tests.helpers import sequences

    data, always = batches(dist.get_rank(), 12), sequences.Sequences.forward

    def forward(self: Any, batch: Batch) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2:
            return always(self, batch)
        found = self.items(batch["ids"])
        pooled = found["history"].to_padded_dense(12).mean(dim=1)
        return (self.out(pooled) + self.query(pooled)).square().mean() + found["candidate"].values().square().sum()

    sequences.Sequences.forward = forward
    return train_overlapped(OPTIMIZERS["adagrad"], data) if engine else train_plain(OPTIMIZERS["adagrad"], data)


def test_a_collection_that_is_not_always_looked_up() -> None:
    for plain, mine in zip(run_distributed(_not_looked_up, 2, False), run_distributed(_not_looked_up, 2, True)):
        same(plain, mine)


def _outside(engine: bool) -> Run:
    """After the fourth step the candidates are trained on once more, outside of a step."""
    data, models = batches(dist.get_rank(), 9), []

    def between(step: int, tables: ShardedTables, _: OverlapEngine | None) -> None:
        if step == 4:
            module = next(module for collection, module in tables.modules if collection.path == "items")
            models.append(module(data[5]["ids"])["candidate"].values().square().sum())
            models[0].backward()

    return train_overlapped(HOW, data, between=between) if engine else train_plain(HOW, data, between=between)


def test_a_lookup_outside_of_a_step() -> None:
    for plain, mine in zip(run_distributed(_outside, 2, False), run_distributed(_outside, 2, True)):
        same(plain, mine)
