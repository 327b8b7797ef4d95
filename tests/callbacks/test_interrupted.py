"""An interrupted run leaves a report of its completed steps."""

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
    """A callback that ends the run after some batches, on one rank or on all."""

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


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _run(folder: Path, how: Any, after: int, ranks: tuple[int, ...] = (0, 1), freescale: bool = False) -> str:
    ends, began = Ends(how, after, ranks), time.monotonic()
    try:
        if freescale:
            torch.manual_seed(0)
            data = Samples(8 * 14)
            loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate)
            trainer(devices=2, callbacks=[profiler(folder), ends]).fit(Recommender(), loader)
        else:
            fit(Plain(), [profiler(folder), ends], strategy=DDPStrategy(timeout=timedelta(seconds=5)))
    except BaseException as error:
        ended = type(error).__name__
    else:
        ended = "finished"
    assert time.monotonic() - began < 60
    return ended


def _is_incomplete(folder: Path, reason: str, steps: int = 8) -> bool:
    """Return whether all files name the interruption and the report has at least ``steps`` steps."""
    document = read(folder / "report.json")
    status = document["status"]
    assert not status["complete"] and reason in status["reason"] and summary(document).startswith("INCOMPLETE: ")
    assert packed(folder / "report.html")[0][0]["status"] == status
    return len(document["ranks"]) == 2 and len(document["series"]["step"]) >= steps


def test_all_ranks_end_at_once_and_the_next_fit_is_not_bothered(tmp_path: Path) -> None:
    def run() -> list[int]:
        _run(tmp_path / "raised", _raise, 12)
        _run(tmp_path / "interrupted", _interrupt, 12)
        _run(tmp_path / "alone", _raise, 4)
        _run(tmp_path / "nothing", _raise, 1)
        callback, steps = profiler(tmp_path / "again"), []
        for _ in range(2):
            fit(Plain(), [callback])
            steps.append(0 if callback.report is None else len(callback.report.steps))
        return steps

    assert run_distributed(run, 2, init=False) == [[13, 13], [0, 0]]
    assert read(tmp_path / "again" / "report.json")["status"]["complete"]
    for name, reason in (("raised", "the model broke"), ("interrupted", "KeyboardInterrupt")):
        assert _is_incomplete(tmp_path / name, reason), name
        document = read(tmp_path / name / "report.json")
        assert document["series"]["step"] == list(range(1, 9)), "two exchanges of four steps"
        assert document["status"]["not_exchanged"] == 12 - 1 - 8
    # before any exchange the steps are those of rank 0, before the first step there are none
    document = read(tmp_path / "alone" / "report.json")
    assert [rank["rank"] for rank in document["ranks"]] == [0] and document["run"]["world_size"] == 2
    assert document["series"]["step"] == [1, 2, 3]
    assert not document["wait_attribution"]["aligned"] and "rank 0" in document["wait_attribution"]["reason"]
    assert list((tmp_path / "nothing").iterdir()) == []


def test_a_run_that_is_told_to_stop(tmp_path: Path) -> None:
    """Send SIGTERM to all ranks or to one, as a scheduler does; the report has the steps until then."""
    runs = ((False, (0, 1)), (True, (1,)), (True, (0,)), (True, (0, 1)))
    cases = {f"{freescale} {ranks}": (_terminate, 12, ranks, freescale) for freescale, ranks in runs}

    def run() -> dict[str, str]:
        return {name: _run(tmp_path / name, *case) for name, case in cases.items()}

    assert run_distributed(run, 2) == [dict.fromkeys(cases, "SIGTERMException")] * 2
    assert [name for name in cases if not _is_incomplete(tmp_path / name, "SIGTERM")] == []


class _DiesAtTheEnd(L.Callback):
    """End one rank before the others finish."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(1.5)  # what the ranks have begun to exchange comes to its end
            _kill()


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_lost_at_the_end_does_not_take_the_report_along(tmp_path: Path) -> None:
    def run() -> None:
        strategy = DDPStrategy(timeout=timedelta(seconds=3))
        fit(Plain(), [_DiesAtTheEnd(), profiler(tmp_path)], strategy=strategy, limit_val_batches=0)

    with pytest.raises(Exception, match="died"):
        run_distributed(run, 2, init=False)
    document = read(tmp_path / "report.json")
    assert len(document["series"]["step"]) == 8, "two exchanges of four"
    assert document["status"]["not_exchanged"] == 14 - 1 - 8 and not document["status"]["complete"]
