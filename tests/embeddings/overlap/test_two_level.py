"""The exchange in two levels: the numbers of the flat one, and less between nodes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale.comm import FreeScaleGroup
from lightning_freescale.embeddings.overlap import OverlapEngine, id_exchange
from lightning_freescale.embeddings.overlap.transport import Transport
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.sequences import (
    DIM,
    OPTIMIZERS,
    Batch,
    Run,
    Sequences,
    batches,
    ids_by_turns,
    known,
    settings_at,
    sharded,
    train_overlapped,
    train_plain,
)

STEPS = 20
TWO_LEVEL = {"exchange": "two_level", "ranks_per_node": 2}
HOW = OPTIMIZERS["rowwise_adagrad"]


def assert_close(mine: Run, other: Run) -> None:
    """Up to the order of summation."""
    assert mine.losses == pytest.approx(other.losses, rel=1e-6)
    for name, value in {**other.tables, **other.dense}.items():
        found = {**mine.tables, **mine.dense}[name]
        # of the whole, not of every number: Adagrad makes a full step of a first gradient that cancels out to rounding
        assert (found - value).norm() <= 1e-6 * value.norm() + 1e-9, name


def _all(optimizer: str) -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    how = OPTIMIZERS[optimizer]
    return {
        "plain": train_plain(how, data),
        "flat": train_overlapped(how, data, dedup=True, ranks_per_node=2),
        "two_level": train_overlapped(how, data, dedup=True, **TWO_LEVEL),
    }


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_same_numbers(optimizer: str) -> None:
    for runs in run_distributed(_all, 4, optimizer):
        assert len(set(runs["plain"].losses)) > STEPS / 2, "the loss must move, or equality means nothing"
        assert_close(runs["two_level"], runs["flat"])
        assert_close(runs["two_level"], runs["plain"])
        for name in ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups", "tokens", "rows", "dedup_bytes"):
            assert runs["two_level"].statistics[name] == runs["flat"].statistics[name], name
        assert 0 < runs["two_level"].statistics["cross_node_bytes"] < runs["flat"].statistics["cross_node_bytes"]


def _unexpected() -> dict[str, Run]:
    data = batches(dist.get_rank(), STEPS)
    return {
        "plain": train_plain(HOW, data),
        "two_level": train_overlapped(HOW, data, dedup=True, submit=ids_by_turns, **TWO_LEVEL),
    }


def test_ids_that_are_late_wrong_or_unknown() -> None:
    results = run_distributed(_unexpected, 4)
    for runs in results:
        assert_close(runs["two_level"], runs["plain"])
    for name in ("mispredicted_lookups", "unpredicted_lookups", "predicted_lookups"):
        assert sum(runs["two_level"].statistics[name] for runs in results) > 16, name


def _with_little_room() -> dict[str, Run]:
    id_exchange._FEWEST_IDS = 2
    return _all("rowwise_adagrad")


def _with_heads_apart() -> dict[str, Run]:
    id_exchange.heads_travel_apart = lambda device: True
    data = batches(dist.get_rank(), STEPS)
    options = {"dedup": True, "submit": ids_by_turns, **TWO_LEVEL}
    return {"plain": train_plain(HOW, data), "two_level": train_overlapped(HOW, data, **options)}


@pytest.mark.parametrize("act", [_with_little_room, _with_heads_apart])
def test_other_messages(act: Any) -> None:
    """More ids than a message has room for; heads that go from host to host, as on a GPU."""
    for runs in run_distributed(act, 4):
        assert_close(runs["two_level"], runs["plain"])


def _looks_up_more(two_levels: bool, apart: bool = False) -> Run:
    """In every other step ranks 1 and 2 look up once more, which nobody had foreseen."""
    id_exchange.heads_travel_apart = lambda device: apart
    data, once = batches(dist.get_rank(), STEPS), Sequences.forward
    others = batches(dist.get_rank() + 7, STEPS)

    def forward(self: Any, batch: Batch) -> torch.Tensor:
        loss = once(self, batch)
        step = self.calls = getattr(self, "calls", -1) + 1
        more = self.items(others[step]["ids"]) if step % 2 and dist.get_rank() in (1, 2) else None
        return loss if more is None else loss + 0.1 * more["candidate"].values().square().sum()

    Sequences.forward = forward
    if two_levels:
        return train_overlapped(OPTIMIZERS["sgd"], data, dedup=True, **TWO_LEVEL)
    return train_overlapped(OPTIMIZERS["sgd"], data)


@pytest.mark.parametrize("apart", [False, True])
def test_lookups_that_nobody_had_foreseen(apart: bool) -> None:
    """Against the flat exchange, as TorchRec would wait for the other ranks' lookups forever."""
    for flat, mine in zip(run_distributed(_looks_up_more, 4, False), run_distributed(_looks_up_more, 4, True, apart)):
        assert_close(mine, flat)
        assert mine.statistics["mispredicted_lookups"] == flat.statistics["mispredicted_lookups"]


