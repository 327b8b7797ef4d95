"""Subgroups and the default group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import LaneOptions
from lightning_freescale.comm.process_group import FreeScaleGroup
from lightning_freescale.testing import _reserved_port, run_distributed
from tests.helpers.both_groups import SMALL, TIMEOUT, Side, differs, make_group


def _in_subgroup(group: Any, first: int) -> Any:
    """Roots and peers by global and by group rank; ``first`` is the global rank of the group's rank 0."""
    side = Side(group)
    told, retold, given = side.numbers(3), side.numbers(400), side.numbers(600 * side.size)
    dist.broadcast(told, src=first, group=group)
    dist.broadcast(retold, group_src=side.size - 1, group=group)
    out, gathered = side.blank(600 * side.size), side.blank(600 * side.size * side.size)
    dist.all_to_all_single(out, given, group=group)
    dist.all_gather_into_tensor(gathered, given, group=group)
    summed, parts = side.numbers(2), [side.blank(5) for _ in range(side.size)]
    dist.all_reduce(summed, group=group)
    dist.gather(side.numbers(5), parts if side.rank == 0 else None, dst=first, group=group)
    objects: list[Any] = [None] * side.size
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    passed = torch.full((1,), float(side.rank))
    if side.rank == 0:
        dist.send(passed, dst=dist.get_global_rank(group, side.size - 1), group=group)
    elif side.rank == side.size - 1:
        assert dist.recv(passed, src=first, group=group) == first
    return told, retold, out, gathered, summed, parts, objects, passed


def _subgroups(memberships: list[list[int]]) -> list[str]:
    found, mine = [], dist.get_rank()
    for ranks in memberships:
        group, gloo = make_group(ranks, **SMALL), dist.new_group(ranks, backend="gloo", timeout=TIMEOUT)
        assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (mine not in ranks)
        if mine in ranks:
            assert dist.get_process_group_ranks(group) == ranks and dist.get_rank(group) == ranks.index(mine)
            assert dist.get_world_size(group) == len(ranks) == group.size()
            found.append(differs(_in_subgroup(group, ranks[0]), _in_subgroup(gloo, ranks[0])))
            assert found[-1] or int(_in_subgroup(group, ranks[0])[6][-1]) == ranks[-1]
    return [difference for difference in found if difference]


@pytest.mark.parametrize(
    ("size", "memberships"), [(2, [[0, 1]]), (3, [[1, 2], [0, 1], [0, 2]]), (4, [[0, 2], [1, 3], [1, 2, 3], [2, 3], [0, 1]])]
)
def test_subgroups_are_those_of_gloo(size: int, memberships: list[list[int]]) -> None:
    assert run_distributed(_subgroups, size, memberships, timeout=60) == [[]] * size


def _default(ports: list[int]) -> list[Any]:
    """Twice: a default group may be destroyed and made anew."""
    told: list[Any] = []
    for port in ports:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            "freescale",
            init_method=address,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=TIMEOUT,
            pg_options=LaneOptions(**SMALL),
        )
        group = dist.group.WORLD
        assert isinstance(group, FreeScaleGroup) and group.options.chunk_bytes == SMALL["chunk_bytes"]
        told.append((dist.get_backend(), group.name(), dist.get_rank(), dist.get_world_size(), bool(group.group_name)))
        gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
        half = dist.new_group([0, 1])  # of the default group's backend
        assert isinstance(half, FreeScaleGroup) == (dist.get_rank() < 2)
        told.append(differs(_in_subgroup(group, 0), _in_subgroup(gloo, 0)))
        values = torch.ones(2)
        dist.all_reduce(values)
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        told.append(values.tolist())
    return told


@pytest.mark.parametrize("size", [2, 3])
def test_as_default_group(size: int) -> None:
    with _reserved_port() as first, _reserved_port() as second:
        of_ranks = run_distributed(_default, size, [first, second], init=False, timeout=60)
    for rank, told in enumerate(of_ranks):
        assert told == [("freescale", "freescale", rank, size, True), "", [float(size)] * 2] * 2


def _described() -> None:
    group = dist.new_group(backend="freescale", timeout=timedelta(seconds=9), group_desc="embeddings")
    assert group.group_desc == "embeddings" and group.group_name != make_group().group_name
    assert group.getBackendName() == "freescale" == group.name()
    assert {device.type for device in group._device_types} == {"cpu"}
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    with pytest.raises(TypeError, match="LaneOptions"):
        dist.new_group(backend="freescale", pg_options={"chunk_bytes": 5})


def test_a_group_can_be_looked_up_like_others() -> None:
    run_distributed(_described, 2)


def _evenly() -> list[Any]:
    """Torch's own ways to make several subgroups."""
    mine, all_of_them = dist.new_subgroups(2, backend="freescale", timeout=TIMEOUT)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend="freescale", timeout=TIMEOUT)
    told = [len(all_of_them)]
    for group in (mine, crossed):
        assert isinstance(group, FreeScaleGroup)
        out = torch.zeros(2, dtype=torch.int64)
        dist.all_to_all_single(out, torch.full((2,), dist.get_rank()), group=group)
        told.append(out.tolist())
    return told


def test_subgroups_made_by_torch() -> None:
    pairs = {0: ([0, 1], [0, 2]), 1: ([0, 1], [1, 3]), 2: ([2, 3], [0, 2]), 3: ([2, 3], [1, 3])}
    assert run_distributed(_evenly, 4) == [[2, *pairs[rank]] for rank in range(4)]
