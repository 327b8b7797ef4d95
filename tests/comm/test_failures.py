"""If a rank is dead, late or at another collective, every rank soon gets an error that names it, and the lane ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import process_group
from lightning_freescale.comm.collectives import executor as executor_module
from lightning_freescale.comm.transports import p2p as p2p_module
from lightning_freescale.comm.transports import selection
from lightning_freescale.comm.transports.priority import PRIORITY_GATE
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import (
    CALLS,
    CHUNK,
    LONG,
    SOON,
    Outcome,
    all_to_all,
    assert_ended,
    everyone_sends,
    exchange,
    make_group,
    nothing_left,
    outcome,
)

Survivors = Callable[..., dict[int, Any]]
TIMEOUT = 1.5
CUT = 10.0
"""The timeout in seconds for messages that may be cut in the middle, which gloo reports no sooner."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _assert_disconnected(by_survivor: list[list[Outcome]], victim: int) -> None:
    """Check that all errors name the victim. The store ends with rank 0, so a rank may name only the rank that gave up."""
    for seen in by_survivor:
        assert_ended(seen, "has disconnected" if victim == 0 else f"rank {victim} has disconnected")
    assert any(f"rank {victim} has disconnected" in seen[0].text for seen in by_survivor)


def _ends_before(victim: int, end: Callable[[], Any]) -> list[list[Outcome]]:
    with nothing_left():
        groups = [make_group() for _ in CALLS]
        assert all(everyone_sends(group) for group in groups)
        groups[-1].exchange(torch.empty(0), torch.empty(0), [0] * groups[-1].size(), [0] * groups[-1].size())
        exchange(groups[-1])
        if dist.get_rank() == victim:
            end()
        seen = [[outcome(call, group) for _ in range(3)] for group, call in zip(groups, CALLS.values())]
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group
    return seen


def _raise_in_user_code() -> None:
    raise KeyError("on purpose")


def _receive_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("on purpose"))
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("size", "victim", "end"),
    [(2, 1, _die), (3, 0, _die), (3, 1, _raise_in_user_code), pytest.param(3, 1, _die, marks=pytest.mark.slow)],
)
def test_a_rank_that_ends_is_an_error_for_all_others(survivors: Survivors, size: int, victim: int, end: Any) -> None:
    alive = survivors(_ends_before, size, victim, end)
    assert set(alive) == set(range(size)) - {victim}
    for seen in zip(*alive.values()):
        _assert_disconnected(list(seen), victim)


# calls around the gather of a lane's set-up, and how many of them are made before
PLACES: dict[str, tuple[Any, str, int]] = {
    "before": (selection.RankHardware, "from_this_process", 0),
    "among the lengths": (p2p_module.GlooP2P, "send", 1),
    "among the values": (p2p_module.GlooP2P, "send", 3),
    "after": (process_group, "NativeBackends", 0),
}


def _ends_in_set_up(place: str, end: Callable[[], Any]) -> Outcome:
    """End rank 1. It keeps its error until the others have failed, as the Trainer does while callbacks handle the error."""
    owner, name, before = PLACES[place]
    call, left, start = getattr(owner, name), iter(range(before)), time.monotonic()

    def call_or_end(*args: Any) -> Any:
        return end() if dist.get_rank() == 1 and next(left, None) is None else call(*args)

    with nothing_left(), patch.object(owner, name, call_or_end):
        try:
            everyone_sends(make_group())
        except BaseException as error:
            seen = Outcome(type(error).__name__, str(error), time.monotonic() - start)
            if end is not _die:
                dist.barrier()
    assert not any(PRIORITY_GATE.lanes.values())
    return seen


