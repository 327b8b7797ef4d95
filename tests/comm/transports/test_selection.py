"""The hosts and GPUs of the ranks decide which transport a lane uses."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.options import TRANSPORTS
from lightning_freescale.comm.transports import selection
from lightning_freescale.comm.transports.selection import (
    TransportRefused,
    auto_candidates,
    refusal,
    set_up_transport,
)
from lightning_freescale.comm.transports.topology import RankHardware, Topology
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import Outcome, make_group, outcome
from tests.helpers.fake_cuda import pretend_cuda
from tests.helpers.fake_gpu import on_ranks

_GPU = RankHardware("a", "boot", bindings=True, driver=12080, nccl=(2, 29, 7), zero_cta=True)


def _hosts(*sizes: int, **attributes: Any) -> Topology:
    """Return hosts a, b, ... with these numbers of GPUs, one NVLink domain per host. Global ranks start at 10."""
    hardware = []
    for host, size in zip("abcdef", sizes):
        uuids = [f"{host}{index}" for index in range(size)]
        for index, uuid in enumerate(uuids):
            links = tuple(other for other in uuids if other != uuid)
            hardware.append(replace(_GPU, host=host, gpu=uuid, place=f"cuda:{index}", links=links, **attributes))
    return Topology(tuple(hardware), tuple(range(10, 10 + len(hardware))))


def _but(where: Topology, rank: int, **attributes: Any) -> Topology:
    hardware = list(where.hardware)
    hardware[rank] = replace(hardware[rank], **attributes)
    return replace(where, hardware=tuple(hardware))


_ON_CPU = Topology((RankHardware("a"), RankHardware("a")), (0, 1))


def test_questions() -> None:
    one, two = _hosts(3), _hosts(2, 2)
    assert one.one_host and not one.find_unlinked(range(3)) and one.size == 3
    assert two.hosts == {("a", "boot"): [0, 1], ("b", "boot"): [2, 3]} and not two.one_host
    assert not two.find_unlinked([0, 1])
    assert two.find_unlinked(range(4)) == "ranks 10 and 12 are on hosts a and b"
    where = _but(_hosts(2), 1, boot="another")  # the boot id distinguishes hosts of one name
    assert not where.one_host and "hosts a and a" in where.find_unlinked([0, 1])
    assert _but(_hosts(4), 3, gpu="a1").find_shared_gpu() == "ranks 11 and 13 share a GPU"
    assert _hosts(4).find_shared_gpu() == _hosts(2, 2).find_shared_gpu() == _ON_CPU.find_shared_gpu() == ""
    # ranks that see no other GPU of their host
    assert _hosts(2, 2, visible=1).find_alone() == "ranks 10, 11 of a"
    assert _but(_hosts(3, visible=3), 1, visible=1).find_alone() == "rank 11 of a"
    each_alone, on_one_gpu = _hosts(1, 1, visible=1), _but(_hosts(2, visible=1), 1, gpu="a0")
    assert [where.find_alone() for where in (each_alone, on_one_gpu, _hosts(4, visible=4), _ON_CPU)] == [""] * 4


@pytest.mark.parametrize(
    ("where", "candidates"),
    [
        (_hosts(8), ["peer", "host"]),
        (_hosts(2, 2), ["two-level", "host"]),
        (_hosts(1, 2), ["two-level", "host"]),
        (_hosts(1, 1), ["host"]),
        (_but(_hosts(4), 2, links=()), ["host"]),
        (_but(_hosts(4), 0, links=()), ["host"]),
        (_but(_hosts(2, 2), 3, links=()), ["host"]),
        (_but(_hosts(4), 2, bindings=False), ["host"]),
        (_but(_hosts(2), 1, gpu="a0"), ["host"]),
        (_but(_hosts(2, shares=True), 1, gpu="a0"), ["peer", "host"]),
        (_but(_but(_hosts(2, shares=True), 1, gpu="a0"), 0, shares=False), ["host"]),
        (_hosts(1), []),
        (_but(_hosts(2), 1, gpu=""), []),
        (_ON_CPU, []),
    ],
)
def test_what_auto_may_try(where: Topology, candidates: list[str]) -> None:
    assert auto_candidates(where) == candidates


REFUSED = [
    ("peer", _hosts(1, 1), "ranks 10 and 11 are on hosts a and b", "'two-level'"),
    ("peer", _but(_hosts(3), 2, links=()), "ranks 10 and 12 (cuda:0 and cuda:2 of a)", "'auto'"),
    ("peer", _but(_hosts(2), 1, gpu="a0"), "ranks 10 and 11 both use cuda:0 of a", "torch.cuda.set_device"),
    ("peer", _but(_hosts(3), 1, bindings=False), "cuda-bindings, which rank 11", "'host'"),
    ("peer", _but(_hosts(3), 0, gpu=""), "rank 10", "'host'"),
    ("two-level", _hosts(2), "on a", "'peer'"),
    ("two-level", _hosts(1, 1), "its own", "'host'"),
    ("two-level", _but(_hosts(2, 2), 3, links=()), "ranks 12 and 13", "'auto'"),
    ("nccl-zero-cta", _hosts(1), "2 ranks", "'auto'"),
    ("nccl-zero-cta", _hosts(2, nccl=(2, 27, 5)), "2.28 ", "found 2.27.5"),
    ("nccl-zero-cta", _but(_hosts(2), 1, nccl=(2, 28, 9)), "same NCCL", "found 2.28.9, 2.29.7"),
    ("nccl-zero-cta", _but(_hosts(2), 1, nccl=()), "NCCL", "found none, 2.29.7"),
    ("nccl-zero-cta", _but(_hosts(2), 1, driver=12040), "12.5", "found 12.4"),
    ("nccl-zero-cta", _but(_hosts(2), 0, zero_cta=False), "NCCL_CTA_POLICY_ZERO", "rank 10"),
    ("nccl-zero-cta", _hosts(2, 2), "ranks 10 and 12 are on hosts a and b", "'two-level'"),
    ("nccl-zero-cta", _but(_hosts(2, shares=True), 1, gpu="a0"), "ranks 10 and 11", "torch.cuda.set_device"),
]


def test_what_is_named_and_cannot_be_had_is_refused_with_the_ranks_and_what_to_pass() -> None:
    nothing: Any = None
    for transport, where, *facts in REFUSED:
        with pytest.raises(TransportRefused) as refused:
            set_up_transport(transport, where, nothing, nothing, timedelta(seconds=1))
        assert all(fact in str(refused.value) for fact in (f"transport='{transport}'", *facts)), (refused.value, facts)


def test_what_is_named_and_can_be_had_is_not_refused() -> None:
    assert refusal("peer", _hosts(4)) == refusal("two-level", _hosts(2, 1)) == refusal("nccl-zero-cta", _hosts(2)) == ""
    for versions in ({"nccl": (2, 28)}, {"driver": 12050}):
        assert refusal("nccl-zero-cta", _hosts(2, **versions)) == ""
    assert refusal("peer", _but(_hosts(2, shares=True), 1, gpu="a0")) == ""


def _p2ps(size: int, seconds: float) -> list[Any]:
    said, met = [None] * size, threading.Barrier(size)

    def gather(rank: int, value: Any) -> list[Any]:
        said[rank] = json.loads(json.dumps(value))
        met.wait(seconds)
        return list(said)

    ranks = [10 + each for each in range(size)]
    return [SimpleNamespace(rank=rank, size=size, ranks=ranks, gather_json=partial(gather, rank)) for rank in range(size)]


def _set_up(monkeypatch: pytest.MonkeyPatch, where: Topology, named: str, build: Any, seconds: float = 5) -> list[Any]:
    """Return the transport of every rank if ``build`` creates it."""
    monkeypatch.setattr(selection, "build_transport", lambda kind, host, near, *rest: build(host.p2p.rank, kind, near))
    p2ps = _p2ps(where.size, seconds)

    def run(rank: int) -> Any:
        host: Any = SimpleNamespace(p2p=p2ps[rank])
        made: Any = set_up_transport(named, where, host, dist.HashStore(), timedelta(seconds=seconds))
        return "host" if made is host else made

    return on_ranks(where.size, run)


def test_host_and_native_can_always_be_had_and_hosts_are_told_who_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Topology((RankHardware("a"), RankHardware("b")), (0, 1))
    assert [_set_up(monkeypatch, nowhere, name, None) for name in ("host", "native")] == [["host"] * 2, [None] * 2]
    built = _set_up(monkeypatch, _hosts(2, 1), "two-level", lambda rank, kind, near: (kind, near))
    assert sorted(map(str, built)) == sorted(map(str, [("two-level", [0, 1])] * 2 + [("two-level", [2])]))


class _Built:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_rank_that_fails_to_set_up_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Built()

    def build(rank: int, *rest: Any) -> Any:
        if rank:
            raise RuntimeError("no memory")
        return made

    results = _set_up(monkeypatch, _hosts(2), "peer", build)
    assert made.closed.is_set()
    assert all(isinstance(result, TransportRefused) and "rank 11: RuntimeError: no memory" in str(result) for result in results)


def test_a_rank_that_waits_in_the_set_up_for_one_that_failed_gives_up_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check NCCL, which waits without a limit, and that a transport that is built later is closed."""

    def build(rank: int, *rest: Any) -> Any:
        if rank:
            raise TimeoutError("no memory")
        failed.wait()
        return made

    failed, made = threading.Event(), _Built()
    for refused in _set_up(monkeypatch, _hosts(2), "nccl-zero-cta", build, seconds=2):
        assert "rank 10: the set-up did not end within 1.6 s; rank 11: TimeoutError: no memory" in str(refused)
    failed.set()
    assert made.closed.wait(10)