def _clipped(**options: Any) -> Run:
    data = batches(dist.get_rank(), STEPS)
    with sharded(HOW) as (_, ddp, tables, dense):
        engine, run = OverlapEngine(tables, hold_gradients=True, **options), Run()
        for step, (batch, following) in enumerate(zip(data, [*data[1:], None])):
            early, late = ids_by_turns(step, following)
            engine.begin_step(early, settings=settings_at(None, tables, step))
            dense.zero_grad()
            loss = ddp(batch)
            engine.submit_next_ids(late)
            loss.backward()
            engine.end_backward()
            norm = engine.square_sum().sqrt()
            engine.scale_gradients(torch.clamp(0.1 / (norm + 1e-6), max=1.0).float())
            engine.apply_gradients()
            dense.step()
            run.losses += [loss.item(), float(norm)]
        engine.drain()
        run.tables = {shard.table.name: shard.weight.clone() for shard in tables.shards()}
        engine.close()
        return run


def test_clipped_gradients() -> None:
    flat, mine = run_distributed(_clipped, 4), run_distributed(_clipped, 4, **TWO_LEVEL)
    for one, other in zip(flat, mine):
        assert_close(other, one)
    assert len({tuple(run.losses[1::2]) for run in mine}) == 1, "one norm on all ranks"


