"""Where a rank is gone, late or elsewhere, every rank gets an error that names it, soon, and the lane ends there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import executor as executor_room
from lightning_freescale.comm import p2p as p2p_room
from lightning_freescale.comm.priority import PRIORITY_GATE
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import AT_ONCE, SOON, Outcome, everyone_sends, make_group, nothing_left, outcome

Survivors = Callable[..., dict[int, Any]]
LARGE = 2_000_000
"""Rows; hundreds of chunks of the size below."""
CHUNK = 16 * 1024
CUT = 10.0
"""Seconds: the timeout where a message may be cut in the middle, as gloo tells who waits for it no sooner."""


def _all_to_all(group: Any, async_op: bool, sent: list[int], received: list[int]) -> Any:
    out = torch.empty(sum(received), dtype=torch.uint8)
    return dist.all_to_all_single(out, torch.ones(sum(sent), dtype=torch.uint8), received, sent, group, async_op)


def _misfit(group: Any, async_op: bool, rows: int) -> Any:
    """Rank 1 is to send rank 0 a row less than rank 0 expects."""
    rank, n = group.rank(), group.size()
    return _all_to_all(group, async_op, [rows - (rank == 1 and k == 0) for k in range(n)], [rows] * n)


def _gather_on_one(group: Any, async_op: bool) -> Any:
    if group.rank() != 1:
        return dist.all_to_all_single(torch.empty(6), torch.ones(6), group=group, async_op=async_op)
    parts = [torch.empty(6 // group.size()) for _ in range(group.size())]
    return dist.all_gather(parts, torch.ones_like(parts[0]), group, async_op)


def _other_dtype_on_one(group: Any, async_op: bool) -> Any:
    dtype = torch.int32 if group.rank() == 1 else torch.float32
    return dist.all_to_all_single(torch.empty(6, dtype=dtype), torch.ones(6, dtype=dtype), group=group, async_op=async_op)


AGREED: dict[str, tuple[Callable[[Any, bool], Any], str]] = {
    "small parts that do not fit": (lambda group, async_op: _misfit(group, async_op, 9), "split sizes that fit"),
    "large parts that do not fit": (lambda group, async_op: _misfit(group, async_op, LARGE), "split sizes that fit"),
    "one row where none is expected": (lambda group, async_op: _misfit(group, async_op, 1), "split sizes that fit"),
    "another collective on one rank": (_gather_on_one, "all_gather"),
    "another dtype on one rank": (_other_dtype_on_one, "torch.int32"),
}


def _end_of_lane(case: str, async_op: bool) -> list[Outcome]:
    with nothing_left():
        group = make_group(chunk_bytes=CHUNK)
        assert everyone_sends(group)
        seen = [outcome(AGREED[case][0], group, async_op)]
        seen += [outcome(everyone_sends, group, async_op=again) for again in (False, True, False)]
        dist.barrier()  # nobody has its error from a group that is destroyed
        dist.destroy_process_group(group)
        del group
    return seen


def _assert_ended(seen: list[Outcome], words: str, first: int = 0) -> None:
    """From the first or, where that was none of this rank's business, the next collective on, for one reason, at once."""
    failed = seen[first:]
    assert all(each.kind == "DistBackendError" for each in failed), seen
    assert all(each.text.startswith("freescale all_") and "lane 'rows'" in each.text for each in failed), failed
    assert all(words in each.text for each in failed), failed
    assert failed[0].seconds < SOON
    assert all(each.seconds < AT_ONCE and each.text == failed[0].text for each in failed[1:]), failed


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", AGREED)
def test_ranks_that_do_not_agree_all_fail_and_the_lane_ends(case: str, size: int, async_op: bool) -> None:
    for rank, seen in enumerate(run_distributed(_end_of_lane, size, case, async_op, timeout=60)):
        _assert_ended(seen, AGREED[case][1], first=int(rank == 2 and not seen[0].kind))
        if rank == 0:
            assert seen[0].kind and "rank 1 " in seen[0].text


def _assert_gone(by_survivor: list[list[Outcome]], victim: int) -> None:
    """All name it; but rank 0 takes the store with it, so a rank may know only who gave up because of it."""
    for seen in by_survivor:
        _assert_ended(seen, " is gone" if victim == 0 else f"rank {victim} is gone")
    assert any(f"rank {victim} is gone" in seen[0].text for seen in by_survivor)


def _dies_before(victim: int) -> list[list[Outcome]]:
    with nothing_left():
        groups = [make_group(), make_group()]
        assert all(everyone_sends(group) for group in groups)
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = [
            [outcome(everyone_sends, group, async_op=async_op) for _ in range(3)]
            for group, async_op in zip(groups, (False, True))
        ]
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group
    return seen


