"""Exchanges of torch.distributed on a timeline: when this rank arrived at each, when it waited, and what it moved."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_freescale.profiling.recording.collectives import NAMES, collectives_on
from lightning_freescale.profiling.recording.records import Collective, StepRecord
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import make_group, outcome

pytestmark = pytest.mark.xdist_group("timing")
LATE = 0.6
"""Seconds by which rank 1 is late."""


@contextmanager
def _watched(ignored_groups: Collection[Any] = ()) -> Iterator[Timeline]:
    timeline = Timeline()
    timeline.enable(torch.device("cpu"))
    with collectives_on(timeline, ignored_groups):
        dist.barrier()
        timeline.open_step()
        yield timeline


def _seen(timeline: Timeline) -> list[Collective]:
    """Return the collectives of the step in progress and open the next step."""
    step = timeline.close_step()
    assert isinstance(step, StepRecord)
    timeline.open_step()
    return step.collectives


def _check_on_ranks(*checks: Callable[[Timeline], Any]) -> None:
    """Run the checks on two ranks, each on a new timeline; both ranks must return the same value."""

    def run() -> None:
        for check in checks:
            with _watched() as timeline:
                value = check(timeline)
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, value)
            assert everyone == [value] * 2, check.__name__

    run_distributed(run, 2)


# -- collectives, one by one


def _groups() -> dict[str, Any]:
    return {"world": None, "freescale": make_group(transport="auto"), "native": make_group(transport="native")}


def _pair() -> list[Tensor]:
    return [torch.empty(2), torch.empty(2)]


def _all_reduce(group: Any = None, async_op: bool = False) -> Any:
    return dist.all_reduce(torch.ones(2), group=group, async_op=async_op)


def _all_to_all(group: Any = None, async_op: bool = False) -> Any:
    return dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group, async_op=async_op)


CALLS: dict[str, tuple[Callable[[Any, bool], Any], int]] = {
    "all_to_all_single": (_all_to_all, 4),  # two floats, one of them to the other rank
    "all_to_all": (lambda g, a: dist.all_to_all(_pair(), _pair(), g, a), 8),
    "all_gather_single": (lambda g, a: dist.all_gather_single(torch.empty(4), torch.ones(2), g, a), 8),
    "all_reduce": (_all_reduce, 8),
    "broadcast": (lambda g, a: dist.broadcast(torch.ones(2), 0, g, a), 8),
    "reduce_scatter_single": (lambda g, a: dist.reduce_scatter_single(torch.empty(2), torch.ones(4), group=g, async_op=a), 8),
    "barrier": (lambda g, a: dist.barrier(g, a), 0),
}


def _every_call_is_one_collective(timeline: Timeline) -> list[str]:
    groups, keys = _groups(), []
    _seen(timeline)
    for (place, group), (name, (call, moved)), async_op in product(groups.items(), CALLS.items(), (False, True)):
        work = call(group, async_op)
        if async_op:
            work.wait()
        (one,) = _seen(timeline)
        assert (one.name, one.moved, one.key.startswith("world:")) == (name, moved, group is None), (place, name, async_op)
        keys.append(one.key)
    return keys


def _asynchronous(timeline: Timeline) -> None:
    """Check that a rank arrives when it issues a collective and waits when it waits for the Work."""
    rank, calls = dist.get_rank(), list(product(_groups().items(), (_all_to_all, _all_reduce)))
    dist.barrier()
    _seen(timeline)
    time.sleep(LATE * rank)
    works = [call(group, True) for (_, group), call in calls]
    meanwhile = LATE * (0.2 if rank else 2)
    time.sleep(meanwhile)
    for work in works:
        work.wait()
        work.wait()  # a second wait is no second collective
    found, arrivals = _seen(timeline), [[], []]
    dist.all_gather_object(arrivals, [one.arrive for one in found])
    for ((place, _), _), one, late in zip(calls, found, arrivals[1], strict=True):
        assert one.start - one.arrive >= meanwhile, (place, one.name)
        assert one.end - one.start < 0.9 * LATE, (place, one.name)
        if rank == 0:
            assert one.arrive < late < one.done < one.start, (place, one.name)


def _what_is_not_recorded(_: Timeline) -> None:
    rank, mine, stock = dist.get_rank(), make_group(), dist.new_group()
    originals = {owner: dict(vars(owner)) for owner in (dist, funcol, dist.P2POp)}
    assert originals[dist].keys() >= set(NAMES)
    with _watched([mine, stock]) as timeline:
        for work in [dist.isend(torch.ones(1), group_dst=1 - rank, group=stock), dist.irecv(torch.ones(1), group=stock)]:
            work.wait()
        _all_reduce(mine)
        assert _sum(funcol.all_reduce(torch.ones(4), "sum", stock)) == 8
        assert not _seen(timeline), "groups left out"
        timeline.close_step()
        _all_reduce()
        pending = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        timeline.open_step()
        assert _sum(pending) == 8 and funcol.wait_tensor(torch.ones(2)).tolist() == [1, 1]
        assert not _seen(timeline), "called between steps, and nothing to wait for"
        with timeline.collective("mine"):
            _all_reduce()
            _sum(funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD))
        assert [one.name for one in _seen(timeline)] == ["mine"], "inside another"
    for owner, before in originals.items():
        assert {name for name, value in before.items() if vars(owner)[name] is not value} == set(), owner


def _in_other_threads_and_steps(timeline: Timeline) -> None:
    thread = threading.Thread(target=_all_reduce)
    thread.start()
    thread.join()
    (one,) = timeline.background
    assert not _seen(timeline)
    assert one.name == "all_reduce" and one.arrive < one.done
    for wait in ("wait", "synchronize"):
        work = _all_reduce(None, True)
        assert not _seen(timeline)
        getattr(work, wait)()
        assert len(_seen(timeline)) == 1, "of the step that waits for it"


def _unusual(timeline: Timeline) -> None:
    """Check a group of other ranks, a tensor of unknown size, and a collective that fails."""
    first, group, rows = dist.new_group([0]), make_group(), 2 if dist.get_rank() else 4
    _seen(timeline)
    dist.all_reduce(torch.ones(1), group=first)  # torch makes it a warning on rank 1
    assert len(_seen(timeline)) == 1 - dist.get_rank()
    dist.all_reduce(torch.eye(2).to_sparse())
    assert [one.moved for one in _seen(timeline)] == [None]
    with pytest.raises(ZeroDivisionError), dist._coalescing_manager():
        raise ZeroDivisionError
    assert not _seen(timeline)
    failed = outcome(dist.all_to_all_single, torch.empty(rows), torch.ones(rows), group=group)
    assert failed.kind == "DistBackendError" and [one.end is not None for one in _seen(timeline)] == [True]


def test_collectives() -> None:
    _check_on_ranks(_every_call_is_one_collective, _asynchronous, _what_is_not_recorded, _in_other_threads_and_steps, _unusual)


# -- ways to wait for a rank that is late


def _wait(*works: Any) -> None:
    for work in works:
        work.wait()


def _coalesced(call: Callable[[], Any], async_op: bool) -> None:
    with dist._coalescing_manager(async_ops=async_op) as works:
        call()
        call()
    if async_op:
        works.wait()


def _batch(got: Tensor) -> None:
    peer = 1 - dist.get_rank()
    _wait(*dist.batch_isend_irecv([dist.P2POp(dist.isend, ROW, peer), dist.P2POp(dist.irecv, got, peer)]))


def _objects(got: Tensor) -> None:
    objects: list[Any] = [None]
    dist.recv_object_list(objects, 1)
    got.copy_(objects[0])


ROW = torch.arange(3.0)
BLOCKING: dict[str, tuple[Callable[[], Any], int]] = {
    "all_to_all_single": (_all_to_all, 4),
    "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([torch.ones(2), torch.ones(2)]), 16),
    "all_reduce (coalesced)": (lambda: _coalesced(_all_reduce, False), 16),
    "all_gather_single (coalesced)": (
        lambda: _coalesced(lambda: dist.all_gather_single(torch.empty(4), torch.ones(2)), True),
        16,
    ),
}
MESSAGES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "blocking": (lambda: dist.send(ROW, 0), lambda got: dist.recv(got, 1)),
    "with a tag": (lambda: dist.send(ROW, 0, tag=7), lambda got: dist.recv(got, 1, tag=7)),
    "ranks of the group": (lambda: dist.send(ROW, group_dst=0), lambda got: dist.recv(got, group_src=1)),
    "asynchronous": (lambda: _wait(dist.isend(ROW, dst=0)), lambda got: _wait(dist.irecv(got, src=1))),
    "from any rank": (lambda: dist.send(ROW, 0), lambda got: dist.recv(got)),
    "from any rank, asynchronous": (lambda: _wait(dist.isend(ROW, dst=0)), lambda got: _wait(dist.irecv(got))),
    "batch": (lambda: _batch(torch.zeros(3)), _batch),
    "objects": (lambda: dist.send_object_list([ROW], 0), _objects),
}
"""How rank 1 sends, and how rank 0 receives into a tensor."""
ON_TIME = {"with a tag", "ranks of the group", "from any rank", "objects"}
"""Messages that take the way of "blocking" with other arguments."""


def _check_waits(timeline: Timeline, way: str, leave_out: int = 0) -> list[Collective]:
    """Return the collectives of the step. In each but the first few, rank 0 has waited for rank 1, and rank 1 less.

    The processes of one machine share a clock, so the times of the two ranks are compared directly.
    """
    found, times = _seen(timeline), [[], []]
    dist.all_gather_object(times, [(one.arrive, one.end) for one in found[leave_out:]])
    for (first, first_end), (second, second_end) in zip(*times, strict=True):
        # a functional collective is on its way shortly before this rank's arrival is noted
        assert first < second < first_end + (second - first) / 2 and second_end - second < first_end - first, (way, times)
    _seen(timeline)
    return found


def _blocking(timeline: Timeline) -> list[str]:
    keys = []
    for name, (call, moved) in BLOCKING.items():
        time.sleep(LATE * dist.get_rank())
        call()
        (one,) = _check_waits(timeline, name)
        assert (one.name, one.moved) == (name, moved)
        keys.append(one.key)
    return keys


def _messages(timeline: Timeline) -> list[set[str]]:
    """Messages do not shift the order of collectives."""
    rank, keys = dist.get_rank(), []
    for way, (send, receive) in MESSAGES.items():
        got = torch.zeros(3)
        time.sleep(LATE * rank * (way not in ON_TIME))
        if rank:
            send()
        else:
            receive(got)
            assert torch.equal(got, ROW), way
        found = _seen(timeline) if way in ON_TIME else _check_waits(timeline, way)
        assert sorted(one.name for one in found) == (["recv", "send"] if way == "batch" else ["send" if rank else "recv"]), way
        assert {one.moved for one in found} == {None if way == "objects" else 12}, way
        keys.append({one.key for one in found})
        assert all(" 1>0 " in key or " 0>1 " in key for key in keys[-1]), way
    return keys


def _torchs_operations_stay_equal_to_themselves(timeline: Timeline) -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    operation = dist.isend if rank else dist.irecv
    assert dist.isend == dist.isend.__wrapped__ != dist.irecv and {dist.isend} == {dist.isend.__wrapped__}
    during = dist.P2POp(operation, torch.ones(1), peer)
    assert during.op is operation.__wrapped__
    assert dist.P2POp(operation.__wrapped__, torch.ones(1), peer).op is operation.__wrapped__
    with pytest.raises(ValueError, match="op"):
        dist.P2POp(dist.all_reduce, torch.ones(1), peer)
    with pytest.raises(ValueError, match="rank"):
        dist.send(torch.ones(1), rank)
    assert [one.end is not None for one in _seen(timeline)] == [True]
    group = dist.new_group()
    with collectives_on(timeline, [group]):  # around the other, which records it
        (dist.send if rank else dist.recv)(torch.ones(1), peer, group=group)
    assert len(_seen(timeline)) == 1


# -- functional collectives, which wait where the tensor is used

FUNCTIONAL: dict[str, tuple[Callable[[Any], Any], int]] = {
    "all_reduce": (lambda group: funcol.all_reduce(_row(), "sum", group), 16),
    "all_gather_single_coalesced": (lambda group: funcol.all_gather_single_coalesced([_row(), _row()], group), 32),
    "broadcast": (lambda group: funcol.broadcast(_row(), 1, group), 16),
    "reduce_scatter_single": (lambda group: funcol.reduce_scatter_tensor(_row(), "sum", 0, group), 8),
    "all_to_all_single": (lambda group: funcol.all_to_all_single(_row(), None, None, group), 8),
    "reduce_scatter_single_coalesced": (
        lambda group: funcol.reduce_scatter_single_coalesced([_row(), _row()], "sum", [0, 0], group),
        16,
    ),
}


def _row() -> Tensor:
    return torch.full((4,), float(dist.get_rank()))


def _sum(result: Any) -> float:
    return sum((each + 0).sum().item() for each in (result if isinstance(result, list) else [result]))


def _functional(timeline: Timeline) -> list[tuple[str, str, Any]]:
    warnings.simplefilter("ignore")
    rank, agreed = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
    ways = {name: lambda call=call: call(dist.group.WORLD) for name, (call, _) in FUNCTIONAL.items()}
    ways["mesh"] = lambda: funcol.all_reduce(_row(), "sum", mesh)
    ways["dimension of a mesh"] = lambda: funcol.all_reduce(_row(), "sum", (mesh, 0))
    ways["waits itself"] = lambda: funcol.all_gather_single(torch.ones(3, 4), 1, mesh)
    ways["DTensor"] = lambda: rows.redistribute(mesh, [Replicate()]).to_local()
    for index, (way, call) in enumerate(ways.items()):
        expected = _sum(call())
        dist.barrier()
        _seen(timeline)
        late = LATE * (index < 2 or way not in FUNCTIONAL)
        time.sleep(late * rank)
        result = call()
        time.sleep(late / 3 * (1 - rank))
        assert _sum(result) == expected == _sum(result), way  # the second time it is there: no second collective
        (one,) = _check_waits(timeline, way) if late else _seen(timeline)
        assert rank or one.start - one.arrive >= late / 3 or way in ("waits itself", "DTensor"), "not waited for before"
        if way in FUNCTIONAL:
            assert (one.name, one.moved, one.key.startswith("world:")) == (way, FUNCTIONAL[way][1], True)
        agreed.append((one.name, one.key, one.moved))
    return agreed


def _backward(timeline: Timeline) -> list[tuple[str, str]]:
    rank = dist.get_rank()
    x = torch.ones(4, requires_grad=True)
    loss = (funcol.all_reduce(x * 2, "sum", dist.group.WORLD) * (rank + 1)).sum()
    time.sleep(LATE * rank)
    loss.backward()
    first, second = _check_waits(timeline, "backward", 1)
    assert (first.name, second.name, x.grad.tolist()) == ("all_reduce", "functional backward", [6.0] * 4)
    return [(one.name, one.key) for one in (first, second)]


def test_a_late_rank_is_waited_for() -> None:
    _check_on_ranks(_blocking, _messages, _torchs_operations_stay_equal_to_themselves, _functional, _backward)


# -- compiled code


def _reduced(x: Tensor, rank: int) -> Tensor:
    dist.all_reduce(x)
    return x


def _total(x: Tensor, rank: int) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) * 1


def _sent(x: Tensor, rank: int) -> Tensor:
    _wait(dist.isend(x, 0) if rank else dist.irecv(x, 1))
    return x


def _sent_together(x: Tensor, rank: int) -> Tensor:
    _wait(*dist.batch_isend_irecv([dist.P2POp(dist.isend if rank else dist.irecv, x, 1 - rank)]))
    return x


def _compiled(timeline: Timeline) -> None:
    torch._dynamo.config.enable_p2p_compilation = True
    rank = dist.get_rank()
    for call in (_reduced, _total, _sent, _sent_together):
        result = torch.compile(call, backend="eager", fullgraph=True)(torch.full((2,), float(rank)), rank)
        assert result.tolist() == [1, 1] and not _seen(timeline), call.__name__


@pytest.mark.slow
def test_compiled_exchanges_work_as_without() -> None:
    _check_on_ranks(_compiled)
