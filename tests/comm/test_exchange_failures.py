"""An exchange that cannot be done is an error that names the rank, on every rank, and the lane ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import SOON, Outcome, make_group, nothing_left, outcome

Survivors = Callable[..., dict[int, Any]]
SHORT, LONG = 4, 2_000_000
CHUNK = 16 * 1024
TIMEOUT = 1.5


def _exchange(group: Any, part: int = SHORT, slot: int | None = None) -> None:
    """So much for every rank, in slots as long or of another length."""
    rank, n = group.rank(), group.size()
    gives, gets = ([0 if peer == rank else length for peer in range(n)] for length in (part, part if slot is None else slot))
    group.exchange(torch.empty(sum(gets)), torch.ones(sum(gives)), gets, gives)


def _twice(group: Any, *arguments: Any) -> list[Outcome]:
    return [outcome(_exchange, group, *arguments), outcome(_exchange, group), outcome(_exchange, group)]


def _assert_ended(seen: list[Outcome], words: str, at_once: bool = True) -> None:
    """From the first exchange on, or from the next one on, for one reason."""
    failed = seen if at_once or seen[0].kind else seen[1:]
    assert all(each.kind == "DistBackendError" for each in failed), seen
    assert all(each.text.startswith("freescale exchange, lane 'rows': ") and words in each.text for each in failed), seen
    assert all(each.seconds < SOON for each in failed), seen
    assert len({each.text for each in failed}) == 1, seen


def _overflow(part: int, transport: str) -> list[Outcome]:
    """Rank 1 sends an element more than the others have slots for."""
    with nothing_left():
        group = make_group(chunk_bytes=CHUNK, transport=transport)
        _exchange(group)
        seen = _twice(group, part + (dist.get_rank() == 1), part)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    return seen


@pytest.mark.parametrize("transport", ["auto", "native"])
@pytest.mark.parametrize("part", [SHORT, LONG])
@pytest.mark.parametrize("size", [2, 3])
def test_a_part_longer_than_its_slot_is_an_error_that_names_the_sender(size: int, part: int, transport: str) -> None:
    for rank, seen in enumerate(run_distributed(_overflow, size, part, transport, timeout=60)):
        words = f"rank 1 sends {4 * part + 4} bytes, and its slot here holds {4 * part}"
        _assert_ended(seen, words, at_once=rank != 1)


def _kill(victim: int, part: int) -> list[Outcome]:
    with nothing_left():
        group = make_group(chunk_bytes=CHUNK, timeout=10.0)  # gloo tells who waits for a message that was cut no sooner
        _exchange(group)
        if dist.get_rank() == victim:
            if part == SHORT:
                os.kill(os.getpid(), signal.SIGKILL)
            move = group._executor._host.move
            group._executor._host.move = lambda transfer, pause: move(transfer, lambda: os.kill(os.getpid(), signal.SIGKILL))
        seen = _twice(group, part)
        dist.destroy_process_group(group)
        del group
    return seen


@pytest.mark.parametrize("part", [SHORT, LONG])
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 1), (3, 0)])
def test_a_killed_rank_is_an_error_for_all_others(survivors: Survivors, size: int, victim: int, part: int) -> None:
    alive = survivors(_kill, size, victim, part)
    assert set(alive) == set(range(size)) - {victim}
    for seen in alive.values():  # rank 0 takes the store with it, so a rank may know only who gave up because of it
        _assert_ended(seen, " is gone" if victim == 0 else f"rank {victim} is gone")
    assert any(f"rank {victim} is gone" in seen[0].text for seen in alive.values())


def _absent() -> list[Outcome]:
    with nothing_left():
        group = make_group(timeout=TIMEOUT)
        _exchange(group)
        if dist.get_rank() == 1:
            dist.barrier()
        seen = _twice(group)
        if dist.get_rank() != 1:
            dist.barrier()
        dist.destroy_process_group(group)
        del group
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_is_named_after_the_timeout_and_hears_of_it_later(size: int) -> None:
    for rank, seen in enumerate(run_distributed(_absent, size, timeout=60)):
        _assert_ended(seen, f"rank 1 did not come within the timeout of {TIMEOUT:g} s")
        assert seen[0].seconds > TIMEOUT / 2 or rank == 1


def _misuse(case: str) -> list[Outcome]:
    group, rank = make_group(), dist.get_rank()
    _exchange(group)
    two, arguments = torch.ones(2), {
        "short list": (torch.empty(2), torch.ones(2), [2], [2, 0]),
        "own part": (torch.empty(2), torch.ones(2), [2, 0], [1, 1]),
        "negative": (torch.empty(2), torch.ones(2), [2, 0], [3, -1]),
        "sum": (torch.empty(3), torch.ones(2), [2, 0], [2, 0]),
        "shape": (torch.empty(2, 1), torch.ones(2), [2, 0], [2, 0]),
        "gaps": (torch.empty(4)[::2], torch.ones(2), [2, 0], [2, 0]),
        "device": (torch.empty(2), torch.ones(2, device="meta"), [2, 0], [2, 0]),
        "conjugate": (torch.empty(2), torch.ones(2, dtype=torch.complex64).conj(), [2, 0], [2, 0]),
        "dtypes": (torch.empty(2), torch.ones(2, dtype=torch.int32), [2, 0], [2, 0]),
    }  # fmt: skip
    first = (
        outcome(group.exchange, *arguments[case]) if rank == 1 else outcome(group.exchange, two, two.clone(), [0, 2], [0, 2])
    )
    return [first, outcome(_exchange, group)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("short list", "gets=[2] on rank 1 of 2"),
        ("own part", "gives=4 and gets=0 bytes for the own rank 1"),
        ("negative", "gives=[3, -1]"),
        ("sum", "received= of length 3: pass one size per rank"),
        ("shape", "received= is a tensor of torch.float32, shape (2, 1), on cpu"),
        ("gaps", "pass a contiguous one of one dimension"),
        ("device", "send= is a tensor of torch.float32, shape (2,), on meta"),
        ("conjugate", "of a plain number type, resolved"),
        ("dtypes", "send= is torch.int32, received= is torch.float32: pass one dtype"),
    ],
)
def test_a_wrong_argument_is_an_error_on_every_rank(case: str, words: str) -> None:
    (other, later), (own, after) = run_distributed(_misuse, 2, case, timeout=60)
    assert own.kind == "ValueError"
    assert other.kind == later.kind == after.kind == "DistBackendError"
    assert all(words in each.text for each in (own, other, later, after)), (own, other)
    assert "rank 1 has given up" in other.text


def _other_dtype() -> list[Outcome]:
    group, dtype = make_group(), torch.int32 if dist.get_rank() == 1 else torch.float32
    sizes = [0 if peer == dist.get_rank() else 3 for peer in range(2)]
    return [outcome(group.exchange, torch.empty(3, dtype=dtype), torch.ones(3, dtype=dtype), sizes, sizes), *_twice(group)]


def test_another_dtype_is_an_error() -> None:
    for seen in run_distributed(_other_dtype, 2):
        _assert_ended(seen, "torch.int32")


def _left_out_on_one_side() -> list[Outcome]:
    """Rank 0 leaves rank 1 out of an exchange and goes on to the next."""
    group = make_group(timeout=TIMEOUT)
    first = outcome(_exchange, group, 0 if dist.get_rank() == 0 else SHORT)
    return [first, *_twice(group)]


def test_a_rank_left_out_on_one_side_only_is_an_error() -> None:
    zero, one = run_distributed(_left_out_on_one_side, 2)
    assert not zero[0].kind
    _assert_ended(zero[1:], "is at exchange ")
    _assert_ended(one, "is at exchange ")
