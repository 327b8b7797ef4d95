"""Gathers, scatters and broadcasts are those of gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, Case, Side, assert_same_as_gloo, make_group, named

CASES: list[Case] = []
SHAPES = [(4,), (), (0,), (2, 3), (400, 3)]


def _blanks(side: Side, shape: tuple[int, ...]) -> list[Tensor]:
    return [side.blank(*shape) for _ in range(side.size)]


@named(CASES)
def all_gather(side: Side) -> Any:
    results = []
    for shape in SHAPES:
        for async_op in (False, True):
            given, out = side.numbers(*shape), _blanks(side, shape)
            work = dist.all_gather(out, given, group=side.group, async_op=async_op)
            if async_op:
                work.wait()
            results += [*out, given]
    return results


@named(CASES)
def all_gather_concatenates(side: Side) -> Any:
    results = []
    for gather in (dist.all_gather_into_tensor, getattr(dist, "all_gather_single", dist.all_gather_into_tensor)):
        for shape in [(4,), (2, 3), (0, 2), (400, 3)]:
            for async_op in (False, True):
                given, out = side.numbers(*shape), side.blank(side.size * shape[0], *shape[1:])
                work = gather(out, given, group=side.group, async_op=async_op)
                if async_op:
                    work.wait()
                results += [out, given]
    return results


@named(CASES)
def all_gather_in_place(side: Side) -> Any:
    """The input is its own place in the output, as sharded parameters are gathered."""
    out = side.blank(side.size * 300, 2)
    mine = out[side.rank * 300 : (side.rank + 1) * 300]
    mine.copy_(side.numbers(300, 2))
    dist.all_gather_into_tensor(out, mine, group=side.group)
    return out


@named(CASES)
def all_gather_coalesced(side: Side) -> Any:
    given = [side.numbers(3), side.numbers(2, 300)]
    out = [[side.blank(3), side.blank(2, 300)] for _ in range(side.size)]
    dist.all_gather_coalesced(out, given, group=side.group)
    return out


@named(CASES)
def nothing(side: Side) -> Any:
    """Tensors of no elements, of any shape."""
    results, n = [], side.size
    for shape in [(0,), (0, 3), (2, 0)]:
        given, listed, gathered = side.numbers(*shape), _blanks(side, shape), side.blank(n * shape[0], *shape[1:])
        pairs = [[side.blank(*shape)] for _ in range(n)]
        dist.all_gather(listed, given, group=side.group)
        dist.all_gather_into_tensor(gathered, given, group=side.group)
        side.group.allgather_coalesced(pairs, [given]).wait()
        side.group.allgather_into_tensor_coalesced([gathered], [given]).wait()
        out, sent = side.blank(n * shape[0], *shape[1:]), side.numbers(n * shape[0], *shape[1:])
        dist.all_to_all_single(out, sent, group=side.group)
        dist.all_to_all_single(out, sent, [shape[0]] * n, [shape[0]] * n, group=side.group)
        dist.all_to_all(_blanks(side, shape), _blanks(side, shape), group=side.group)
        results += [*listed, gathered, pairs, out]
    work = dist.all_gather([torch.from_numpy(np.empty(0))] * n, torch.from_numpy(np.empty(0)), group=side.group, async_op=True)
    work.wait()
    return results


@named(CASES)
def gather_and_scatter(side: Side) -> Any:
    results = []
    for root in range(side.size):
        for shape in SHAPES:
            given, out = side.numbers(*shape), _blanks(side, shape)
            dist.gather(given, out if side.rank == root else None, group=side.group, group_dst=root)
            share, parts = side.blank(*shape), [side.numbers(*shape) for _ in range(side.size)]
            work = dist.scatter(
                share, parts if side.rank == root else None, group=side.group, group_src=root, async_op=root == 0
            )
            if root == 0:
                work.wait()
            results += [*out, share]
    return results


@named(CASES)
def broadcast(side: Side) -> Any:
    results = []
    for root in range(side.size):
        for shape in SHAPES:
            tensor = side.numbers(*shape)
            work = dist.broadcast(tensor, group_src=root, group=side.group, async_op=root == 0)
            if root == 0:
                work.wait()
            results.append(tensor)
    return results


@named(CASES)
def objects(side: Side) -> Any:
    mine = {"rank": side.rank, "text": "x" * 700 * side.rank, "tensor": side.numbers(3)}
    everyone: list[Any] = [None] * side.size
    dist.all_gather_object(everyone, mine, group=side.group)
    collected: list[Any] = [None] * side.size
    dist.gather_object(mine, collected if side.rank == 0 else None, group=side.group, group_dst=0)
    told = [mine, side.rank]
    dist.broadcast_object_list(told, group_src=side.size - 1, group=side.group)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {k}" * k for k in range(side.size)], group=side.group, group_src=0)
    return everyone, collected, told, got


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "chunks"])
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_gathers_are_those_of_gloo(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)


def _stacked() -> bool:
    side = Side(make_group(**SMALL))
    given, out, expected = side.numbers(2, 300), side.blank(side.size, 2, 300), _blanks(side, (2, 300))
    dist.all_gather_into_tensor(out, given, group=side.group)
    dist.all_gather(expected, given)
    return torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_gather_into_a_stacked_output(size: int) -> None:
    """Gloo refuses the shape that others take; its list form is the reference."""
    assert run_distributed(_stacked, size) == [True] * size


def _unequal() -> bool:
    """Every rank gathers another number of rows, in tensors of their sizes."""
    side = Side(make_group(**SMALL))
    everyone = [side.numbers(k * 200, 2, rank=k) for k in range(side.size)]
    out = [torch.full_like(part, 77) for part in everyone]
    dist.all_gather(out, everyone[side.rank], group=side.group)
    return all(torch.equal(*pair) for pair in zip(out, everyone))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_gather_of_unequal_tensors(size: int) -> None:
    """Gloo refuses them, NCCL takes them."""
    assert run_distributed(_unequal, size) == [True] * size