@pytest.mark.parametrize(("size", "victim"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 0)])
def test_a_killed_rank_is_an_error_for_all_others(survivors: Survivors, size: int, victim: int) -> None:
    alive = survivors(_dies_before, size, victim)
    assert set(alive) == set(range(size)) - {victim}
    for seen in zip(*alive.values()):
        _assert_gone(list(seen), victim)


def _after_chunks(act: Callable[[], Any], chunks: int = 5) -> None:
    """``act`` while this process is in the middle of a transfer."""
    gone, yield_to_higher = iter(range(chunks)), PRIORITY_GATE.yield_to_higher

    def instead(*args: Any) -> None:
        if next(gone, None) is None:
            act()
        yield_to_higher(*args)

    PRIORITY_GATE.yield_to_higher = instead


def _dies_within(victim: int, async_op: bool, die: Callable[[], Any], last: Callable[[], Any] = bool) -> list[Outcome]:
    rank, n = dist.get_rank(), dist.get_world_size()
    with nothing_left():
        group = make_group(chunk_bytes=CHUNK, timeout=CUT)
        assert everyone_sends(group)
        if rank == victim:
            _after_chunks(die)
        seen = [outcome(_all_to_all, group, async_op, [LARGE] * n, [LARGE] * n)]
        seen += [outcome(everyone_sends, group)]
        last()
        dist.destroy_process_group(group)
        del group
    return seen


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("size", "victim"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 0)])
def test_a_rank_killed_within_a_large_transfer_is_an_error_for_all_others(
    survivors: Survivors, size: int, victim: int, async_op: bool
) -> None:
    alive = survivors(_dies_within, size, victim, async_op, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert set(alive) == set(range(size)) - {victim}
    _assert_gone(list(alive.values()), victim)


def _dies_with_a_message_half_sent() -> list[Outcome]:
    group, message = make_group(timeout=3.0), torch.ones(800_000_000, dtype=torch.uint8)
    p2p, tag = group._executor.p2p, 1001
    receive = p2p.receive(message, 1, tag) if dist.get_rank() == 0 else None
    dist.barrier()
    if receive is None:
        send = p2p.send(message, 0, tag)
        os.kill(os.getpid(), signal.SIGKILL)
        del send
    seen = outcome(lambda: p2p.wait(receive, 1, timedelta(seconds=3.0)))
    dist.destroy_process_group(group)
    return [seen]


def test_a_rank_killed_with_a_message_half_sent_is_gone_not_late(survivors: Survivors) -> None:
    (seen,) = survivors(_dies_with_a_message_half_sent, 2)[0]
    assert seen.kind == "DistBackendError" and seen.text.startswith("rank 1 is gone") and seen.seconds < SOON


def _raises(async_op: bool) -> list[Outcome]:
    group = make_group()
    assert everyone_sends(group)
    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    return [outcome(everyone_sends, group, async_op=async_op) for _ in range(2)]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_rank_that_raises_in_user_code_and_exits_is_an_error_for_all_others(survivors: Survivors, async_op: bool) -> None:
    alive = survivors(_raises, 3, async_op)
    assert set(alive) == {0, 2}
    for seen in alive.values():
        _assert_ended(seen, "rank 1 is gone")


def _error_within(async_op: bool) -> list[Outcome]:
    def fail() -> None:
        raise MemoryError("no room for a chunk")

    return _dies_within(1, async_op, fail, last=dist.barrier)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_of_one_rank_within_a_transfer_reaches_all_with_its_reason(size: int, async_op: bool) -> None:
    for rank, seen in enumerate(run_distributed(_error_within, size, async_op, timeout=60)):
        _assert_ended(seen, "no room for a chunk" if rank == 1 else "rank 1 has given up: ")
        assert "no room for a chunk" in seen[0].text


def _ends_with_a_message_posted() -> str:
    executor_room.GRACE_SECONDS = 30.0
    group = make_group()
    executor, tag, message = group._executor, 1001, torch.zeros(1, dtype=torch.uint8)
    assert everyone_sends(group)
    if dist.get_rank() == 1:
        dist.barrier()
        time.sleep(0.3)  # the other one is ending by now
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
    p2p_room._MAY_KNOW_BETTER = timedelta(seconds=30)
    group, message = make_group(), torch.zeros(1, dtype=torch.uint8)
    p2p = group._executor.p2p
    if dist.get_rank() == 1:
        time.sleep(1.0)
        p2p.abort("it waited for another one")
        return ""
    return outcome(p2p.wait, p2p.receive(message, 1, 1001), 1, timedelta(seconds=0.2)).text


def test_who_waits_for_a_late_rank_hears_why_it_is_late() -> None:
    assert "it waited for another one" in run_distributed(_late_for_a_reason, 2)[0]