@pytest.mark.parametrize(
    ("end", "places"),
    [
        *((_raise_in_user_code, PLACES), (_receive_sigterm, PLACES), (_die, ["among the lengths"])),
        *(pytest.param(_die, [place], marks=pytest.mark.slow) for place in ("before", "among the values", "after")),
    ],
)
def test_a_rank_that_ends_in_the_set_up_of_a_lane_is_an_error_for_all_others(
    survivors: Survivors, end: Any, places: Any
) -> None:
    alive = survivors(lambda: [_ends_in_set_up(place, end) for place in places], 3)
    assert set(alive) == ({0, 2} if end is _die else {0, 1, 2})
    for seen in alive[0] + alive[2]:
        assert seen.kind == "DistBackendError" and "rank 1 has" in seen.text and seen.seconds < SOON, seen
        assert end is _die or "on purpose" in seen.text, seen


def _after_chunks(act: Callable[[], Any], chunks: int = 5) -> None:
    left, yield_to_higher = iter(range(chunks)), PRIORITY_GATE.yield_to_higher

    def instead(*args: Any) -> None:
        if next(left, None) == chunks - 1:
            act()
        yield_to_higher(*args)

    PRIORITY_GATE.yield_to_higher = instead


def _ends_within(kind: str, timeout: float, act: Callable[[], Any], last: Callable[[], Any] = bool) -> list[Outcome]:
    """Run ``act`` on the victim within a long transfer."""
    with nothing_left():
        group = make_group(chunk_bytes=CHUNK, timeout=timeout)
        assert everyone_sends(group)
        act()
        seen = [outcome(CALLS[kind], group, LONG), outcome(CALLS[kind], group)]
        last()
        dist.destroy_process_group(group)
        del group
    return seen


def _on(victim: int, act: Callable[[], Any]) -> Callable[[], None]:
    return lambda: _after_chunks(act) if dist.get_rank() == victim else None


@pytest.mark.parametrize(
    ("kind", "size", "victim"),
    [
        *(("sync", 2, 1), ("async", 3, 0), ("exchange", 2, 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("async", 3, 1), ("exchange", 3, 1), ("exchange", 3, 0)]),
    ],
)
def test_a_rank_killed_within_a_long_transfer_is_an_error_for_all_others(
    survivors: Survivors, kind: str, size: int, victim: int
) -> None:
    alive = survivors(_ends_within, size, kind, CUT, _on(victim, _die))
    assert set(alive) == set(range(size)) - {victim}
    _assert_disconnected(list(alive.values()), victim)


def _dies_with_a_message_half_sent() -> Outcome:
    group, message = make_group(timeout=3.0), torch.ones(400_000_000, dtype=torch.uint8)
    p2p, tag = group._executor.p2p, 1001
    receive = p2p.receive(message, 1, tag) if dist.get_rank() == 0 else None
    dist.barrier()
    if receive is None:
        send = p2p.send(message, 0, tag)
        _die()
        del send
    seen = outcome(lambda: p2p.wait(receive, 1, timedelta(seconds=3.0)))
    dist.destroy_process_group(group)
    return seen


def test_a_rank_killed_with_a_message_half_sent_has_disconnected(survivors: Survivors) -> None:
    for _ in range(5):
        seen = survivors(_dies_with_a_message_half_sent, 2)[0]
        if seen.kind:  # otherwise the whole message arrived, because rank 1 was preempted before it died
            break
    assert seen.kind == "DistBackendError" and seen.text.startswith("rank 1 has disconnected") and seen.seconds < SOON


def _fail() -> None:
    raise MemoryError("the chunk of rank 1")


@pytest.mark.parametrize(("kind", "size"), [("sync", 2), ("async", 2), pytest.param("async", 3, marks=pytest.mark.slow)])
def test_an_error_of_one_rank_within_a_transfer_reaches_all_with_its_reason(kind: str, size: int) -> None:
    for rank, seen in enumerate(run_distributed(_ends_within, size, kind, CUT, _on(1, _fail), dist.barrier, timeout=60)):
        assert_ended(seen, "the chunk of rank 1", "MemoryError", *(["rank 1 has given up"] if rank != 1 else []))


