"""The backends of torch in a group, the time at which they connect, and their connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.collectives import native
from lightning_freescale.comm.options import LazyGlooOptions, OverlapOptions
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import everyone_sends, make_group, outcome
from tests.helpers.fake_cuda import FakeNccl, cuda_tensor, messages_of, pretend_cuda

CUDA = torch.device("cuda")


def _lazy_group(timeout: float = 40.0) -> Any:
    return dist.new_group(backend="freescale", timeout=timedelta(seconds=timeout), pg_options=LazyGlooOptions())


class _Inner:
    """A stand-in for the inner group that records the calls and the backend for each."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            if not name.startswith("_"):  # else it registers a backend
                self.calls.append((name, type(self.group._get_backend(CUDA)).__name__))

        return call


def _use_on_gpu(group: Any) -> Any:
    real, group._backends.inner = group._backends.inner, _Inner(group)
    inner = group._backends.inner
    dist.all_reduce(torch.ones(2), group=group)
    group.barrier(dist.BarrierOptions())
    before = len(FakeNccl.made)
    group.broadcast([cuda_tensor(2)], dist.BroadcastOptions())
    group.reduce_scatter([cuda_tensor(2)], [[cuda_tensor(2)] * 2])
    group._backends.inner = real
    return before, [name for name, _ in inner.calls], [kind for _, kind in inner.calls], len(FakeNccl.made)


def _made(transport: str, shared: bool) -> list[Any]:
    """Return the backend of a new group for CUDA, the NCCLs that exist and are connected, and then its use."""

    def run() -> Any:
        pretend_cuda("one" if shared else f"gpu {dist.get_rank()}")
        told = messages_of("lightning_freescale")
        group = make_group(transport=transport)
        make_group(transport=transport)
        FakeNccl.made, FakeNccl.connected = FakeNccl.made[:1], FakeNccl.connected[:1]
        found = type(group._get_backend(CUDA)).__name__, len(FakeNccl.made), len(FakeNccl.connected)
        sent = outcome(group.send, [cuda_tensor(2)], 1 - dist.get_rank(), 0) if shared else None
        return found, None if transport == "native" and not shared else _use_on_gpu(group), everyone_sends(group), told, sent

    return run_distributed(run, 2)


@pytest.mark.parametrize("transport", ["native", "host"])
def test_where_ranks_share_a_gpu_gloo_has_its_tensors_and_sends_none(transport: str) -> None:
    told = []
    for found, (_, names, kinds, made), sound, messages, sent in _made(transport, True):
        told += messages
        assert found == ("ProcessGroupGloo", 0, 0) and sound and made == 0
        assert names == ["allreduce", "barrier", "broadcast", "reduce_scatter"] and set(kinds) == {"ProcessGroupGloo"}
        assert sent.kind == "ValueError" and "freescale send" in sent.text and "gloo" in sent.text
    assert len(told) == 1 and "ranks 0 and 1 share a GPU" in told[0]  # of two groups on two ranks


def test_a_lane_with_a_transport_has_nccl_once_it_is_used_and_a_native_one_connects_it_as_the_group_is_made() -> None:
    for found, (before, _, kinds, made), sound, *_ in _made("host", False):
        assert found == ("ProcessGroupGloo", 0, 0) and sound
        assert (before, made) == (0, 1) and kinds == ["ProcessGroupGloo"] * 2 + ["FakeNccl"] * 2
    for found, _, sound, told, _ in _made("native", False):
        assert found == ("FakeNccl", 1, 1) and sound and not told


def test_nccl_takes_no_more_than_the_lane_gives_it_and_an_abort_ends_what_it_has_in_flight() -> None:
    def run() -> Any:
        pretend_cuda(f"gpu {dist.get_rank()}")
        given = []
        for options in (ProcessGroupFreeScaleOptions("native"), OverlapOptions("native")):
            config = SimpleNamespace()
            FakeNccl.Options = lambda config=config: SimpleNamespace(config=config)
            group = dist.new_group(backend="freescale", pg_options=options)
            given.append(vars(config))
        aborted: list[Any] = []
        FakeNccl.abort = lambda nccl: aborted.append(nccl)
        group.abort()
        return given, aborted == FakeNccl.made[-1:]

    assert run_distributed(run, 2) == [([{}, {"max_ctas": 8}], True)] * 2


def test_a_group_that_was_made_before_cuda_was_in_use_takes_no_cuda_tensors() -> None:
    """Check a group whose ranks may share a GPU."""

    def run() -> Any:
        pretend_cuda("one")
        torch.cuda.is_initialized = lambda: False
        group = make_group(transport="native")
        return outcome(group.broadcast, [cuda_tensor(2)], dist.BroadcastOptions())

    for refused in run_distributed(run, 2):
        assert refused.kind == "ValueError" and "torch.cuda.set_device" in refused.text


