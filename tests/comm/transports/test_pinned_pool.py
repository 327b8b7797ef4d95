"""Pinned memory is reused, and never more than the bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_freescale.comm.transports.host.staging import PinnedPool


class Memory:
    """Makes buffers and counts what of them is still referred to."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, length: int) -> Tensor:
        self.made.append(length)
        return torch.empty(length, dtype=torch.uint8)


def _pool(bound: int) -> tuple[PinnedPool, Memory]:
    memory = Memory()
    return PinnedPool(bound, allocate=memory), memory


def _acquire(pool: PinnedPool, length: int) -> Tensor:
    buffer = pool.acquire(length)
    assert buffer is not None
    assert len(buffer) >= length
    return buffer


@pytest.mark.parametrize(("length", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_sizes_are_powers_of_two(length: int, size: int) -> None:
    pool, memory = _pool(4096)
    assert len(_acquire(pool, length)) == size
    assert memory.made == [size]
    assert (pool.held, pool.in_use) == (size, size)


def test_a_buffer_given_back_is_taken_again() -> None:
    pool, memory = _pool(4096)
    for length in (100, 128, 65, 90):
        buffer = _acquire(pool, length)
        pool.release(buffer)
    assert memory.made == [128]
    assert (pool.held, pool.in_use) == (128, 0)


def test_a_buffer_in_use_is_not_taken_again() -> None:
    pool, memory = _pool(4096)
    first, second = _acquire(pool, 128), _acquire(pool, 128)
    assert first.data_ptr() != second.data_ptr()
    assert memory.made == [128, 128]


def test_at_the_bound_there_is_none_until_one_is_given_back() -> None:
    pool, memory = _pool(256)
    first, second = _acquire(pool, 128), _acquire(pool, 128)
    assert pool.acquire(1) is None
    assert pool.acquire(128) is None
    assert (pool.held, pool.in_use) == (256, 256)
    pool.release(second)
    assert _acquire(pool, 128) is second
    assert memory.made == [128, 128]
    assert first is not second


def test_a_bound_that_is_reached_exactly_is_no_excess() -> None:
    pool, _ = _pool(128)
    assert pool.acquire(129) is None
    assert pool.acquire(128) is not None


def test_kept_buffers_of_other_sizes_make_room() -> None:
    pool, memory = _pool(256)
    for buffer in [_acquire(pool, 64) for _ in range(4)]:
        pool.release(buffer)
    assert pool.held == 256
    _acquire(pool, 128)
    assert memory.made == [64] * 4 + [128]
    assert (pool.held, pool.in_use) == (256, 128)
    _acquire(pool, 64)
    _acquire(pool, 64)
    assert memory.made == [64] * 4 + [128]  # the other two were kept


def test_the_largest_make_room_first() -> None:
    pool, memory = _pool(256)
    small, large = _acquire(pool, 64), _acquire(pool, 128)
    pool.release(small)
    pool.release(large)
    _acquire(pool, 32)
    _acquire(pool, 32)
    _acquire(pool, 32)  # 64 + 128 + 3 * 32 are more than the bound
    assert _acquire(pool, 64) is small
    assert memory.made == [64, 128, 32, 32, 32]


def test_buffers_in_use_do_not_make_room() -> None:
    pool, _ = _pool(256)
    buffers = [_acquire(pool, 64) for _ in range(3)]
    assert pool.acquire(128) is None
    assert pool.in_use == pool.held == 192
    pool.release(buffers.pop())
    assert pool.acquire(128) is not None


@given(st.integers(1, 5000), st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=60))
def test_whatever_is_taken_and_given_the_bound_holds_and_the_count_is_right(bound: int, steps: list[tuple[bool, int]]) -> None:
    pool, _ = _pool(bound)
    taken: list[Tensor] = []
    for takes, number in steps:
        if takes:
            buffer = pool.acquire(number)
            size = 1 << (number - 1).bit_length()
            assert (buffer is None) == (size + sum(map(len, taken)) > bound)
            if buffer is not None:
                assert all(buffer.data_ptr() != other.data_ptr() for other in taken)
                taken.append(buffer)
        elif taken:
            pool.release(taken.pop(number % len(taken)))
        assert pool.in_use == sum(map(len, taken)) <= pool.held <= bound
