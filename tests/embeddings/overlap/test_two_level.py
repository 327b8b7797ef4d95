"""The two-level exchange sends shared rows of a node between nodes once, and refuses what it does not support."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.embeddings.overlap.transport import RowTransport
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.sequences import DIM, OPTIMIZERS, batches, known, sharded, train_overlapped

TWO_LEVEL = {"exchange": "two_level", "ranks_per_node": 2}
HOW = OPTIMIZERS["rowwise_adagrad"]


class _Sent:
    """Counts the floats of messages to other nodes as sent, and the rows among them as counted."""

    def __init__(self, ranks_per_node: int) -> None:
        self.words, self.rows = 0, 0
        exchange, count = ProcessGroupFreeScale.exchange, RowTransport.count
        node = dist.get_rank() // ranks_per_node

        def seen(group: ProcessGroupFreeScale, received: Any, send: Any, gets: Any, gives: Any, **options: Any) -> None:
            ranks = dist.get_process_group_ranks(group)
            self.words += sum(size for rank, size in zip(ranks, gives) if rank // ranks_per_node != node)
            exchange(group, received, send, gets, gives, **options)

        def counted(transport: RowTransport, kind: str, width: int, gives: list[int]) -> None:
            if width == 4 * DIM:
                self.rows += sum(compress(gives, transport._far))
            count(transport, kind, width, gives)

        ProcessGroupFreeScale.exchange, RowTransport.count = seen, counted


def _both_sent() -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, float]]]:
    data, sent = batches(dist.get_rank() // 2, 8, samples=64), _Sent(2)  # the ranks of a node need the same rows
    found, seen = {}, {}
    for exchange in ("flat", "two_level"):
        sent.words = sent.rows = 0
        seen[exchange] = train_overlapped(HOW, data, dedup=True, exchange=exchange, ranks_per_node=2).statistics
        found[exchange] = sent.words, sent.rows
    return found, seen


def test_what_a_node_needs_crosses_once() -> None:
    totals: Counter[str] = Counter()
    for found, counted in run_distributed(_both_sent, 4):
        for exchange, (words, rows) in found.items():
            totals[f"{exchange} words"] += words
            totals[f"{exchange} rows"] += rows
            crossed = counted[exchange]["cross_node_bytes"]
            assert 0.95 * 4 * words <= crossed <= 4 * words, "padding to whole rows is not counted"
        for name in ("tokens", "rows", "dedup_bytes"):
            assert counted["two_level"][name] == counted["flat"][name] > 0, name
    assert totals["two_level rows"] > 1000
    assert 2 * totals["two_level rows"] == totals["flat rows"], "rows, and back their gradients"
    assert totals["two_level words"] < 0.6 * totals["flat words"], "the heads of a node come along"


def _killed(folder: Path) -> None:
    data = batches(dist.get_rank(), 60)
    with sharded(HOW) as (model, _, tables, _):  # without DDP: only the engine can notice it
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
                time.sleep(60)  # so that no rank notices that this one ends


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    """Check that rank 0 ends, although it shares no group with that rank."""
    with pytest.raises(RankFailed, match="rank 3: died with exit code -9"):
        run_distributed(_killed, 4, tmp_path, timeout=10.0)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"exchange": "three_level"}, "exchange='three_level'"),
    ({"exchange": "two_level"}, "ranks_per_node=None"),
    ({"ranks_per_node": 3}, "ranks_per_node=3"),
    ({"ranks_per_node": 0}, "ranks_per_node=0"),
    ({**TWO_LEVEL, "dedup": False}, "dedup=False"),
    (TWO_LEVEL, "2 ranks and ranks_per_node=2"),
    ({**TWO_LEVEL, "ranks_per_node": 1}, "2 ranks and ranks_per_node=1"),
]


def _refused(cases: list[tuple[dict[str, Any], str]]) -> None:
    with sharded(HOW) as (_, _, tables, _):
        for options, message in cases:
            with pytest.raises(ValueError, match=message):
                OverlapEngine(tables, **options)


def _by_nccl() -> None:
    ProcessGroupFreeScale.moves_by_nccl, ProcessGroupFreeScale.connect = True, lambda group: None
    _refused([(TWO_LEVEL, "several embedding collections, 'items'.*NCCL")])


def test_what_is_refused() -> None:
    run_distributed(_refused, 2, REFUSED)
    run_distributed(_by_nccl, 4)
