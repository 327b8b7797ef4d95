"""Messages from one rank to another are exchanges of the two, matched by pair, tag and order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling.recording.collectives import collectives_on
from lightning_freescale.profiling.recording.records import Collective, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed

LATE = 0.5
"""Seconds, of which a busy machine hides little."""


def _watched(stack: ExitStack, ignored_groups: Any = ()) -> Timeline:
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    stack.enter_context(collectives_on(timeline, ignored_groups))
    dist.barrier()
    timeline.open_step()
    return timeline


def _seen(timeline: Timeline) -> list[Collective]:
    step = timeline.close_step()
    assert isinstance(step, StepRecord)
    timeline.open_step()
    return step.collectives


def _sent(number: int = 3) -> torch.Tensor:
    return torch.arange(float(number))


def _blocking(rank: int, to: dict[str, Any]) -> Any:
    got = torch.zeros(3)
    if rank == 0:
        dist.recv(got, **{{"dst": "src", "group_dst": "group_src"}.get(k, k): v for k, v in to.items()})
        return got
    return dist.send(_sent(), **to)


def _asynchronous(rank: int, to: dict[str, Any]) -> Any:
    got = torch.zeros(3)
    work = dist.irecv(got, src=1) if rank == 0 else dist.isend(_sent(), dst=0)
    assert work is not None
    work.wait()
    return got if rank == 0 else None


def _from_anyone(rank: int, to: dict[str, Any]) -> Any:
    got = torch.zeros(3)
    if rank == 0:
        assert dist.recv(got) == 1
        return got
    return dist.send(_sent(), 0)


def _from_anyone_later(rank: int, to: dict[str, Any]) -> Any:
    got = torch.zeros(3)
    work = dist.irecv(got) if rank == 0 else dist.isend(_sent(), dst=0)
    assert work is not None
    work.wait()
    return got if rank == 0 else None


def _batch(rank: int, to: dict[str, Any]) -> Any:
    got = torch.zeros(3)
    peer = 1 - rank
    operations = [dist.P2POp(dist.isend, _sent(), peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got if rank == 0 else None


def _objects(rank: int, to: dict[str, Any]) -> Any:
    objects: list[Any] = [None]
    if rank == 0:
        dist.recv_object_list(objects, 1)
    else:
        dist.send_object_list([_sent()], 0)
    return objects[0]


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "blocking": (_blocking, {"dst": 0}),
    "with a tag": (_blocking, {"dst": 0, "tag": 7}),
    "ranks of the group": (_blocking, {"group_dst": 0}),
    "asynchronous": (_asynchronous, {}),
    "from any rank": (_from_anyone, {}),
    "from any rank, asynchronous": (_from_anyone_later, {}),
    "batch": (_batch, {}),
    "objects": (_objects, {}),
}


def _late() -> dict[str, list[tuple[str, str, float, int | None]]]:
    """Rank 1 sends late; on rank 0 the peer is 1."""
    rank, found = dist.get_rank(), {}
    with ExitStack() as stack:
        timeline = _watched(stack)
        for way, (call, to) in WAYS.items():
            here = {k: 1 if rank == 0 and k != "tag" else v for k, v in to.items()}
            time.sleep(LATE * rank)
            got = call(rank, here)
            assert rank or got.tolist() == [0, 1, 2]
            found[way] = [(c.name, c.key, c.end - c.arrive, c.moved) for c in _seen(timeline)]
            dist.barrier()
            _seen(timeline)
    return found


@pytest.fixture(scope="module")
def late() -> list[dict[str, Any]]:
    return run_distributed(_late, 2)


@pytest.mark.parametrize("way", WAYS)
def test_who_receives_waits_for_who_sends(way: str, late: list[dict[str, Any]]) -> None:
    receiver, sender = ({key: (name, waited, moved) for name, key, waited, moved in rank[way]} for rank in late)
    assert receiver.keys() == sender.keys(), "both ends name it alike"
    assert len(receiver) == len(late[0][way]) == (2 if way == "batch" else 1)
    for key, (name, waited, moved) in receiver.items():
        assert waited > 0.8 * LATE > 0.4 * LATE > sender[key][1]
        assert {name, sender[key][0]} == {"send", "recv"}
        assert moved == (None if way == "objects" else 12)


def _beside_collectives() -> list[str]:
    rank = dist.get_rank()
    with ExitStack() as stack:
        timeline = _watched(stack)
        dist.all_reduce(torch.ones(1))
        for tag in (0, 1) if rank < 2 else ():  # rank 2 has no part in them
            if rank == 0:
                dist.send(torch.ones(1), 1, tag=tag)
            else:
                dist.recv(torch.ones(1), 0, tag=tag)
        dist.all_reduce(torch.ones(1))
        return [c.key.split(":")[0] + c.key[-2:] for c in _seen(timeline)]


def test_messages_do_not_shift_the_order_of_collectives() -> None:
    sender, receiver, other = run_distributed(_beside_collectives, 3)
    assert sender == receiver == ["world.0", "world 0>1 0.0", "world 0>1 1.0", "world.1"]
    assert other == ["world.0", "world.1"]


def _left_alone() -> dict[str, int]:
    rank, peer, counts = dist.get_rank(), 1 - dist.get_rank(), {}
    isend, init = dist.isend, dist.P2POp.__init__
    before = dist.P2POp(dist.isend if rank else dist.irecv, torch.ones(1), peer)
    with ExitStack() as stack:
        timeline = _watched(stack)
        assert dist.isend == isend and isend == dist.isend and dist.isend != dist.irecv
        assert {dist.isend} == {isend}
        during = dist.P2POp(dist.isend if rank else dist.irecv, torch.ones(1), peer)
        made_by_name = dist.P2POp(isend, torch.ones(1), peer)
        assert during.op is before.op and made_by_name.op is isend
        for work in dist.batch_isend_irecv([before]):
            work.wait()
        counts["made before"] = len(_seen(timeline)) - 1
        with pytest.raises(ValueError, match="op"):
            dist.P2POp(dist.all_reduce, torch.ones(1), peer)
        with pytest.raises(ValueError, match="rank"):
            dist.send(torch.ones(1), rank)
        assert [c.end is not None for c in _seen(timeline)] == [True]
        group = dist.new_group()
        with collectives_on(timeline, [group]):  # around the other, which sees it
            (dist.send if rank else dist.recv)(torch.ones(1), peer, group=group)
        counts["seen twice"] = len(_seen(timeline)) - 1
    assert (dist.isend, dist.P2POp.__init__) == (isend, init) and dist.isend is isend
    for work in dist.batch_isend_irecv([during]):  # made while it was watched, used afterwards
        work.wait()
    return counts


def test_torchs_own_operations_stay_what_they_are() -> None:
    assert run_distributed(_left_alone, 2) == [{"made before": 0, "seen twice": 0}] * 2


def _alone(x: torch.Tensor, rank: int) -> torch.Tensor:
    work = dist.isend(x, 0) if rank else dist.irecv(x, 1)
    assert work is not None
    work.wait()
    return x


def _together(x: torch.Tensor, rank: int) -> torch.Tensor:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank else dist.irecv, x, 1 - rank)]):
        work.wait()
    return x


def _compiled(call: Any) -> tuple[list[float], int]:
    torch._dynamo.config.enable_p2p_compilation = True
    with ExitStack() as stack:
        timeline = _watched(stack)
        rank = dist.get_rank()
        result = torch.compile(call, backend="eager", fullgraph=True)(torch.full((2,), float(rank)), rank)
        return result.tolist(), len(_seen(timeline))


@pytest.mark.slow
@pytest.mark.parametrize("call", [_alone, _together])
def test_compiled_messages_work_as_without(call: Any) -> None:
    assert run_distributed(_compiled, 2, call) == [([1.0, 1.0], 0)] * 2
