"""Wrong input and ranks that fail raise an error on every rank, and no rank hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.optimizer import TableOptimizer
from lightning_freescale.embeddings.overlap import OverlapEngine
from lightning_freescale.testing import run_distributed
from tests.helpers.hot_rows import HOT
from tests.helpers.sequences import OPTIMIZERS, Batch, batches, known, sharded, train_overlapped

SGD, ADAM = OPTIMIZERS["sgd"], TableOptimizer(torch.optim.Adam, {"lr": 0.05}, sparse_adam=True)
STEPS = 6


def _with(batch: Batch, changed_id: tuple[int, int] | None = None, **changed: Any) -> Batch:
    old = batch["ids"]
    parts = {"keys": old.keys(), "values": old.values().clone(), "lengths": old.lengths()} | changed
    if changed_id is not None:
        parts["values"][changed_id[0]] = changed_id[1]
    return {**batch, "ids": KeyedJaggedTensor(**parts)}


def _outside(batch: Batch) -> Batch:
    return _with(batch, (-1, 41))


def _once(model: Any, batch: Batch) -> None:
    model(batch).backward()


def _train(
    data: list[Batch],
    act: Callable[[Any, Batch], None] = _once,
    optimizer: TableOptimizer = SGD,
    updates: Callable[[], bool] = lambda: True,
    between: Callable[[int, Any], None] = lambda step, tables: None,
) -> None:
    """Run steps without DDP: after an error the ranks are at different places, and only the engine brings them together."""
    with sharded(optimizer) as (model, _, tables, _):
        engine = OverlapEngine(tables, **OPTIONS)
        for step, (batch, following) in enumerate(zip(data, [*data[1:], None])):
            engine.begin_step(known(following), updates=updates())
            act(model, batch)
            engine.end_backward()
            between(step, tables)
        engine.drain()


def _changed(change: Callable[[Batch], Batch], ranks: tuple[int, ...] = (1,)) -> None:
    data = batches(dist.get_rank(), STEPS)
    if dist.get_rank() in ranks:
        data = [change(batch) if step == 3 else batch for step, batch in enumerate(data)]
    _train(data)


def _fewer_batches() -> None:
    _train(batches(dist.get_rank(), STEPS - (dist.get_rank() == 1)))


def _reads_alone() -> None:
    def between(step: int, tables: Any) -> None:
        if step == 3 and dist.get_rank() == 1:
            for _, module in tables.modules:
                module.state_dict()

    _train(batches(dist.get_rank(), STEPS), between=between)


def _writes_unannounced() -> None:
    def between(step: int, tables: Any) -> None:
        if step == 3:
            for shard in tables.shards():
                shard.weight.mul_(0.5)

    _train(batches(dist.get_rank(), STEPS), between=between)


def _steps(act: Callable[[Any, Batch], None], optimizer: TableOptimizer = SGD, **options: Any) -> None:
    _train(batches(dist.get_rank(), 3), act, optimizer, **options)


def _forward(model: Any, batch: Batch) -> None:
    model(batch)


def _twice(model: Any, batch: Batch) -> None:
    (model(batch) + model(batch)).backward()


def _backward_twice(model: Any, batch: Batch) -> None:
    loss = model(batch)
    loss.backward(retain_graph=True)
    loss.backward()


FEATURES = ["history", "candidate", "category"]
CASES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "beyond": (
        lambda: _changed(_outside, (0, 1)),
        ["rank 0: feature 'category' has id 41, but", "num_embeddings=41", "enlarge the table; rank 1: feature"],
    ),
    "negative": (lambda: _changed(lambda batch: _with(batch, (0, -7))), ["rank 1", "'history'", "id -7", "'item'"]),
    "missing": (lambda: _changed(lambda batch: _with(batch, keys=[*FEATURES[:2], "brand"])), ["rank 1", "'brand'"]),
    "floating": (
        lambda: _changed(lambda batch: _with(batch, values=batch["ids"].values().float())),
        ["rank 1", "'history'", "'item'", "torch.float32"],
    ),
    "fewer batches": (_fewer_batches, ["Ranks [1]", "after step 5"]),
    "reads alone": (_reads_alone, ["Ranks [1]", "state_dict()"]),
    "other windows": (lambda: _steps(_once, updates=lambda: dist.get_rank() == 0), ["ranks [0]", "accumulate_grad_batches"]),
}
ONE_LEVEL: dict[str, tuple[Callable[[], None], list[str]]] = {
    "writes": (_writes_unannounced, ["'items'", "writing_tables()"]),
    "backward twice": (lambda: _steps(_backward_twice), ["Embedding collection", "second time"]),
    "no backward": (lambda: _steps(_forward), ["nothing"]),
    "no backward, Adam": (lambda: _steps(_forward, ADAM), ["nothing"]),
    "two lookups, Adam": (lambda: _steps(_twice, ADAM), ["nothing"]),
}
OPTIONS: dict[str, Any] = {}


def _raised(names: list[str], options: dict[str, Any]) -> dict[str, str]:
    OPTIONS.update(options)
    texts = dict.fromkeys(names, "nothing")
    for name in names:
        try:
            (CASES | ONE_LEVEL)[name][0]()
        except (ValueError, RuntimeError) as error:
            texts[name] = str(error)
    return texts


@pytest.mark.parametrize(
    ("ranks", "names", "options"),
    [
        (3, [*CASES, *ONE_LEVEL], {}),
        (4, ["beyond", "fewer batches"], HOT),
    ],
)
def test_every_rank_raises(ranks: int, names: list[str], options: dict[str, Any]) -> None:
    for rank, texts in enumerate(run_distributed(_raised, ranks, names, options)):
        if rank == 1:  # it misses no batch
            texts.pop("fewer batches")
        wrong = {name: text for name, text in texts.items() if not all(part in text for part in (CASES | ONE_LEVEL)[name][1])}
        assert wrong == {}


def _submitted_only() -> float:
    """Submit wrong ids that the model never looks up."""

    def submit(step: int, following: Batch | None) -> Any:
        upcoming = known(following)
        if upcoming is not None and step == 2:
            upcoming["items"] = _outside(following)["ids"]
        return upcoming, {}

    return train_overlapped(SGD, batches(dist.get_rank(), 5), submit=submit).statistics["mispredicted_lookups"]


def test_wrong_ids_that_are_only_submitted_ahead_are_no_error() -> None:
    assert run_distributed(_submitted_only, 2) == [1.0, 1.0]


def _without_the_other() -> str:
    with sharded(SGD) as (model, _, tables, _):
        engine, store = OverlapEngine(tables, timeout=timedelta(seconds=2)), dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["given up"])
            return ""
        first, second = batches(0, 2)
        engine.begin_step(known(second))
        with pytest.raises(RuntimeError) as caught:
            model(first)
        engine.close()
        store.set("given up", "")
        return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_waited_for_until_the_timeout() -> None:
    message = run_distributed(_without_the_other, 2)[0]
    assert "'items'" in message and ("timed out" in message.lower() or "timeout" in message.lower())


def _closes() -> float:
    with sharded(SGD) as (_, _, tables, _):
        engine = OverlapEngine(tables)
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.8)
        began = time.monotonic()
        engine.close()
        return time.monotonic() - began


def test_a_rank_that_closes_waits_for_the_others() -> None:
    assert run_distributed(_closes, 2)[0] > 0.5
