"""Tables read and written between steps by somebody else than the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_freescale.embeddings.overlap.local_rows import LocalRows
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import CountingModel, Run, assert_bitwise, assert_same, fit, my_loader, strategies

STEPS = 5


class Reads(L.Callback):
    """Keeps this rank's part of every table, as the state dict shows it after each step."""

    def __init__(self) -> None:
        self.read: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        tables = [value for name, value in module.state_dict().items() if "embeddings" in name]
        self.read.append([shard.tensor.clone() for table in tables for shard in table.local_shards()])


class Writes(L.Callback):
    """Halves all tables after a step."""

    def __init__(self, step: int, writes: Callable[[Any], None]) -> None:
        self.step, self.writes = step, writes

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.step:
            self.writes(trainer.strategy)


def _halve(strategy: Any) -> None:
    with torch.no_grad():
        for shard in strategy.tables.shards():
            shard.weight.mul_(0.5)


def _announced(strategy: Any) -> None:
    with strategy.writing_tables():
        _halve(strategy)


def _after_a_drain(strategy: Any) -> None:
    strategy.drain()
    _halve(strategy)


def _fits(*callbacks: Callable[[], L.Callback], **options: Any) -> list[tuple[Run, list[Any]]]:
    """Without overlap, and with it."""
    found = []
    for strategy in strategies():
        torch.manual_seed(0)
        made = [make() for make in callbacks]
        chosen = {"max_epochs": 2, "callbacks": made, "strategy": strategy, **options}
        run = fit(CountingModel(), my_loader(STEPS), **chosen)
        found.append((run, [getattr(callback, "read", None) for callback in made]))
    return found


def test_what_a_callback_reads() -> None:
    for (plain, (expected,)), (overlapped, (read,)) in run_distributed(_fits, 2, Reads):
        assert plain.losses == overlapped.losses
        assert overlapped.looked_ahead() == (2 * STEPS - 3, 3, 0)
        assert len(read) == 2 * STEPS and len(read[0]) == 2
        assert not torch.equal(read[0][0], read[1][0]), "the tables must move, or equality means nothing"
        assert_same(read, expected)


@pytest.mark.parametrize("step", [2, STEPS - 1])
def test_what_a_callback_writes(step: int) -> None:
    ranks = run_distributed(_fits, 2, lambda: Writes(step, _announced), Reads)
    assert_bitwise([(plain, overlapped) for (plain, _), (overlapped, _) in ranks])
    for (_, (_, expected)), (overlapped, (_, read)) in ranks:
        assert_same(read, expected)
        assert overlapped.looked_ahead() == ((6, 4, 0) if step == 2 else (7, 3, 0)), "rows fetched ahead are thrown away"


def _slowed(seconds: float, at_the_end: float, *callbacks: Callable[[], L.Callback]) -> list[tuple[Run, list[Any]]]:
    """Every update takes its time."""
    plain = LocalRows.update

    def slow(self: LocalRows, rows: Tensor, gradients: Tensor, settings: Any) -> None:
        time.sleep(at_the_end if settings[0].step == 2 * STEPS - 1 else seconds)
        plain(self, rows, gradients, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRows, "update", slow)
        return _fits(*callbacks)


@pytest.mark.slow
def test_updates_that_are_late_for_a_reader() -> None:
    for (_, (expected,)), (_, (read,)) in run_distributed(_slowed, 2, 0.05, 0.05, Reads):
        assert_same(read, expected)


@pytest.mark.slow
def test_a_last_update_that_is_late_for_the_end_of_the_fit() -> None:
    ranks = run_distributed(_slowed, 2, 0.0, 2.0)
    assert_bitwise([(plain, overlapped) for (plain, _), (overlapped, _) in ranks])
    assert not any(overlapped.threads for _, (overlapped, _) in ranks)


def _writes_unannounced(writes: Callable[[Any], None]) -> str:
    try:
        fit(CountingModel(), my_loader(STEPS), callbacks=[Writes(2, writes)])
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("writes", [_halve, _after_a_drain])
def test_writing_unannounced_is_an_error(writes: Callable[[Any], None]) -> None:
    for told in run_distributed(_writes_unannounced, 2, writes):
        assert "with trainer.strategy.writing_tables()" in told and "'net.embeddings'" in told


class Half(CountingModel):
    """Under "ddp" there is no strategy to ask."""

    def __init__(self) -> None:
        super().__init__("sgd")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        if hasattr(self.trainer.strategy, "writing_tables"):
            _announced(self.trainer.strategy)
            return
        with torch.no_grad():
            for weight in self.net.embeddings.parameters():
                weight.mul_(0.5)


def _inside_a_window() -> list[Run]:
    found = []
    for strategy in ("ddp", "freescale"):
        torch.manual_seed(0)
        found.append(fit(Half(), my_loader(STEPS), max_epochs=2, strategy=strategy, accumulate_grad_batches=2))
    return found


def test_written_between_the_batches_of_one_step() -> None:
    """The gradients that were there before stay."""
    ranks = run_distributed(_inside_a_window, 2)
    for ddp, mine in ranks:
        assert mine.losses == pytest.approx(ddp.losses, rel=1e-5)
    assert_same(ranks[0][1].weights, ranks[0][0].weights, rtol=1e-4, atol=1e-6)
