"""A rank that does not come, or stops on the way, is an error for the others once the timeout is over, and then for itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.priority import PRIORITY_GATE
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import SOON, Outcome, everyone_sends, make_group, nothing_left, outcome

TIMEOUT = 1.5


def _late() -> list[list[Outcome]]:
    """Rank 1 comes once all others have given up; of two groups, one for each kind of call."""
    with nothing_left():
        groups = [make_group(timeout=TIMEOUT), make_group(timeout=TIMEOUT)]
        assert all(everyone_sends(group) for group in groups)
        if dist.get_rank() == 1:
            dist.barrier()
        work = dist.all_to_all_single(torch.empty(6), torch.ones(6), group=groups[1], async_op=True)
        seen = [[outcome(everyone_sends, groups[0]) for _ in range(2)]]
        seen += [[outcome(work.wait), outcome(everyone_sends, groups[1], async_op=True)]]
        if dist.get_rank() != 1:
            dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group, work
    return seen


def _assert_gave_up(seen: list[Outcome], waited: bool) -> None:
    first, second = seen
    assert first.kind == second.kind == "DistBackendError"
    assert first.text == second.text
    assert first.text.startswith("freescale all_to_all_single, lane 'rows': ")
    assert f"did not come within the timeout of {TIMEOUT:g} s" in first.text
    assert second.seconds < 1
    assert first.seconds < SOON
    assert first.seconds > TIMEOUT / 2 or not waited


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_never_comes_is_named_after_the_timeout_and_hears_of_it_when_it_does_come(size: int) -> None:
    for rank, (sync, later) in enumerate(run_distributed(_late, size, timeout=60)):
        _assert_gave_up(sync, waited=rank != 1)
        _assert_gave_up(later, waited=False)
        assert "rank 1 did not come" in sync[0].text and "rank 1 did not come" in later[0].text
        if rank == 1:
            assert "has given up" in sync[0].text and "has given up" in later[0].text


def _stops() -> list[Outcome]:
    """Rank 1 stops in the middle of a transfer until all others have given up."""
    with nothing_left():
        group, n = make_group(timeout=TIMEOUT, chunk_bytes=4096), dist.get_world_size()
        assert everyone_sends(group)
        chunks, yield_to_higher = iter(range(5)), PRIORITY_GATE.yield_to_higher

        def stop(*args: Any) -> None:
            if next(chunks, None) == 4:
                dist.barrier()
            yield_to_higher(*args)

        if dist.get_rank() == 1:
            PRIORITY_GATE.yield_to_higher = stop
        given = torch.ones(4_000_000 * n, dtype=torch.uint8)
        seen = [outcome(dist.all_to_all_single, torch.empty_like(given), given, group=group)]
        seen += [outcome(everyone_sends, group)]
        if dist.get_rank() != 1:
            dist.barrier()
        dist.destroy_process_group(group)
        del group
    return seen


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_stops_within_a_transfer_is_named_after_the_timeout(size: int) -> None:
    for rank, seen in enumerate(run_distributed(_stops, size, timeout=60)):
        _assert_gave_up(seen, waited=rank != 1)
        assert "rank 1 did not come" in seen[0].text


def _only_late() -> bool:
    group = make_group(timeout=TIMEOUT)
    if dist.get_rank() == 0:
        given, out = torch.arange(4.0), torch.empty(4)
        work = dist.all_to_all_single(out, given, group=group, async_op=True)
        early = work.is_completed()
        dist.barrier()  # rank 1 is here, and has not issued its part
        time.sleep(TIMEOUT / 5)
        return not early and not work.is_completed() and bool(dist.barrier() is None and work.wait())
    dist.barrier()
    dist.barrier()
    return outcome(dist.all_to_all_single, torch.empty(4), torch.ones(4), group=group).kind == ""


def test_a_rank_that_is_late_within_the_timeout_is_waited_for() -> None:
    assert run_distributed(_only_late, 2, timeout=60) == [True, True]


def _delegated_on_one() -> Outcome:
    group = make_group(timeout=TIMEOUT)
    tensor = torch.ones(6)
    if dist.get_rank() == 0:
        return outcome(dist.all_reduce, tensor, group=group)
    return outcome(dist.all_to_all_single, torch.empty(6), tensor, group=group)


def test_a_collective_of_torchs_own_on_one_rank_ends_in_the_timeout() -> None:
    seen = run_distributed(_delegated_on_one, 2, timeout=60)
    assert all(each.kind and each.seconds < SOON for each in seen)
    assert "rank 0 did not come within the timeout" in seen[1].text
