"""On CUDA events alone would put the engine's work in order: checked with vector clocks, as there is no device here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap import OverlapEngine, collection
from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.transport import Transport
from lightning_freescale.testing import run_distributed
from tests.helpers.jagged import copy_of
from tests.helpers.sequences import OPTIMIZERS, Batch, batches, known, sharded
from tests.helpers.stream_clocks import Accesses, ClockStream, Watch, install

STEPS = 12
WRONG = 5
"""In this step other ids are told than the model looks up."""


def _watched(events_count: bool, dedup: bool, holds: bool = False) -> tuple[set[str], set[str], int]:
    accesses = Accesses()
    data = batches(dist.get_rank(), STEPS)
    with sharded(OPTIMIZERS["rowwise_adagrad"]) as (_, ddp, tables, dense):
        install(accesses)
        ClockStream.events_count = events_count
        _put_streams_in_place(accesses)
        engine = OverlapEngine(tables, dedup=dedup, hold_gradients=holds)
        with Watch(accesses):
            for step, (batch, following) in enumerate(zip(data, [*data[1:], None])):
                engine.begin_step(_copied_ids(data[0] if step == WRONG else following))
                dense.zero_grad()
                ddp(batch).backward()
                engine.end_backward()
                if holds:
                    engine.scale_gradients(engine.square_sum().sqrt())
                    engine.clamp_gradients(1.0)
                    engine.apply_gradients()
                dense.step()
            engine.drain()
        engine.close()
    return accesses.unordered, accesses.unrecorded, accesses.seen


def _copied_ids(batch: Batch | None) -> dict[str, KeyedJaggedTensor] | None:
    """What the engine is told: on CUDA that and what the model looks up are two copies."""
    ids = known(batch)
    return ids and {path: copy_of(each) for path, each in ids.items()}


def _put_streams_in_place(accesses: Accesses) -> None:
    run, exchange = ExchangeWorker._run_in_order, Transport.exchange

    def run_watched(self: ExchangeWorker, *args: Any) -> Any:
        with Watch(accesses):
            return run(self, *args)

    def exchange_watched(self: Transport, received: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        exchange(self, received, message, *args, **kwargs)
        accesses.add("exchange", [message], [received], [])

    ExchangeWorker._run_in_order, Transport.exchange = run_watched, exchange_watched
    collection.ExchangeWorker = lambda path, device, *rest: ExchangeWorker(path, torch.device("cuda"), *rest)


@pytest.mark.parametrize(("dedup", "holds"), [(True, False), pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_events_order_all_that_two_streams_share(dedup: bool, holds: bool) -> None:
    for unordered, unrecorded, seen in run_distributed(_watched, 2, True, dedup, holds):
        assert seen > 100 * STEPS, "it has looked at something"
        assert not unordered and not unrecorded


def test_the_check_finds_what_no_event_orders() -> None:
    for unordered, _, _ in run_distributed(_watched, 2, False, True):
        assert len(unordered) > 10