def _assert_gave_up(seen: list[Outcome], rank: int, waited: bool = True) -> None:
    assert_ended(seen, "rank 1 did not respond", f"{TIMEOUT:g} s")
    assert seen[0].seconds > TIMEOUT / 2 or rank == 1 or not waited
    assert rank != 1 or "has given up" in seen[0].text


def _comes_late() -> list[list[Outcome]]:
    """Start rank 1 once all others have given up."""
    with nothing_left():
        groups = [make_group(timeout=TIMEOUT) for _ in CALLS]
        assert all(everyone_sends(group) for group in groups)
        if dist.get_rank() == 1:
            dist.barrier()
        work = all_to_all(groups[1], async_op=True)
        firsts = [outcome(all_to_all, groups[0]), outcome(work.wait), outcome(exchange, groups[2])]
        seen = [[first, outcome(call, group)] for first, call, group in zip(firsts, CALLS.values(), groups)]
        if dist.get_rank() != 1:
            dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group, work
    return seen


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named_after_the_timeout_and_hears_of_it_when_it_comes(size: int) -> None:
    for rank, (sync, later, exchanged) in enumerate(run_distributed(_comes_late, size, timeout=60)):
        _assert_gave_up(sync, rank)
        _assert_gave_up(later, rank, waited=False)  # while the first call waited
        _assert_gave_up(exchanged, rank)


@pytest.mark.parametrize(("kind", "size"), [("sync", 2), pytest.param("sync", 3, marks=pytest.mark.slow)])
def test_a_rank_that_stops_within_a_transfer_is_named_after_the_timeout(kind: str, size: int) -> None:
    def all_meet() -> None:
        if dist.get_rank() != 1:
            dist.barrier()

    stopping = run_distributed(_ends_within, size, kind, TIMEOUT, _on(1, dist.barrier), all_meet, timeout=60)
    for rank, seen in enumerate(stopping):
        _assert_gave_up(seen, rank)


def _ends_with_a_message_posted() -> str:
    executor_module.GRACE_SECONDS = 30.0
    group = make_group()
    executor, tag, message = group._executor, 1001, torch.zeros(1, dtype=torch.uint8)
    assert everyone_sends(group)
    if dist.get_rank() == 1:
        dist.barrier()
        time.sleep(0.3)  # the other thread is ending now
        executor.p2p.send(message + 7, 0, tag).wait()
        dist.barrier()
        return ""
    receive = executor.p2p.receive(message, 1, tag)
    arrived = executor._worker.submit(receive.wait)
    dist.barrier()
    executor.abort()
    dist.barrier()
    return f"{arrived.result(0)} {message.item()} {outcome(executor.p2p.receive, message, 1, tag).kind}"


def test_what_has_been_posted_arrives_before_a_lane_is_closed() -> None:
    assert run_distributed(_ends_with_a_message_posted, 2) == ["True 7 DistBackendError", ""]


def _late_for_a_reason() -> str:
    p2p_module._MAY_KNOW_BETTER = timedelta(seconds=30)
    p2p, message = make_group()._executor.p2p, torch.zeros(1, dtype=torch.uint8)
    if dist.get_rank() == 1:
        time.sleep(1.0)
        p2p.abort("it waited for another one")
        return ""
    return outcome(p2p.wait, p2p.receive(message, 1, 1001), 1, timedelta(seconds=0.2)).text


def test_a_rank_that_waits_for_a_late_rank_hears_why_it_is_late() -> None:
    assert "it waited for another one" in run_distributed(_late_for_a_reason, 2)[0]


def _interrupted() -> Outcome:
    group = make_group()
    assert everyone_sends(group)
    if dist.get_rank() == 1:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        group._executor._handshake.exchange_headers = interrupt
        with pytest.raises(KeyboardInterrupt):
            everyone_sends(group)
    return outcome(everyone_sends, group)


def test_an_interrupt_ends_the_lane_on_all_ranks() -> None:
    assert all("KeyboardInterrupt" in seen.text for seen in run_distributed(_interrupted, 2, timeout=60))
