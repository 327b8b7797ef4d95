"""The route of hot rows sends shared rows of a node between nodes once, and refuses what it does not support."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.embeddings.overlap import OverlapEngine, hot_route
from lightning_freescale.embeddings.overlap.hot_route import HotRouting
from lightning_freescale.embeddings.overlap.hot_rows import LinkCosts, Nodes
from lightning_freescale.embeddings.overlap.routes import DirectRoute
from lightning_freescale.embeddings.overlap.transport import RowTransport, new_group
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.hot_rows import HOT, every_row_hot
from tests.helpers.sequences import DIM, OPTIMIZERS, batches, known, sharded, train_overlapped

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
    data, sent = batches(dist.get_rank() // 2, 8, samples=256), _Sent(2)  # the ranks of a node need the same rows
    found, seen = {}, {}
    options = {"dedup": True, "rerank_every_n_steps": 8_000, "ranks_per_node": 2}  # no list is published
    for hot_rows in (0, 0.5):
        sent.words = sent.rows = 0
        with every_row_hot():
            totals = seen[hot_rows] = train_overlapped(HOW, data, hot_rows=hot_rows, **options).statistics
            totals["sent"] = sum(totals[f"{kind}_bytes"] for kind in ("ids", "colliding", "non_colliding"))
        found[hot_rows] = sent.words, sent.rows
    return found, seen


def test_rows_that_a_node_needs_cross_once() -> None:
    totals: Counter[str] = Counter()
    for found, counted in run_distributed(_both_sent, 4):
        for hot_rows, (words, rows) in found.items():
            totals[f"{hot_rows} words"] += words
            totals[f"{hot_rows} rows"] += rows
            crossed = counted[hot_rows]["cross_node_bytes"]
            assert 0.95 * 4 * words <= crossed <= 4 * words, "padding to whole rows is not counted"
        for name in ("tokens", "rows", "dedup_bytes"):
            assert counted[0.5][name] == counted[0][name] > 0, name
        totals.update({f"hot: {name}": value for name, value in counted[0.5].items()})
        totals.update({f"flat: {name}": value for name, value in counted[0].items()})
    spared = totals["hot: hot_direct_bytes"] - totals["hot: hot_far_bytes"]
    assert totals["hot: cross_node_bytes"] + spared == pytest.approx(totals["flat: cross_node_bytes"], rel=0.005)
    assert totals["hot: sent"] - totals["hot: hot_near_bytes"] + spared == pytest.approx(totals["flat: sent"], rel=0.005)
    assert totals["hot: hot_colliding_rows"] == totals["hot: far_colliding_rows"] > 100, "all rows of other nodes are hot"
    assert not any(value for name, value in totals.items() if name.startswith("flat: hot_"))
    assert totals["0.5 rows"] > 1000
    assert 2 * totals["0.5 rows"] == totals["0 rows"], "rows, and back their gradients"
    assert totals["0.5 words"] < 0.6 * totals["0 words"], "each message has a head"


def _killed(folder: Path) -> None:
    data = batches(dist.get_rank(), 60)
    with sharded(HOW) as (model, _, tables, _):  # without DDP: only the engine can notice it
        engine = OverlapEngine(tables, **HOT)
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
    ({"hot_rows": 1.5}, "hot_rows=1.5"),
    ({"hot_rows": -1}, "hot_rows=-1"),
    ({"hot_rows": 0.5}, "ranks_per_node"),
    ({"ranks_per_node": 3}, "ranks_per_node=3"),
    ({"ranks_per_node": 0}, "ranks_per_node=0"),
]


def _refused(cases: list[tuple[dict[str, Any], str]]) -> None:
    with sharded(HOW) as (_, _, tables, _):
        for options, message in cases:
            with pytest.raises(ValueError, match=message):
                OverlapEngine(tables, **options)


class _NearGroup(ProcessGroupFreeScale):
    """A group of a node that NCCL would serve on rank 0 only."""

    moves_by_nccl = property(lambda group: dist.get_rank() == 0)

    def connect(self) -> None:
        """Do nothing, because there is no GPU."""


def _near_group(*arguments: Any) -> Any:
    group = new_group(*arguments)
    if isinstance(group, ProcessGroupFreeScale):  # not for the groups of other nodes
        group.__class__ = _NearGroup
    return group


def _one_by_nccl() -> None:
    with patch.object(hot_route, "new_group", _near_group):
        _refused([(HOT, "several embedding collections, 'items'.*NCCL")])
        with sharded(HOW) as (_, _, tables, _):
            engine = OverlapEngine(tables, ranks_per_node=2)
            assert {type(each._exchange._route) for each in engine.collections.values()} == {DirectRoute}
            assert engine.hot_routing is not None and "NCCL moves the rows" in engine.hot_routing.choice
            engine.close()


def test_ranks_agree_that_nccl_moves_rows() -> None:
    """Check that ranks on which another transport serves the group refuse as well."""
    run_distributed(_one_by_nccl, 4)


def test_refusals() -> None:
    run_distributed(_refused, 2, REFUSED)


def _exchanges(options: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of exchanges of a run, and the process groups that carried any."""
    count, names, exchange = 0, set(), ProcessGroupFreeScale.exchange

    def counted(group: ProcessGroupFreeScale, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        names.add(len(dist.get_process_group_ranks(group)))
        exchange(group, *args, **kwargs)

    with patch.object(ProcessGroupFreeScale, "exchange", counted):
        train_overlapped(HOW, batches(dist.get_rank(), 8), dedup=True, **options)
    return count, sorted(names)


def _flat() -> list[tuple[int, list[str]]]:
    """Compare values of the options that make all rows cold, with 2 ranks: 1 node, nodes of 1 rank, unknown nodes."""
    flat = [{"hot_rows": 0, "ranks_per_node": 2}, {"ranks_per_node": 2}, {"ranks_per_node": 1}, {}]
    return [_exchanges(options) for options in [*flat, {"hot_rows": 0.5, "ranks_per_node": 1}]]


def test_all_rows_are_cold_without_several_nodes_of_several_ranks() -> None:
    for found in run_distributed(_flat, 2):
        assert len({count for count, _ in found}) == 1 and {tuple(sizes) for _, sizes in found} == {(2,)}


def test_auto_describes_its_choice() -> None:
    nodes = Nodes(8, 4)
    assert HotRouting("auto", 200, nodes).choice == HotRouting(0.5, 200, nodes).choice == ""
    dear = HotRouting("auto", 200, nodes, LinkCosts(1e-9, 4e-9, 1e-6)).choice
    assert "takes 4 times as long" in dear and "more than 1.33 reading ranks per node" in dear
    assert "no row is hot" in HotRouting("auto", 200, nodes, LinkCosts(1e-9, 1e-9, 1e-6)).choice
