"""A run that ends before its time leaves a report of the steps it did."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_freescale import FreeScaleDataModule
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.text import summary
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_modules import Plain, fit, profiler
from tests.helpers.recommender import Recommender, Samples, collate, trainer
from tests.helpers.shown_page import packed


class Ends(L.Callback):
    """Ends the run after some batches, on one rank or on all."""

    def __init__(self, how: Any, after: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.how, self.after, self.ranks = how, after, ranks

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.after and trainer.global_rank in self.ranks:
            self.how()


def _raise() -> None:
    raise RuntimeError("the model broke")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run(folder: str, how: Any, after: int, ranks: tuple[int, ...] = (0, 1)) -> str:
    strategy = DDPStrategy(timeout=timedelta(seconds=5))
    began = time.monotonic()
    try:
        fit(Plain(), [profiler(folder), Ends(how, after, ranks)], strategy=strategy)
    except BaseException as error:
        ended = type(error).__name__
    else:
        ended = "finished"
    assert time.monotonic() - began < 60
    return ended


@pytest.mark.parametrize("how", [_raise, _interrupt])
def test_after_exchanges(how: Any, tmp_path: Path) -> None:
    run_distributed(_run, 2, str(tmp_path), how, 12, init=False)
    document = read(tmp_path / "report.json")
    status = document["status"]
    assert not status["complete"]
    assert ("the model broke" if how is _raise else "KeyboardInterrupt") in status["reason"]
    assert len(document["ranks"]) == 2
    assert document["series"]["step"] == list(range(1, 9)), "two exchanges of four steps"
    assert status["not_exchanged"] == 12 - 1 - 8
    assert packed(tmp_path / "report.html")[0][0]["status"] == status


@pytest.mark.slow
def test_before_any_exchange_the_steps_are_rank_0s(tmp_path: Path) -> None:
    run_distributed(_run, 2, str(tmp_path), _raise, 4, init=False)
    document = read(tmp_path / "report.json")
    assert [rank["rank"] for rank in document["ranks"]] == [0]
    assert document["run"]["world_size"] == 2
    assert document["series"]["step"] == [1, 2, 3]
    assert not document["wait_attribution"]["aligned"]
    assert "rank 0 alone" in document["wait_attribution"]["reason"]


def test_before_the_first_step_there_is_nothing(tmp_path: Path) -> None:
    run_distributed(_run, 2, str(tmp_path), _raise, 1, init=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_rank_raises(tmp_path: Path) -> None:
    """The others learn of it from the collective in which they wait; rank 0 writes what it knows."""
    ended = run_distributed(_run, 2, str(tmp_path), _raise, 12, (1,), init=False)
    assert "finished" not in ended
    document = read(tmp_path / "report.json")
    assert len(document["series"]["step"]) == 8
    assert not document["status"]["complete"]


@pytest.mark.slow
def test_a_killed_run_leaves_the_report_so_far(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="died"):
        run_distributed(_run, 2, str(tmp_path), _kill, 12, init=False)
    document = read(tmp_path / "report.json")
    assert document["status"]["reason"] == "still running"
    assert len(document["series"]["step"]) >= 4


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _recommend(folder: str, ranks: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    data = Samples(8 * 14)
    run = trainer(devices=2, callbacks=[profiler(folder), Ends(_terminate, 12, ranks)])
    try:
        run.fit(Recommender(), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate))
    except BaseException as error:
        return type(error).__name__
    return "finished"


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", (0, 1)),
        pytest.param("ddp", (0,), marks=pytest.mark.slow),
        ("freescale", (1,)),
        pytest.param("freescale", (0,), marks=pytest.mark.slow),
        pytest.param("freescale", (0, 1), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_stop(strategy: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    """By its scheduler, say, all ranks or the one that it knows: the report has the steps until then, and says so."""
    if strategy == "ddp":
        ended = run_distributed(_run, 2, str(tmp_path), _terminate, 12, ranks, init=False)
    else:
        ended = run_distributed(_recommend, 2, str(tmp_path), ranks)
    assert ended == ["SIGTERMException"] * 2
    document = read(tmp_path / "report.json")
    status = document["status"]
    assert not status["complete"] and "SIGTERM" in status["reason"]
    assert len(document["ranks"]) == 2 and len(document["series"]["step"]) >= 8
    assert packed(tmp_path / "report.html")[0][0]["status"]["reason"] == status["reason"]
    assert summary(document).startswith("INCOMPLETE: SIGTERM")


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_another_rank_than_0_alone_is_told_to_stop_under_ddp(tmp_path: Path) -> None:
    """Lightning broadcasts from rank 0, which knows of nothing and fails; the steps until then are in the report."""
    ended = run_distributed(_run, 2, str(tmp_path), _terminate, 12, (1,), init=False)
    assert ended[1] == "SIGTERMException" and ended[0] != "finished"
    document = read(tmp_path / "report.json")
    assert not document["status"]["complete"] and len(document["series"]["step"]) >= 8


def _twice(folder: str) -> list[int]:
    callback, steps = profiler(folder), []
    _run(folder, _raise, 12)
    for _ in range(2):
        fit(Plain(), [callback])
        steps.append(0 if callback.report is None else len(callback.report.steps))
    return steps


@pytest.mark.slow
def test_the_next_fit_is_not_bothered(tmp_path: Path) -> None:
    assert run_distributed(_twice, 2, str(tmp_path), init=False)[0] == [13, 13]
    assert read(tmp_path / "report.json")["status"]["complete"]


class _DiesAtTheEnd(L.Callback):
    """A rank is gone when the others come to the end."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(1.5)  # what the ranks have begun to exchange comes to its end
            _kill()


def _lost_at_the_end(folder: str) -> None:
    strategy = DDPStrategy(timeout=timedelta(seconds=3))
    fit(Plain(), [_DiesAtTheEnd(), profiler(folder)], strategy=strategy, limit_val_batches=0)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_lost_at_the_end_does_not_take_the_report_along(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="died"):
        run_distributed(_lost_at_the_end, 2, str(tmp_path), init=False)
    document = read(tmp_path / "report.json")
    assert len(document["series"]["step"]) == 8, "two exchanges of four"
    assert document["status"]["not_exchanged"] == 14 - 1 - 8
    assert not document["status"]["complete"]
