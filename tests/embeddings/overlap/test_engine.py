"""The overlap engine has the results of plain TorchRec, in all kinds of steps and between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.embeddings.overlap import OverlapEngine, id_exchange
from lightning_freescale.testing import run_distributed
from tests.helpers.hot_rows import HOT, every_row_hot, lists_that_differ
from tests.helpers.sequences import (
    DIM,
    OPTIMIZERS,
    Batch,
    Run,
    Sequences,
    batches,
    differences,
    ids_by_turns,
    known,
    sharded,
    train_overlapped,
    train_plain,
)

STEPS = 16
HOW = OPTIMIZERS["rowwise_adagrad"]
APART = patch.object(id_exchange, "heads_travel_apart", lambda device: True)
"""True as on a GPU, where the host would have to wait for heads on the device."""
WAYS: dict[str, tuple[AbstractContextManager[Any], dict[str, Any]]] = {
    "dedup": (nullcontext(), {"dedup": True}),
    "late, wrong or unknown": (nullcontext(), {"submit": ids_by_turns}),
    "heads apart": (APART, {"submit": ids_by_turns}),
    "ids that do not fit": (patch.object(id_exchange, "_FEWEST_IDS", 1), {}),
    "messages to many ranks": (patch.object(id_exchange, "_FEW_RANKS", 0), {}),
}
WITH_HOT_ROWS: dict[str, tuple[AbstractContextManager[Any], dict[str, Any]]] = {
    "all rows hot": (every_row_hot(), {}),
    "lists that differ": (lists_that_differ(), {}),
    "lists that differ, late, wrong or unknown": (lists_that_differ(), {"submit": ids_by_turns}),
}


@contextmanager
def _counted_exchanges() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    exchange = ProcessGroupFreeScale.exchange

    def counted(*args: Any, **kwargs: Any) -> None:
        counts[threading.current_thread().name] += 1
        exchange(*args, **kwargs)

    with patch.object(ProcessGroupFreeScale, "exchange", counted):
        yield counts


def _in_all_ways(optimizer: str, options: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, dict[str, float]]]:
    """Return differences from plain TorchRec and the counts, for each way to pass ids."""
    data = batches(dist.get_rank(), STEPS)
    plain = train_plain(OPTIMIZERS[optimizer], data, rate=lambda step: 0.3 / (1 + step))
    assert len(set(plain.losses)) > STEPS / 2, "the loss must move, or equality means nothing"
    found, statistics = {}, {}
    for name, (changed, way) in (WAYS | (WITH_HOT_ROWS if options else {"exact": (nullcontext(), {})})).items():
        with changed, _counted_exchanges() as exchanges:
            mine = train_overlapped(OPTIMIZERS[optimizer], data, rate=lambda step: 0.3 / (1 + step), **{**way, **options})
        found[name] = differences(mine, plain, exact="dedup" not in {**way, **options})
        statistics[name] = mine.statistics | {f"exchanges of {thread}": count for thread, count in exchanges.items()}
    return found, statistics


@pytest.mark.parametrize(
    ("ranks", "optimizer", "options"),
    [
        (2, "rowwise_adagrad", {}),
        pytest.param(3, "adagrad", {}, marks=pytest.mark.slow),
        pytest.param(4, "rowwise_adagrad", HOT, marks=pytest.mark.slow),
    ],
)
def test_same_numbers_however_ids_come(ranks: int, optimizer: str, options: dict[str, Any]) -> None:
    results = run_distributed(_in_all_ways, ranks, optimizer, options)
    for found, statistics in results:
        assert {name: differing for name, differing in found.items() if differing} == {}
        for name in {"exact", "dedup"} & statistics.keys():
            kinds = [statistics[name][f"{kind}predicted_lookups"] for kind in ("", "un")]
            assert kinds == [2 * (STEPS - 1), 2] and statistics[name]["mispredicted_lookups"] == 0, name
            most = (8 + 3) * STEPS + 9 if options else 4 * STEPS + 5
            counts = [statistics[name][f"exchanges of freescale-{path}"] for path in ("items", "tags")]
            assert max(counts) <= most, (
                "four in a step, each over two hops with hot rows, three of each list, and those of both ends"
            )
    for kind in ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups"):
        assert sum(statistics["late, wrong or unknown"][kind] for _, statistics in results) >= 3 * ranks, kind


Train = Callable[..., Run]


def _with_forward(train: Train, forward: Callable[[Any, Batch, int], Tensor | None], optimizer: str, **options: Any) -> Run:
    """Replace the forward. ``forward`` also gets the number of the call; if it returns None, the usual forward runs."""
    usual = Sequences.forward

    def changed(self: Any, batch: Batch) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        loss = forward(self, batch, self.calls)
        return usual(self, batch) if loss is None else loss

    with patch.object(Sequences, "forward", changed):
        return train(OPTIMIZERS[optimizer], batches(dist.get_rank(), 12), **options)


def _unforeseen() -> dict[str, list[str]]:
    """Look up once more on ranks 1 and 2 in every other step, with the flat exchange: TorchRec would wait for the others."""
    others, usual = batches(dist.get_rank() + 7, 12), Sequences.forward

    def forward(self: Any, batch: Batch, call: int) -> Tensor | None:
        if call % 2 or dist.get_rank() not in (1, 2):
            return None
        return usual(self, batch) + 0.1 * self.items(others[call - 1]["ids"])["candidate"].values().square().sum()

    flat, found = _with_forward(train_overlapped, forward, "sgd"), {}
    for name, changed in (("hot rows", nullcontext()), ("lists that differ", lists_that_differ()), ("heads apart", APART)):
        with changed:
            mine = _with_forward(train_overlapped, forward, "sgd", **HOT)
        counted = [run.statistics["mispredicted_lookups"] for run in (flat, mine)]
        found[name] = differences(mine, flat, exact=False) + [f"mispredicted {counted}"] * (counted[0] != counted[1])
    return found


def test_lookups_with_hot_rows_that_were_not_submitted() -> None:
    for found in run_distributed(_unforeseen, 4):
        assert found == {"hot rows": [], "lists that differ": [], "heads apart": []}


def _more_on_one_node() -> dict[str, list[str]]:
    """Look up once more on rank 1 in every step, with a first list of hot rows that comes between two steps."""
    others, usual = batches(dist.get_rank() + 7, 12), Sequences.forward

    def forward(self: Any, batch: Batch, call: int) -> Tensor | None:
        if dist.get_rank() != 1:
            return None
        return usual(self, batch) + 0.1 * self.items(others[call - 1]["ids"])["candidate"].values().square().sum()

    flat = _with_forward(train_overlapped, forward, "sgd")
    found = {}
    for steps in (8, 24, 40):
        mine = _with_forward(train_overlapped, forward, "sgd", **{**HOT, "rerank_every_n_steps": steps})
        found[f"first list after {steps // 8}"] = differences(mine, flat, exact=False)
    return found


def test_a_node_looks_up_more_when_the_first_list_comes() -> None:
    for found in run_distributed(_more_on_one_node, 4):
        assert {name: differing for name, differing in found.items() if differing} == {}


def _in_turns() -> dict[str, float]:
    """Return batches that share no row with the batch before, and many with the one before that."""
    data = batches(dist.get_rank(), 12)
    for step, batch in enumerate(data):
        for name, rows in (("ids", 20), ("tags", 1)):
            old = batch[name]
            batch[name] = KeyedJaggedTensor(old.keys(), old.values() % rows * 2 + step % 2, lengths=old.lengths())
    return train_overlapped(HOW, data).statistics


def _in_parts(parts: int) -> dict[str, float]:
    """Return batches in which every part of every step has the same rows."""
    batch = batches(dist.get_rank(), 3)[2]
    with sharded(HOW) as (_, ddp, tables, _):
        engine, totals = OverlapEngine(tables), []
        for steps in (4, 8):  # the ids of the first step are unknown ahead, so its rows are not compared
            for index in range(steps * parts):
                engine.begin_step(known(batch), updates=index % parts == parts - 1)
                ddp(batch).backward()
                engine.end_backward()
            engine.drain()
            totals.append(engine.statistics())
        engine.close()
        return {name: total - totals[0][name] for name, total in totals[1].items()}


def _counted() -> list[dict[str, float]]:
    return [_in_turns(), _in_parts(1), _in_parts(2)]


def test_rows_collide_with_those_of_the_batch_before_and_once_a_step() -> None:
    for in_turns, *in_parts in run_distributed(_counted, 2):
        assert in_turns["colliding_incoming_rows"] == 0 < in_turns["incoming_rows"]
        for parts, statistics in enumerate(in_parts, start=1):
            assert statistics["steps"] == 8
            assert statistics["colliding_incoming_rows"] * parts == statistics["incoming_rows"] > 0


def _memory(state: Any) -> dict[int, int]:
    """Return the bytes by address of all tensors in the state of a batch."""
    if isinstance(state, Tensor):
        return {state.untyped_storage().data_ptr(): state.untyped_storage().nbytes()}
    parts = state if isinstance(state, (list, tuple)) else vars(state).values() if is_dataclass(state) else ()
    return {address: size for part in parts for address, size in _memory(part).items()}


def _most_held() -> tuple[int, int]:
    """Return the largest state before or after backward, and the largest batch of ids and rows."""
    data, held = batches(dist.get_rank(), 8, samples=200), []
    sizes = [(batch["ids"].values().numel() + batch["tags"].values().numel()) * (8 + 4 * DIM) for batch in data]
    with sharded(OPTIMIZERS["sgd"]) as (_, ddp, tables, _):
        engine = OverlapEngine(tables)
        for batch, following in zip(data, [*data[1:], None]):
            engine.begin_step(known(following))
            loss = ddp(batch)
            for ends in (False, True):
                if ends:
                    loss.backward()
                    engine.end_backward()
                collections = engine.collections.values()
                for collection in collections:
                    collection._worker.run(lambda: None)  # after all earlier jobs
                states = [(each.step.current, each.step.following, each.step.unsent) for each in collections]
                held.append(sum(_memory(states).values()))
            assert all(len(each._exchange.row_updates.kept_rows) == 0 for each in collections)
        engine.drain()
        return max(held), max(sizes)


def test_at_most_one_more_batch_is_held() -> None:
    for most, batch in run_distributed(_most_held, 2):
        assert 0 < most <= batch


def _restarted() -> dict[str, bool]:
    """Return whether a window fetches the same rows after a batch without an optimizer step."""
    data, found = batches(dist.get_rank(), 3), []
    for first in (0, 1):
        with sharded(OPTIMIZERS["adagrad"]) as (model, _, tables, _):
            engine = OverlapEngine(tables)
            for step in range(first, 3):
                engine.begin_step({}, updates=step == 2, restart=step == 1)
                model(data[step]).backward()
                engine.end_backward()
            engine.drain()
            found.append({shard.table.name: shard.weight.clone() for shard in tables.shards()})
            engine.close()
    return {name: torch.equal(weight, found[1][name]) for name, weight in found[0].items()}


def test_a_window_that_was_left_open_is_forgotten() -> None:
    assert run_distributed(_restarted, 2) == [{"item": True, "category": True, "tag": True}] * 2
