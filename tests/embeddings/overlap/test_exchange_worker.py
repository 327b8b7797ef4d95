"""A collection's worker: after a failure nothing more is run."""

from __future__ import annotations

import time
from typing import NoReturn

import pytest
import torch

from lightning_freescale.embeddings.overlap.exchange_worker import ExchangeWorker
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.profiling.recording.timeline import Timeline


def _fail(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize("error", [ValueError("wrong ids"), OSError("connection closed"), KeyboardInterrupt("stop")])
def test_jobs_behind_a_failed_one_fail_alike_without_being_run(error: BaseException) -> None:
    worker, ran = ExchangeWorker("items", torch.device("cpu"), ExchangeStatistics()), []
    done = worker.submit(ran.append, 1)
    failed, behind = worker.submit(_fail, error), worker.submit(ran.append, 2)
    worker.wait(done)
    raised = [future.exception(timeout=30.0) for future in (failed, behind)]
    assert raised[0] is raised[1] is worker.error and ran == [1]
    with pytest.raises(type(raised[0])):
        worker.wait(worker.submit(ran.append, 3))
    if isinstance(error, ValueError):
        assert raised[0] is error, "it says by itself what is wrong"
    else:
        assert str(raised[0]) == f"embedding exchange of collection 'items': {error}" and raised[0].__cause__ is error
    assert worker.stop(timeout=30.0)


def test_rows_that_were_there_before_anybody_waited_are_seen_to_be() -> None:
    """Else their exchange would seem to last as long as whatever the rank did meanwhile."""
    worker, timeline = ExchangeWorker("items", torch.device("cpu"), ExchangeStatistics()), Timeline()
    timeline.enable(torch.device("cpu"))
    timeline.open_step()
    worker.observer = timeline
    worker.arrive()
    early, late = worker.submit(time.sleep, 0.01), worker.submit(time.sleep, 0.02)
    late.result()
    time.sleep(0.05)
    worker.await_rows(early, None, late)
    worker.arrive()
    worker.await_rows(worker.submit(time.sleep, 0.05))
    step = timeline.close_step()
    assert step is not None
    before, during = step.collectives
    assert before.arrive < before.done < before.start <= before.end
    assert during.start < during.done <= during.end
    assert worker.stop(timeout=30.0)
