"""Which of torch's own backends a group has, when they connect, and over which connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import FreeScaleGroup, native, process_group
from lightning_freescale.comm.priority import PRIORITY_GATE
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import everyone_sends, make_group, outcome
from tests.helpers.fake_cuda import FakeNccl, cuda_tensor, messages_of, pretend_cuda

CUDA = torch.device("cuda")


class _Inner:
    """Stands in for the inner group: notes what comes, and what would have taken it."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, []

    def _set_default_backend(self, kind: Any) -> None:
        pass

    def _register_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, type(self.group._get_backend(CUDA)).__name__))

        return call


def _made(transport: str, shared: bool, use: Callable[[Any], Any] = lambda group: None) -> list[Any]:
    """The backends that a group has for CUDA once it is made; NCCLs made and connected then; what ``use`` returns."""

    def run() -> Any:
        pretend_cuda("one" if shared else f"gpu {dist.get_rank()}")
        told = messages_of("lightning_freescale")
        group = make_group(transport=transport)
        make_group(transport=transport)
        FakeNccl.made, FakeNccl.connected = FakeNccl.made[:1], FakeNccl.connected[:1]
        found = type(group._get_backend(CUDA)).__name__, len(FakeNccl.made), len(FakeNccl.connected)
        return *found, use(group), everyone_sends(group), told

    return run_distributed(run, 2)


def _use_on_gpu(group: Any) -> Any:
    """Delegated collectives, first of CPU tensors, then of CUDA tensors."""
    real, group._backends.inner = group._backends.inner, _Inner(group)
    inner = group._backends.inner
    dist.all_reduce(torch.ones(2), group=group)
    group.barrier(dist.BarrierOptions())
    before = len(FakeNccl.made)
    group.broadcast([cuda_tensor(2)], dist.BroadcastOptions())
    group.reduce_scatter([cuda_tensor(2)], [[cuda_tensor(2)] * 2])
    group._backends.inner = real
    return before, inner.calls, len(FakeNccl.made)


def test_a_lane_with_a_transport_has_nccl_only_once_it_is_used() -> None:
    for backend, made, connected, used, sound, _ in _made("host", False, _use_on_gpu):
        assert (backend, made, connected) == ("ProcessGroupGloo", 0, 0)
        assert used == (0, [*[(name, "ProcessGroupGloo") for name in ("allreduce", "barrier")],
                            *[(name, "FakeNccl") for name in ("broadcast", "reduce_scatter")]], 1)  # fmt: skip
        assert sound


def test_a_native_lane_has_nccl_connected_as_the_group_is_made() -> None:
    assert _made("native", False) == [("FakeNccl", 1, 1, None, True, [])] * 2


@pytest.mark.parametrize("ctas", [None, 5])
def test_nccl_takes_no_more_than_the_lane_gives_it(ctas: int | None) -> None:
    def run() -> dict[str, int]:
        pretend_cuda(f"gpu {dist.get_rank()}")
        config = SimpleNamespace()
        FakeNccl.Options = lambda: SimpleNamespace(config=config)
        make_group(transport="native", nccl_ctas=ctas)
        return vars(config)

    assert run_distributed(run, 2) == [{} if ctas is None else {"max_ctas": ctas}] * 2


@pytest.mark.parametrize("transport", ["native", "host"])
def test_where_ranks_share_a_gpu_gloo_has_its_tensors(transport: str) -> None:
    told = []
    for backend, made, connected, used, sound, messages in _made(transport, True, _use_on_gpu):
        told += messages
        assert (backend, made, connected) == ("ProcessGroupGloo", 0, 0)
        assert {kind for _, kind in used[1]} == {"ProcessGroupGloo"} and used[2] == 0
        assert sound
    assert len(told) == 1 and "ranks 0 and 1 share a GPU, which NCCL refuses" in told[0]  # of two groups on two ranks


def test_a_group_that_was_made_before_cuda_was_in_use_takes_no_cuda_tensors() -> None:
    """Its ranks may share a GPU."""

    def run() -> Any:
        pretend_cuda("one")
        torch.cuda.is_initialized = lambda: False
        group = make_group(transport="native")
        return outcome(group.broadcast, [cuda_tensor(2)], dist.BroadcastOptions())

    for refused in run_distributed(run, 2):
        assert refused.kind == "ValueError" and "call torch.cuda.set_device before the group is made" in refused.text


