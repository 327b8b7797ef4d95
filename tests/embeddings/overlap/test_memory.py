"""What the engine holds beyond plain TorchRec: at most one batch of ids and rows."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import DIM, OPTIMIZERS, batches, known, sharded


def _held(batch: Any) -> int:
    """Bytes of all tensors that belong to a batch."""
    shared = [
        rows.index for both in (batch.awaited, batch.urgent, batch.patient) if both for rows in (both.requested, both.incoming)
    ]
    tensors = [batch.rows, batch.places, batch.request.rows, batch.request.inverse, batch.incoming.rows, *shared]
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _most() -> tuple[int, int]:
    """The most that is held before backward, when the next batch is complete, and the largest batch of ids and rows."""
    data, most = batches(dist.get_rank(), 12, samples=200), 0
    sizes = [(batch["ids"].values().numel() + batch["tags"].values().numel()) * (8 + 4 * DIM) for batch in data]
    with sharded(OPTIMIZERS["sgd"]) as (_, ddp, tables, _):
        engine = OverlapEngine(tables)
        for batch, following in zip(data, [*data[1:], None]):
            engine.begin_step(known(following))
            loss = ddp(batch)
            engine.drain()
            held = [(_held(each._current), _held(each._following)) for each in engine.collections.values()]
            most = max(most, sum(now + upcoming for now, upcoming in held))
            loss.backward()
            engine.end_backward()
            assert all(len(each._exchange.accumulator.rows) == 0 for each in engine.collections.values())
        return most, max(sizes)


def test_at_most_one_more_batch() -> None:
    for most, batch in run_distributed(_most, 2):
        assert 0 < most <= batch
