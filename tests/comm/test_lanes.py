"""Lanes of one process: a higher one goes first, a lower one still moves, none waits for another in a circle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import everyone_sends, lane_threads, make_group

Options = dict[str, Any]
CHUNK = 1024
LOW_ROUNDS, HIGH_ROUNDS = 1000, 50
ON_THEIR_WAY = 64
"""The most chunks that may be posted before the lane looks again whether to pause."""


class Counted:
    """A group whose chunks are counted as they are posted, and a message of so many rounds over it."""

    def __init__(self, **options: Any) -> None:
        self.group = make_group(chunk_bytes=CHUNK, **options)
        self.posted = 0
        self.before: Callable[[], None] = lambda: None
        p2p = self.group._executor.p2p
        self._send, p2p.send = p2p.send, self._counted

    def _counted(self, message: torch.Tensor, peer: int, tag: int) -> Any:
        if tag % 2:  # a chunk, not a header
            self.before()
            self.posted += 1
        return self._send(message, peer, tag)

    def issue(self, rounds: int) -> tuple[Any, Callable[[], bool]]:
        """The Work, and whether the right bytes have come."""
        n, rank = self.group.size(), self.group.rank()
        given = torch.full((rounds * CHUNK * n,), rank + 1, dtype=torch.uint8)
        out = torch.zeros_like(given)
        work = dist.all_to_all_single(out, given, group=self.group, async_op=True)
        return work, lambda: torch.equal(out, torch.arange(1, n + 1, dtype=torch.uint8).repeat_interleave(rounds * CHUNK))


def _until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.0005)
    return true()


def _both(low_options: Options, high_options: Options, before: Callable[[Counted], None]) -> tuple[int, bool, bool]:
    """Chunks that a low lane posts while a high one is at work; whether the low one was still at work after it; the bytes."""
    low, high = Counted(name="low", **low_options), Counted(name="high", **high_options)
    at: list[int] = []
    began = threading.Event()
    low.before = lambda: began.wait(30 if low.posted == 20 else 0)
    low_work, low_right = low.issue(LOW_ROUNDS)
    assert _until(lambda: low.posted == 20)

    def look() -> None:
        began.set()
        before(low)
        at.append(low.posted)

    high.before = look
    high_work, high_right = high.issue(HIGH_ROUNDS)
    # told by the thread that ends it: this one may be late to look
    unfinished = high_work.get_future().then(lambda _: not low_work.is_completed())
    high_work.wait()
    low_work.wait()
    return at[-1] - 20, unfinished.wait(), high_right() and low_right()


def _some_time(low: Counted) -> None:
    time.sleep(0.002)


def _a_chunk(low: Counted) -> None:
    """Lets the low lane go on, for as long as it needs to if it does not pause."""
    posted = low.posted
    _until(lambda: low.posted > posted or low.posted == LOW_ROUNDS, 1.0)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_low_lane_pauses_while_a_high_one_is_at_work(size: int) -> None:
    options = {"priority": 0, "max_pause_seconds": 30.0}, {"priority": 5}
    for posted, unfinished, right in run_distributed(_both, size, *options, _some_time, timeout=60):
        assert posted <= ON_THEIR_WAY
        assert unfinished
        assert right


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ({"priority": 1}, {"priority": 1}),
        ({"priority": 2}, {"priority": 1}),
        ({"priority": 0}, {"priority": 1, "preempt_below_bytes": 2 * CHUNK * HIGH_ROUNDS}),
        ({"priority": 0, "max_pause_seconds": 0.0}, {"priority": 1}),
    ],
    ids=["same priority", "lower priority", "large collective", "no pause"],
)
def test_a_lane_goes_on_where_it_need_not_pause(low: Options, high: Options) -> None:
    low = {"max_pause_seconds": 30.0, **low}
    for posted, _, right in run_distributed(_both, 2, low, high, _a_chunk, timeout=60):
        assert posted >= HIGH_ROUNDS - 1
        assert right


def test_a_lane_pauses_for_a_collective_just_small_enough() -> None:
    options = {"max_pause_seconds": 30.0}, {"priority": 1, "preempt_below_bytes": 2 * CHUNK * HIGH_ROUNDS + 1}
    for posted, unfinished, right in run_distributed(_both, 2, *options, _some_time, timeout=60):
        assert posted <= ON_THEIR_WAY and unfinished and right


def _busy() -> tuple[int, bool]:
    """The high lane has chunks, and posts them without a break, until this thread has seen the low one get on."""
    low, high = Counted(name="low", max_pause_seconds=0.03), Counted(name="high", priority=1)
    enough, looked = 12, threading.Event()

    def busy() -> None:
        if not looked.is_set():
            time.sleep(0.001)

    high.before = busy
    high_work, high_right = high.issue(6000)
    assert _until(lambda: high.posted > 5)
    low_work, low_right = low.issue(2 * enough)
    assert _until(lambda: low.posted >= enough, 30)
    at_work = not high_work.is_completed()
    looked.set()
    high_work.wait()
    low_work.wait()
    return at_work, low_right() and high_right()


@pytest.mark.slow
def test_a_high_lane_that_is_always_busy_does_not_starve_a_low_one() -> None:
    assert run_distributed(_busy, 2, timeout=100) == [(True, True)] * 2


def _crossed(rounds: int) -> tuple[bool, bool]:
    """Rank 0 waits in the high lane for rank 1, which waits in the low one for rank 0."""
    low, high = Counted(name="low", max_pause_seconds=0.1), Counted(name="high", priority=1)
    if dist.get_rank() == 0:
        high_work, high_right = high.issue(rounds)
        assert _until(lambda: len(lane_threads()) == 1)
        low_work, low_right = low.issue(rounds)
        high_work.wait()
        low_work.wait()
    else:
        for lane in (low, high):
            work, right = lane.issue(rounds)
            work.wait()
            low_right, high_right = (right, lambda: True) if lane is low else (low_right, right)
    return low_right(), high_right()


def test_lanes_that_wait_for_each_other_crosswise_come_to_an_end() -> None:
    """And soon: 2000 chunks with a pause each would take 200 seconds."""
    assert run_distributed(_crossed, 2, 2000, timeout=60) == [(True, True)] * 2


def _order() -> tuple[list[int], list[str], bool]:
    group = make_group()
    moved: list[tuple[int, str]] = []
    handshake = group._executor._handshake
    exchange_headers = handshake.exchange_headers

    def noted(transfer: Any, *rest: Any) -> None:
        moved.append((transfer.sequence_number, threading.current_thread().name))
        exchange_headers(transfer, *rest)

    handshake.exchange_headers = noted
    sound = [everyone_sends(group, rows=1000)]
    threads = lane_threads()
    issued = []
    for rows in (50_000, 1, 3000):
        given = torch.arange(2.0).repeat_interleave(rows) + 10 * dist.get_rank()
        out = torch.empty_like(given)
        issued.append((dist.all_to_all_single(out, given, group=group, async_op=True), out, rows))
    sound += [everyone_sends(group, rows=7), everyone_sends(group, rows=500)]
    for work, out, rows in reversed(issued):
        assert work.is_completed()  # they came before the others
        sound.append(torch.equal(out, torch.tensor([0.0, 10.0]).repeat_interleave(rows) + dist.get_rank()))
    assert not threads
    numbers, names = zip(*moved)
    return list(numbers), list(names), all(sound)


def test_a_lane_keeps_the_order_of_sync_and_async_calls_and_who_waits_does_the_work() -> None:
    for numbers, names, sound in run_distributed(_order, 2):
        assert numbers == [0, 1, 2, 3, 4, 5]
        assert names[0] == "MainThread"
        assert names[1:4] == ["freescale lane rows"] * 3
        assert sound