@pytest.mark.parametrize("name", ["send", "recv"])
def test_gloo_sends_no_cuda_tensors(name: str) -> None:
    def run() -> Any:
        pretend_cuda("one")
        return outcome(getattr(make_group(transport="host"), name), [cuda_tensor(2)], 1 - dist.get_rank(), 0)

    for refused in run_distributed(run, 2):
        assert refused.kind == "ValueError" and "gloo cannot send, and ranks share a GPU: pass tensor.cpu()" in refused.text


def test_who_cannot_make_its_group_tells_the_others() -> None:
    def run() -> Any:
        if dist.get_rank() == 1:
            process_group.NativeBackends = None
        return outcome(make_group, timeout=60.0), dict(PRIORITY_GATE.lanes)

    (other, _), (mine, lanes) = run_distributed(run, 2)
    assert "'NoneType' object is not callable" in mine.text and not any(lanes.values())
    assert "rank 1 has given up: freescale set-up" in other.text and other.seconds < 30


def test_an_abort_ends_what_nccl_has_in_flight() -> None:
    def run() -> Any:
        pretend_cuda(f"gpu {dist.get_rank()}")
        group, aborted = make_group(transport="native"), []
        FakeNccl.abort = lambda nccl: aborted.append(nccl)
        group.abort()
        return aborted == FakeNccl.made

    assert run_distributed(run, 2) == [True, True]


def test_coalesced_collectives_of_cuda_tensors_are_nccls() -> None:
    def run() -> Any:
        pretend_cuda(f"gpu {dist.get_rank()}")
        group = make_group(transport="host")
        before = len(FakeNccl.made)
        told = outcome(group._start_coalescing, CUDA)
        return before, len(FakeNccl.made), "startCoalescing" in told.text  # the stand-in cannot, either

    assert run_distributed(run, 2) == [(0, 1, True)] * 2


def test_only_lanes_that_use_nccl_connect_it_before_the_first_step(monkeypatch: Any) -> None:
    def connected(transport: str, shared: bool) -> list[Any]:
        def run() -> list[Any]:
            pretend_cuda("one" if shared else f"gpu {dist.get_rank()}", bound=False)
            group, calls = make_group(transport=transport), []
            zeros = torch.zeros
            torch.zeros = lambda *shape, device: cuda_tensor(*shape)
            group._all_reduce = lambda tensors: calls.append(tensors[0].device.type) or dist.barrier(async_op=True)
            group.connect()
            torch.zeros = zeros
            return calls

        return run_distributed(run, 2)

    assert connected("native", False) == [["cuda"]] * 2
    assert connected("native", True) == connected("host", False) == [[]] * 2


def test_what_lets_streams_wait_for_other_ranks_is_known() -> None:
    def run() -> list[bool]:
        on_cpu = make_group(transport="native")
        pretend_cuda(f"gpu {dist.get_rank()}")
        native, host = (make_group(transport=name) for name in ("native", "host"))
        found = [each.waits_on_device for each in (on_cpu, native, host)]
        native._executor.transport = object()  # in the place of one between GPUs
        return [*found, native.waits_on_device]

    assert run_distributed(run, 2) == [[False, True, False, True]] * 2


def test_on_the_cpu_nothing_is_connected_or_looked_at() -> None:
    def run() -> Any:
        group = make_group(transport="native")
        group._backends.call = None
        group.connect()
        return group._executor.topology.hardware[0].gpu

    assert run_distributed(run, 2) == ["", ""]


def _connections() -> int:
    """Established TCP connections of this process."""
    sockets = {os.readlink(link)[8:-1] for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
               and os.readlink(link).startswith("socket:")}  # fmt: skip
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]]
    return sum(row[9] in sockets and row[3] == "01" for row in rows)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_group_has_one_connection_to_each_peer_and_gloo_another(lazy: bool) -> None:
    def run() -> list[int]:
        dist.barrier()
        counts = [_connections()]
        group: FreeScaleGroup = make_group(lazy_gloo=lazy)
        dist.barrier()
        counts.append(_connections())
        assert everyone_sends(group)
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_gather_object([None] * 3, "text", group=group)
        dist.barrier()
        counts.append(_connections())
        return [later - counts[0] for later in counts[1:]]

    for made, used in run_distributed(run, 3):
        assert made == (2 if lazy else 4) and used >= 4  # and one to the store


