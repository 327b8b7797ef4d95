"""On CUDA events alone would put the engine's work in order: checked with vector clocks, as there is no device here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.overlap.transport import Transport
from lightning_freescale.testing import run_distributed
from tests.helpers.gpu_training import train
from tests.helpers.jagged import copy_of
from tests.helpers.pretended_gpu import GPU
from tests.helpers.sequences import OPTIMIZERS, Batch, batches, known
from tests.helpers.stream_clocks import Accesses, ClockStream, Watch

STEPS = 12
WRONG = 5
"""In this step other ids are told than the model looks up."""


def _watched(events_count: bool, dedup: bool, holds: bool = False, **options: Any) -> tuple[set[str], set[str], int]:
    accesses = Accesses()
    data = batches(dist.get_rank(), STEPS)
    ClockStream.events_count = events_count
    _watch_exchanges(accesses)
    train(
        OPTIMIZERS["rowwise_adagrad"],
        data,
        on_gpu=True,
        dedup=dedup,
        holds=holds,
        told=lambda step, following: _copied_ids(data[0] if step == WRONG else following),
        watches=[partial(Watch, accesses)],
        accesses=accesses,
        **options,
    )
    return accesses.unordered, accesses.unrecorded, accesses.seen


def _copied_ids(batch: Batch | None) -> dict[str, KeyedJaggedTensor] | None:
    """What the engine is told: on CUDA that and what the model looks up are two copies."""
    ids = known(batch)
    return ids and {path: copy_of(each).to(GPU) for path, each in ids.items()}


def _watch_exchanges(accesses: Accesses) -> None:
    exchange = Transport.exchange

    def exchange_watched(self: Transport, received: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        exchange(self, received, message, *args, **kwargs)
        accesses.add("exchange", [message], [received], [])

    Transport.exchange = exchange_watched


@pytest.mark.parametrize(("dedup", "holds"), [(True, False), pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_events_order_all_that_two_streams_share(dedup: bool, holds: bool) -> None:
    for unordered, unrecorded, seen in run_distributed(_watched, 2, True, dedup, holds):
        assert seen > 100 * STEPS, "it has looked at something"
        assert not unordered and not unrecorded


def test_events_order_two_levels() -> None:
    options = {"exchange": "two_level", "ranks_per_node": 2}
    for unordered, unrecorded, seen in run_distributed(_watched, 4, True, True, True, **options):
        assert seen > 150 * STEPS, "more than in one level"
        assert not unordered and not unrecorded


def test_the_check_finds_what_no_event_orders() -> None:
    for unordered, _, _ in run_distributed(_watched, 2, False, True):
        assert len(unordered) > 10