def test_coalesced_collectives_of_cuda_tensors_are_nccls() -> None:
    def run() -> Any:
        pretend_cuda(f"gpu {dist.get_rank()}")
        group = make_group(transport="host")
        before = len(FakeNccl.made)
        told = outcome(group._start_coalescing, CUDA)
        return before, len(FakeNccl.made), "startCoalescing" in told.text  # the stand-in cannot, either

    assert run_distributed(run, 2) == [(0, 1, True)] * 2


@pytest.mark.parametrize(("transport", "shared"), [("native", False), ("native", True), ("host", False)])
def test_only_lanes_that_use_nccl_connect_it_before_the_first_step_and_let_streams_wait(transport: str, shared: bool) -> None:
    """Check a lane with a transport between GPUs, too. On the CPU, nothing is connected."""

    def run() -> Any:
        on_cpu = make_group(transport="native")
        call, on_cpu._backends.call = on_cpu._backends.call, None
        on_cpu.connect()
        on_cpu._backends.call = call
        pretend_cuda("one" if shared else f"gpu {dist.get_rank()}", bound=False)
        group, calls = make_group(transport=transport), []
        zeros = torch.zeros
        torch.zeros = lambda *shape, device: cuda_tensor(*shape)
        group._all_reduce = lambda tensors: calls.append(tensors[0].device.type) or dist.barrier(async_op=True)
        group.connect()
        torch.zeros = zeros
        waits = [on_cpu.waits_on_device, group.waits_on_device]
        group._executor.transport = object()  # in the place of one between GPUs
        return calls, [*waits, group.waits_on_device], on_cpu._executor.topology.hardware[0].gpu

    by_nccl = (transport, shared) == ("native", False)
    assert run_distributed(run, 2) == [(["cuda"] * by_nccl, [False, by_nccl, True], "")] * 2


def test_gloo_is_connected_as_a_group_is_made_or_at_the_first_collective_of_a_lazy_one() -> None:
    def run() -> list[bool]:
        groups = [make_group(), _lazy_group()]
        before = [group._backends._gloo is not None for group in groups]
        for group in groups:
            assert everyone_sends(group)
            dist.all_reduce(torch.ones(3), group=group)
        return before + [group._backends._gloo is not None for group in groups]

    assert run_distributed(run, 3) == [[True, False, True, True]] * 3


def test_lazy_groups_of_several_threads_do_not_wait_for_each_other_crosswise() -> None:
    def run() -> list[float]:
        groups, sums = [_lazy_group() for _ in range(2)], [torch.ones(1) for _ in range(2)]
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


def test_gloo_that_is_lazy_names_the_rank_that_does_not_come() -> None:
    def run() -> Any:
        group, told = _lazy_group(timeout=1.0), set()
        if dist.get_rank() == 0:
            told = {outcome(dist.all_reduce, torch.ones(1), group=group).text for _ in range(2)}
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        return told

    (text,) = run_distributed(run, 2)[0]
    assert text.startswith("freescale allreduce: gloo ") and "rank 1 did not respond within the timeout of 1 s" in text


def test_messages_of_users_do_not_meet_those_of_the_lane_and_a_tag_is_refused_that_could() -> None:
    """Check messages with the tags of the first headers and exchanges, in flight beside both."""

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
        for tag in (-1, 2**29 - 4):
            refused = outcome(dist.send, torch.zeros(1), 1 - rank, group=group, tag=tag)
            sound.append(refused.kind == "ValueError" and f"tag={tag}" in refused.text)
        return all(sound) and received.tolist() == [0, 0, 1, 1]

    assert run_distributed(run, 2) == [True, True]


def test_what_is_on_a_gpu_is_seen_in_every_argument() -> None:
    def run() -> list[bool]:
        barrier = dist.BarrierOptions()
        found = [native._is_on_gpu(barrier), native._is_on_gpu([[torch.ones(1)], None, 3])]
        barrier.device = CUDA
        return [*found, native._is_on_gpu(barrier), native._is_on_gpu([[torch.ones(1), cuda_tensor(1)]])]

    assert run_distributed(run, 1) == [[False, False, True, True]]


def test_a_lane_that_has_ended_says_so_of_gloos_collectives_too() -> None:
    def run() -> Any:
        group, peer = make_group(), 1 - dist.get_rank()
        failed = outcome(dist.all_to_all_single, torch.zeros(3), torch.zeros(2 + dist.get_rank()), group=group)
        return [
            failed,
            outcome(dist.all_reduce, torch.ones(1), group=group),
            outcome(dist.send, torch.ones(1), peer, group=group),
        ]

    for seen in run_distributed(run, 2):
        assert all("freescale all_to_all_single, lane 'rows'" in each.text and each.seconds < 5 for each in seen)
