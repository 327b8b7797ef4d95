"""Messages between two ranks, alone and beside collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.both_groups import SMALL, Case, Side, assert_same_as_gloo, named

CASES: list[Case] = []


def _around(side: Side) -> tuple[int, int]:
    return (side.rank + 1) % side.size, (side.rank - 1) % side.size


@named(CASES)
def send_and_recv(side: Side) -> Any:
    right, left = _around(side)
    tensor, out = side.numbers(3000), side.blank(3000)
    for step in range(2):
        if side.rank % 2 == step:
            dist.send(tensor, group_dst=right, group=side.group)
        if left % 2 == step:
            assert dist.recv(out, group_src=left, group=side.group) == dist.get_global_rank(side.group, left)
    return out, tensor


@named(CASES)
def isend_and_irecv_by_tag(side: Side) -> Any:
    """Waited in another order than issued."""
    right, left = _around(side)
    out = [side.blank(4 + tag) for tag in range(3)]
    works = [dist.irecv(out[tag], group_src=left, group=side.group, tag=tag) for tag in (2, 0, 1)]
    works += [dist.isend(side.numbers(4 + tag), group_dst=right, group=side.group, tag=tag) for tag in range(3)]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return out


@named(CASES)
def batch(side: Side) -> Any:
    out = [side.blank(5) for _ in range(side.size)]
    others = [peer for peer in range(side.size) if peer != side.rank]
    ops = [dist.P2POp(dist.isend, side.numbers(5), group=side.group, group_peer=peer) for peer in others]
    ops += [dist.P2POp(dist.irecv, out[peer], group=side.group, group_peer=peer) for peer in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


@named(CASES)
def recv_from_anyone(side: Side) -> Any:
    out, told = side.blank(3), []
    if side.rank == 0:
        for _ in range(side.size - 1):
            source = dist.recv(out, group=side.group, tag=5)
            told.append((source, out.tolist()))
    else:
        dist.send(side.numbers(3), group_dst=0, group=side.group, tag=5)
    return sorted(told)


@named(CASES)
def objects(side: Side) -> Any:
    got: list[Any] = [None, None]
    if side.rank == 0:
        dist.send_object_list([{"a": 1}, "b" * 5000], group_dst=side.size - 1, group=side.group)
    elif side.rank == side.size - 1:
        dist.recv_object_list(got, group_src=0, group=side.group)
    return got


@named(CASES)
def beside_collectives(side: Side) -> Any:
    """A receive that stays open keeps no collective of the group waiting, and the other way round."""
    right, left = _around(side)
    message = side.blank(2000)
    receiving = dist.irecv(message, group_src=left, group=side.group)
    out, given = side.blank(500 * side.size), side.numbers(500 * side.size)
    dist.all_to_all_single(out, given, group=side.group)
    gathered = side.blank(500 * side.size * side.size)
    later = dist.all_gather_into_tensor(gathered, given, group=side.group, async_op=True)
    sending = dist.isend(side.numbers(2000), group_dst=right, group=side.group)
    for work in (receiving, sending, later):
        work.wait()
    return message, out, gathered


@named(CASES)
def barriers(side: Side) -> Any:
    """A rank leaves only after all have come."""
    store = dist.PrefixStore(f"barriers {type(side.group).__name__}", dist.distributed_c10d._get_default_store())
    seen = []
    for turn in range(3):
        store.add(str(turn), 1)
        work = dist.barrier(group=side.group, async_op=turn == 1)
        if turn == 1:
            work.wait()
        seen.append(store.add(str(turn), 0))
    return seen


@named(CASES)
def monitored_barrier_of_the_group(side: Side) -> Any:
    """For gloo alone, by name and by method: its messages would meet those of the lane."""
    if dist.get_backend(side.group) != "gloo":
        with pytest.raises(ValueError, match=r"GLOO|pass a group of backend 'gloo'"):  # up to torch 2.13 torch itself says so
            dist.monitored_barrier(side.group)
        with pytest.raises(ValueError, match="pass a group of backend 'gloo'"):
            side.group.monitored_barrier(wait_all_ranks=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=side.group)
    return tensor


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_point_to_point_is_that_of_gloo(size: int) -> None:
    assert_same_as_gloo(CASES, size, **SMALL)