def test_a_transport_is_closed_if_another_rank_does_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    made, host = _Built(), SimpleNamespace(p2p=_p2ps(2, 0.1)[0])
    monkeypatch.setattr(selection, "build_transport", lambda *given: made)
    with pytest.raises(threading.BrokenBarrierError):
        set_up_transport("peer", _hosts(2), cast(Any, host), dist.HashStore(), timedelta(seconds=1))
    assert made.closed.wait(10)


DIFFERING: list[tuple[str, list[Any]]] = [
    ("chunk_bytes", [1000, 1000, 2000]),
    ("priority", [0, 1, 0]),
    ("transport", ["host", "host", "native"]),
]
NEED_GPU = [] if torch.cuda.is_available() else ["peer", "nccl-zero-cta", "two-level"]


def _made() -> tuple[list[Outcome], list[Outcome]]:
    differing = [outcome(make_group, **{name: values[dist.get_rank()]}) for name, values in DIFFERING]
    return differing, [outcome(make_group, transport=transport) for transport in NEED_GPU]


def test_options_that_differ_and_transports_that_need_cuda_are_refused_on_every_rank() -> None:
    for differing, needing in run_distributed(_made, 3):
        for refused, (name, values) in zip(differing, DIFFERING):
            told = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            assert refused.kind == "ValueError" and f"{name}= is {told}" in refused.text
        for refused, transport in zip(needing, NEED_GPU):
            assert refused.kind == "TransportRefused"
            assert "ranks 0, 1, 2" in refused.text and f"transport='{transport}'" in refused.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is looked at")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_cuda_only_the_host_is_looked_at(transport: str) -> None:
    here = RankHardware.from_this_process(transport)
    assert here.host and not here.gpu and not here.bindings


@pytest.mark.parametrize("transport", ["auto", "host", "native", "peer"])
def test_a_gpu_that_is_not_in_use_is_looked_at_only_where_it_is_named(transport: str) -> None:
    """Check a process on the CPU, which has a current device, too, and lanes that need no link."""

    def run(initialized: bool) -> tuple[str, int]:
        pretend_cuda("a gpu", visible=4, bound=False)
        torch.cuda.is_initialized = lambda: initialized
        here = RankHardware.from_this_process(transport)
        return here.gpu, here.visible

    seen = ("a gpu", 4 if transport in ("auto", "peer") else 0)
    assert run_distributed(run, 1, True, init=False) == [seen]
    assert run_distributed(run, 1, False, init=False) == [seen if transport == "peer" else ("", 0)]