def test_lazy_groups_of_several_threads_do_not_wait_for_each_other_crosswise() -> None:
    def run() -> list[float]:
        groups, sums = [make_group(lazy_gloo=True) for _ in range(2)], [torch.ones(1) for _ in range(2)]
        threads = [
            threading.Thread(target=dist.all_reduce, args=(each,), kwargs={"group": group}) for each, group in zip(sums, groups)
        ]
        first = dist.get_rank()
        for thread in (threads[first], threads[1 - first]):
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join()
        return [each.item() for each in sums]

    assert run_distributed(run, 2, timeout=20) == [[2.0, 2.0]] * 2


def test_gloo_that_is_lazy_names_who_does_not_come() -> None:
    def run() -> Any:
        group = make_group(lazy_gloo=True, timeout=1.0)
        if dist.get_rank() == 1:
            dist.monitored_barrier(timeout=timedelta(seconds=60))
            return None
        both = [outcome(dist.all_reduce, torch.ones(1), group=group) for _ in range(2)]
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        return [each.text for each in both]

    told = run_distributed(run, 2)[0]
    late = "while a freescale group was connected, rank 1 did not come within 1 s"
    assert told == [f"freescale allreduce: gloo could not be connected: {late}"] * 2


def test_messages_of_users_do_not_meet_those_of_the_lane() -> None:
    """With the tags of the first headers and of exchanges, in flight beside both."""

    def run() -> bool:
        group, rank = make_group(), dist.get_rank()
        tags = [0, 1, 2, 2**29 - 5]
        got = [torch.zeros(5) for _ in tags]
        works = [dist.irecv(each, 1 - rank, group=group, tag=tag) for each, tag in zip(got, tags)]
        sound = [everyone_sends(group, 5000)]
        received, send = torch.zeros(4), torch.full((4,), float(rank))
        group.exchange(received, send, [2, 2], [2, 2])
        for tag in tags:
            dist.send(torch.full((5,), float(tag % 1000 + rank)), 1 - rank, group=group, tag=tag)
        for work in works:
            work.wait()
        sound += [bool((each == tag % 1000 + 1 - rank).all()) for each, tag in zip(got, tags)]
        return all(sound) and received.tolist() == [0, 0, 1, 1]

    assert run_distributed(run, 2) == [True, True]


def test_a_tag_that_is_none_is_refused() -> None:
    def run() -> Any:
        group = make_group()
        peer = 1 - dist.get_rank()
        return [outcome(dist.send, torch.zeros(1), peer, group=group, tag=tag) for tag in (-1, 2**29 - 4)]

    for refused in run_distributed(run, 2)[0]:
        assert refused.kind == "ValueError" and "pass one from 0 to 536870907" in refused.text


def test_unequal_lists_of_shared_gpus_are_packed() -> None:
    """Where gloo has the CUDA tensors, whose own takes lists of equal tensors only; shown with CPU tensors."""

    def run() -> list[Any]:
        group, rank = make_group(transport="native"), dist.get_rank()
        out = [torch.zeros(rank + 1), torch.zeros(rank + 1)]
        dist.all_to_all(out, [torch.full((1,), float(rank)), torch.full((2,), float(rank))], group=group)
        return [each.tolist() for each in out]

    assert run_distributed(run, 2) == [[[0.0], [1.0]], [[0.0, 0.0], [1.0, 1.0]]]


def test_what_is_on_a_gpu_is_seen_in_every_argument() -> None:
    barrier = dist.BarrierOptions()
    assert not native._is_on_gpu(barrier) and not native._is_on_gpu([[torch.ones(1)], None, 3])
    barrier.device = CUDA
    assert native._is_on_gpu(barrier) and native._is_on_gpu([[torch.ones(1), cuda_tensor(1)]])


def test_a_lane_that_has_ended_says_so_of_gloos_collectives_too() -> None:
    def run() -> Any:
        group, peer = make_group(), 1 - dist.get_rank()
        failed = outcome(dist.all_to_all_single, torch.zeros(3), torch.zeros(2 + dist.get_rank()), group=group)
        return (
            failed,
            outcome(dist.all_reduce, torch.ones(1), group=group),
            outcome(dist.send, torch.ones(1), peer, group=group),
        )

    for failed, *later in run_distributed(run, 2):
        assert failed.text.startswith("freescale all_to_all_single, lane 'rows'")
        assert all("freescale all_to_all_single, lane 'rows'" in each.text and each.seconds < 5 for each in later)
