"""A worker runs no job after a failure, and all ranks launch exchanges by NCCL in the same order."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm import ProcessGroupFreeScale
from lightning_freescale.embeddings.overlap import id_exchange
from lightning_freescale.embeddings.overlap.report import ExchangeStatistics
from lightning_freescale.embeddings.overlap.transport import ExchangeWorker, LaunchOrder, refuse_one_queue
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.helpers.sequences import OPTIMIZERS, PATHS, batches, train_overlapped


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
        assert str(raised[0]) == f"Embedding exchange of collection 'items': {error}" and raised[0].__cause__ is error
    assert worker.stop(timeout=30.0)


def test_rows_that_were_there_before_anybody_waited_are_seen_to_be() -> None:
    """Otherwise the exchange would seem to last as long as other work of the rank."""
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


STEPS = 8


def _launched(ordered: bool) -> list[str]:
    """Return the launches of this rank, in order; every rank is late with another collection."""
    names: list[str] = []
    late, exchange = PATHS[dist.get_rank() % len(PATHS)], ProcessGroupFreeScale.exchange

    def launched(group: ProcessGroupFreeScale, received: Tensor, send: Tensor, *args: Any, **kwargs: Any) -> None:
        if send.dtype == torch.float32 and "timeout" not in kwargs:  # others go from host to host: numbers or the farewell
            time.sleep(0.05 * (group.options.name == late and len(names) < 10))
            names.append(group.options.name)
        exchange(group, received, send, *args, **kwargs)

    with (
        patch.object(id_exchange, "heads_travel_apart", lambda device: True),
        patch.multiple(ProcessGroupFreeScale, moves_by_nccl=ordered, connect=lambda group: None, exchange=launched),
    ):
        train_overlapped(OPTIMIZERS["rowwise_adagrad"], batches(dist.get_rank(), STEPS))
    return names


def _both() -> tuple[list[str], list[str]]:
    return _launched(True), _launched(False)


def test_all_ranks_launch_in_one_order() -> None:
    (first, first_unordered), (second, unordered) = run_distributed(_both, 2)
    assert first == second and all(first.count(path) > 4 * (STEPS - 1) for path in PATHS)
    assert sorted(first_unordered) == sorted(unordered) and first_unordered != unordered, "else the test could not fail"


def test_turns_are_taken_by_number() -> None:
    order, taken = LaunchOrder(timedelta(seconds=30)), []
    numbers = [next(order.numbers) for _ in range(5)]

    def launch(number: int) -> None:
        with order.turn(number):
            taken.append(number)

    threads = [threading.Thread(target=launch, args=(number,), daemon=True) for number in reversed(numbers)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(30)
    assert taken == numbers == [0, 1, 2, 3, 4]


def test_a_turn_that_does_not_come_is_an_error_in_time() -> None:
    order = LaunchOrder(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"Exchange 1 .* 0\.1 s .*exchange 0"), order.turn(1):
        pass


def test_who_waits_for_a_collection_that_has_failed_hears_of_it() -> None:
    order, device = LaunchOrder(timedelta(minutes=5)), torch.device("cpu")
    items, tags = (ExchangeWorker(path, device, ExchangeStatistics(), order) for path in ("items", "tags"))
    next(order.numbers)  # for items, which does not launch

    def launch(number: int) -> None:
        with order.turn(number):
            raise AssertionError("not before the other")

    def fail() -> None:
        time.sleep(0.2)
        raise OSError("no memory")

    waiting, failed = tags.submit(launch, next(order.numbers)), items.submit(fail)
    assert "no memory" in str(failed.exception(30)) and "no memory" in str(waiting.exception(30))
    assert items.stop(30) and tags.stop(30)


def test_one_queue_of_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_one_queue()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        refuse_one_queue()
