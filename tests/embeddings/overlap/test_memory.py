"""What the engine holds beyond plain TorchRec: at most one batch of ids and rows."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import DIM, OPTIMIZERS, batches, known, sharded


def _held(state: Any, seen: dict[int, int]) -> dict[int, int]:
    """Bytes by their memory of all tensors in the state of a batch, whatever it is made of."""
    if isinstance(state, Tensor):
        seen[state.untyped_storage().data_ptr()] = state.untyped_storage().nbytes()
    elif isinstance(state, (list, tuple)):
        for each in state:
            _held(each, seen)
    elif is_dataclass(state):
        for each in fields(state):
            _held(getattr(state, each.name), seen)
    return seen


def _held_now(engine: OverlapEngine) -> int:
    seen: dict[int, int] = {}
    for collection in engine.collections.values():
        collection._worker.run(lambda: None)
        _held((collection.jobs.current, collection.jobs.following, collection.jobs.unsent), seen)
    return sum(seen.values())


def _most() -> tuple[int, int]:
    """The most that is held, before backward or after it, and the largest batch of ids and rows."""
    data, most = batches(dist.get_rank(), 12, samples=200), 0
    sizes = [(batch["ids"].values().numel() + batch["tags"].values().numel()) * (8 + 4 * DIM) for batch in data]
    with sharded(OPTIMIZERS["sgd"]) as (_, ddp, tables, _):
        engine = OverlapEngine(tables)
        for batch, following in zip(data, [*data[1:], None]):
            engine.begin_step(known(following))
            loss = ddp(batch)
            most = max(most, _held_now(engine))
            loss.backward()
            engine.end_backward()
            most = max(most, _held_now(engine))
            assert all(len(each._exchange.row_updates.kept.rows) == 0 for each in engine.collections.values())
        engine.drain()
        return most, max(sizes)


def test_at_most_one_more_batch() -> None:
    for most, batch in run_distributed(_most, 2):
        assert 0 < most <= batch, (most, batch)