class _Sent:
    """What goes to ranks of other nodes: floats of messages as they are sent, and what of them are rows, as counted."""

    def __init__(self, ranks_per_node: int) -> None:
        self.words, self.rows = 0, 0
        exchange, count = FreeScaleGroup.exchange, Transport.count
        node = dist.get_rank() // ranks_per_node

        def seen(group: FreeScaleGroup, received: Any, send: Any, gets: Any, gives: Any, **options: Any) -> None:
            ranks = dist.get_process_group_ranks(group)
            self.words += sum(size for rank, size in zip(ranks, gives) if rank // ranks_per_node != node)
            exchange(group, received, send, gets, gives, **options)

        def counted(transport: Transport, kind: str, width: int, gives: list[int]) -> None:
            if width == 4 * DIM:
                self.rows += sum(compress(gives, transport._far))
            count(transport, kind, width, gives)

        FreeScaleGroup.exchange, Transport.count = seen, counted


def _both_sent() -> tuple[dict[str, tuple[int, int]], dict[str, float]]:
    data, sent = batches(dist.get_rank() // 2, 8, samples=64), _Sent(2)  # the ranks of a node need the same rows
    found, seen = {}, {}
    for exchange in ("flat", "two_level"):
        sent.words = sent.rows = 0
        run = train_overlapped(HOW, data, dedup=True, exchange=exchange, ranks_per_node=2)
        found[exchange], seen[exchange] = (sent.words, sent.rows), run.statistics["cross_node_bytes"]
    return found, seen


def test_what_a_node_needs_crosses_once() -> None:
    totals: Counter[str] = Counter()
    for found, counted in run_distributed(_both_sent, 4):
        for exchange, (words, rows) in found.items():
            totals[f"{exchange} words"] += words
            totals[f"{exchange} rows"] += rows
            assert 0.95 * 4 * words <= counted[exchange] <= 4 * words, "padding to whole rows is not counted"
    assert totals["two_level rows"] > 1000
    assert 2 * totals["two_level rows"] == totals["flat rows"], "rows, and back their gradients"
    assert totals["two_level words"] < 0.6 * totals["flat words"], "the heads of a node come along"


def _wrong_ids() -> str:
    data = batches(dist.get_rank(), 8)
    if dist.get_rank() == 2:
        old = data[3]["ids"]
        values = old.values().clone()
        values[-1] = 41
        data[3]["ids"] = KeyedJaggedTensor(old.keys(), values, lengths=old.lengths())
    try:
        train_overlapped(HOW, data, dedup=True, **TWO_LEVEL)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_every_rank_raises() -> None:
    for told in run_distributed(_wrong_ids, 4):
        assert "rank 2: feature 'category' holds id 41, but table 'category' has num_embeddings=41, ids 0 to 40" in told


def _uneven() -> str:
    try:
        train_overlapped(HOW, batches(dist.get_rank(), 6 - (dist.get_rank() == 3)), dedup=True, **TWO_LEVEL)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_with_fewer_batches() -> None:
    told = run_distributed(_uneven, 4)
    assert "ranks [3] have no batch after step 5, others have: give every rank the same number of batches" in told[0]


def _killed(folder: Path) -> None:
    data = batches(dist.get_rank(), 60)
    with sharded(HOW) as (model, _, tables, _):  # without DDP: the engine alone has to hear of it
        engine = OverlapEngine(tables, **TWO_LEVEL)
        for step, (batch, following) in enumerate(zip(data, data[1:])):
            if step == 3 and dist.get_rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                engine.begin_step(known(following))
                model(batch).backward()
                engine.end_backward()
            except RuntimeError as error:
                engine.close(farewell=False)
                (folder / str(dist.get_rank())).write_text(str(error))
                time.sleep(60)  # so that nobody hears of it because this rank ends


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    """Rank 0 is in no group with it."""
    with pytest.raises(RankFailed, match="rank 3: died with exit code -9"):
        run_distributed(_killed, 4, tmp_path, timeout=10.0)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}


def _made(**options: Any) -> str:
    with sharded(HOW) as (_, _, tables, _):
        try:
            OverlapEngine(tables, **options)
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "three_level"}, "exchange='three_level': pass 'flat' or 'two_level'"),
        ({"exchange": "two_level"}, "exchange='two_level', ranks_per_node=None: pass how many ranks every node has"),
        ({"ranks_per_node": 3}, "ranks_per_node=3 does not divide 2 ranks: pass how many ranks every node has"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 does not divide 2 ranks"),
        ({**TWO_LEVEL, "dedup": False}, "exchange='two_level', dedup=False: gradients are added up within a node first"),
        (TWO_LEVEL, "exchange='two_level' with 2 ranks and ranks_per_node=2: it needs several nodes with several ranks each"),
        ({**TWO_LEVEL, "ranks_per_node": 1}, "exchange='two_level' with 2 ranks and ranks_per_node=1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    for told in run_distributed(_made, 2, **options):
        assert message in told


def _by_nccl() -> str:
    FreeScaleGroup.moves_by_nccl, FreeScaleGroup.connect = True, lambda group: None
    return _made(**TWO_LEVEL)


def test_several_collections_that_nccl_moves_are_refused() -> None:
    for told in run_distributed(_by_nccl, 4):
        assert "exchange='two_level' with several embedding collections, 'items' among them, whose rows NCCL moves" in told
