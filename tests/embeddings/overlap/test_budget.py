"""What a step costs the host, in counts: they do not depend on the machine's load."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lightning_freescale.comm import process_group
from lightning_freescale.embeddings.overlap import OverlapEngine, id_exchange
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.row_exchange import RowExchange
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, batches, known, sharded
from tests.helpers.thread_mode import ThreadMode

STEPS, WARMUP = 16, 6
HOW = OPTIMIZERS["rowwise_adagrad"]
WAITS = {"item", "tolist", "nonzero", "cpu", "numpy"}
"""Calls for which the host would wait for the device."""


class Counts:
    """Calls by thread, exchanges by collection, and waits for the device on the way of the colliding rows."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.exchanges: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._within: set[int] = set()
        self._on = False

    def clear(self) -> None:
        """Begin again from nothing."""
        for counter in (self.calls, self.exchanges, self.waits):
            counter.clear()

    def start(self) -> None:
        """Count from now on, on this thread and on those that begin later."""
        self._on = True
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def stop(self) -> None:
        """Count no more; threads that are there go on asking."""
        self._on = False
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        name = threading.current_thread().name
        if event == "call" and frame.f_code is RowExchange.exchange_colliding.__code__:
            self._within.add(threading.get_ident())
        elif event == "return" and frame.f_code is RowExchange.exchange_colliding.__code__:
            self._within.discard(threading.get_ident())
        if not self._on or event not in ("call", "c_call"):
            return
        self.calls[name] += 1
        if event == "call" and frame.f_code is process_group.FreeScaleGroup.exchange.__code__:
            self.exchanges[name] += 1
        if event == "c_call" and argument.__name__ in WAITS and threading.get_ident() in self._within:
            self.waits[f"{name}: {argument.__name__}"] += 1


class Launches(ThreadMode):
    """Counts what would launch a kernel, by thread: neither views nor allocations."""

    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [returned.alias_info for returned in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not view and "empty" not in func.overloadpacket.__name__:
            self._counter[threading.current_thread().name] += 1
        return func(*args, **(kwargs or {}))


def _train(engine_wanted: bool, **options: Any) -> Iterator[None]:
    """Train; yields before the steps that count, and after them."""
    data = [batch for batch in batches(dist.get_rank(), 3 * (STEPS + WARMUP)) if len(batch["tags"].values())]
    data = data[: STEPS + WARMUP]
    with sharded(HOW) as (_, ddp, tables, dense):
        engine = OverlapEngine(tables, **options) if engine_wanted else None
        for step, (batch, following) in enumerate(zip(data, [*data[1:], None])):
            if step == WARMUP:
                _finish_jobs(engine)
                yield
            if engine is not None:
                engine.begin_step(known(following))
            dense.zero_grad()
            loss = ddp(batch)
            loss.backward()
            if engine is not None:
                engine.end_backward()
        _finish_jobs(engine)
        yield
        if engine is not None:
            engine.drain()
            engine.close()


def _counted(engine_wanted: bool, **options: Any) -> tuple[Counter[str], Counter[str], Counter[str]]:
    counts, training = Counts(), _train(engine_wanted, **options)
    if engine_wanted:
        counts.start()  # before the engine's threads begin
    next(training)
    counts.clear()
    counts.start()
    next(training)
    counts.stop()
    next(training, None)
    return counts.calls, counts.exchanges, counts.waits


def _launched() -> Counter[str]:
    counter: Counter[str] = Counter()
    run = ExchangeWorker._run_in_order

    def run_counted(*args: Any) -> Any:
        with Launches(counter):
            return run(*args)

    ExchangeWorker._run_in_order = run_counted
    training = _train(True)
    next(training)
    counter.clear()
    next(training)
    counted = counter.copy()
    next(training, None)
    return counted


def _finish_jobs(engine: OverlapEngine | None) -> None:
    for collection in () if engine is None else engine.collections.values():
        collection._worker.run(lambda: None)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_keeps_to_its_budget(ranks: int) -> None:
    for calls, exchanges, _ in run_distributed(_counted, ranks, True):
        for path in ("items", "tags"):
            thread = f"freescale-{path}"
            # the last step has no next batch, so nothing of B and D
            assert exchanges[thread] == 4 * (STEPS - 1) + 2, "four exchanges per step"
            assert calls[thread] / STEPS <= 1200, "calls of the engine's thread per step"


def test_two_levels_keep_to_twice_that() -> None:
    for calls, exchanges, _ in run_distributed(_counted, 4, True, exchange="two_level", ranks_per_node=2):
        for path in ("items", "tags"):
            thread = f"freescale-{path}"
            assert exchanges[thread] == 8 * (STEPS - 1) + 4, "each over two hops"
            assert calls[thread] / STEPS <= 2000


def _counted_apart() -> tuple[Counter[str], Counter[str], Counter[str]]:
    id_exchange.heads_travel_apart = lambda device: True
    return _counted(True)


def test_the_host_does_not_wait_for_colliding_rows() -> None:
    """As on a GPU: heads go from host to host, and tell how long the others are."""
    for _, exchanges, waits in run_distributed(_counted_apart, 2):
        assert exchanges["freescale-tags"] == 6 * (STEPS - 1) + 4, "four exchanges per step, and two of heads"
        assert not {name: count for name, count in waits.items() if name.startswith("freescale-tags")}, "one table: no wait"


def test_a_step_launches_few_kernels() -> None:
    for launches in run_distributed(_launched, 2):
        assert launches["freescale-tags"] / STEPS <= 92, "one table"
        assert launches["freescale-items"] / STEPS <= 158, "two tables, three features"


def test_the_training_thread_calls_no_more_than_without_overlap() -> None:
    with_engine, without = (run_distributed(_counted, 2, wanted) for wanted in (True, False))
    for (ours, _, _), (plain, _, _) in zip(with_engine, without):
        assert ours["MainThread"] <= plain["MainThread"], (ours["MainThread"] / STEPS, plain["MainThread"] / STEPS)
