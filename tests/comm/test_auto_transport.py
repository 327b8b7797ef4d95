"""An "auto" lane tries its candidates: real lanes over gloo, with CPU tensors instead of CUDA tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.comm.collectives import auto_transport
from lightning_freescale.comm.collectives.auto_transport import ProofDevice, settle_transport
from lightning_freescale.comm.transports.host import HostTransport
from lightning_freescale.comm.transports.selection import TransportRefused
from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import everyone_sends, lane_threads, make_group
from tests.helpers.fake_cuda import messages_of, pretend_cuda

CUDA = torch.device("cuda", 0)


class _SlowNative(auto_transport.Proof):
    """A stand-in for a GPU on which torch's own backend takes 20 s longer."""

    def _measure(self) -> dict[str, float]:
        milliseconds = super()._measure()
        return milliseconds | {"native": milliseconds["native"] + 20_000}


def _settled(group: Any, candidates: tuple[str, ...] = ("host",), native_is_slow: bool = True) -> str:
    auto_transport.auto_candidates = lambda topology: list(candidates)
    kind = _SlowNative if native_is_slow else auto_transport.Proof
    auto_transport.Proof = partial(kind, largest_bytes=200_000, typical_bytes=30_000, late_seconds=0.05)
    device = ProofDevice(torch.device("cpu"), lambda: None, lambda: None)
    auto_transport.ProofDevice = SimpleNamespace(from_cuda=lambda: device)
    settle_transport(group._backends._opts, group._executor, group._backends)
    return "native" if group._executor.transport is None else type(group._executor.transport).__name__


def _on_trial(trouble: Callable[[Any], object]) -> None:
    """Call ``trouble`` on this rank after every transfer of a lane on trial."""
    start = HostTransport.start_transfer

    def troubled(host: HostTransport, transfer: Any, ranks: Any = None) -> Any:
        complete = start(host, transfer, ranks)
        if not host.options.name.endswith("on trial"):
            return complete
        return lambda pause: (complete(pause), trouble(transfer))

    HostTransport.start_transfer = troubled


def _corrupt(transfer: Any) -> None:
    if transfer.incoming[0].numel() > 3:
        transfer.incoming[0][2] ^= 1


def _hang(transfer: Any) -> None:
    threading.Event().wait()


def _raise(transfer: Any) -> None:
    raise OSError("no memory to pin")


def test_what_wins_is_taken_and_told_once_and_what_cannot_be_set_up_is_not_taken() -> None:
    """Check that the failure of "peer", which needs a GPU, is logged."""

    def run() -> Any:
        told, group = messages_of("lightning_freescale"), make_group(chunk_bytes=1000)
        begin, sent = auto_transport._begin_native, []
        auto_transport._begin_native = lambda *given: sent.append(given[-1]) or begin(*given)
        took = _settled(group, ("peer", "host"))
        return took, everyone_sends(group), len(lane_threads()) <= 1, max(sent[-2:]), told

    results = run_distributed(run, 2)
    # the parts of the measured exchange are uneven, so that padding costs time there
    assert [result[:4] for result in results] == [
        ("HostTransport", True, True, parts) for parts in ([7500, 22500], [22500, 7500])
    ]
    warning, line = results[0][4]
    assert "'peer'" in warning and "'host'" in line and "ranks 0, 1" in line and "gloo 2" in line and ", host " in line
    assert results[1][4] == []


@pytest.mark.parametrize(("trouble", "why"), [(_corrupt, "rank 1: 1 "), (_hang, "4 s"), (_raise, "no memory to pin")])
def test_what_is_wrong_or_hangs_or_raises_on_one_rank_is_taken_on_none(trouble: Any, why: str) -> None:
    def run() -> Any:
        if dist.get_rank() == 1:
            _on_trial(trouble)
        told, group = messages_of("lightning_freescale"), make_group(chunk_bytes=1000, timeout=8.0)
        return _settled(group), told, everyone_sends(group)

    results = run_distributed(run, 2)
    assert [(result[0], result[2]) for result in results] == [("native", True)] * 2
    warning, line = results[0][1]
    assert "'host'" in warning and "rank 1" in warning and why in warning
    assert "uses gloo for ranks 0, 1" in line and "not measured" in line


def test_the_verdict_is_kept_for_the_same_ranks_and_sizes_and_left_where_it_cannot_be_set_up() -> None:
    def run() -> Any:
        proofs = []
        prove = auto_transport._prove
        auto_transport._prove = lambda *args: proofs.append(1) or prove(*args)
        told, groups = messages_of("lightning_freescale"), [make_group(chunk_bytes=size) for size in (1000, 1000, 2000, 1000)]
        took = [_settled(group) for group in groups[:3]]
        if dist.get_rank() == 1:  # this rank has no verdict, so all measure again
            auto_transport._verdicts.clear()
        took.append(_settled(groups[3]))
        lines, later = len(told), make_group(chunk_bytes=1000)

        def refuse(kind: str) -> None:
            raise TransportRefused("no memory")

        later._executor.set_up_transport = refuse
        took.append(_settled(later))
        return took, len(proofs), all(everyone_sends(group) for group in groups), told[lines:]

    (*first, told), (*second, nothing) = run_distributed(run, 2)
    assert first == second == [["HostTransport"] * 4 + ["native"], 3, True]
    assert len(told) == 1 and "no memory" in told[0] and not nothing


def test_groups_with_gpus_try_and_hidden_gpus_are_told() -> None:
    """Check that torch sees a connected NCCL only after the group has been created."""

    def run() -> Any:
        pretend_cuda(f"gpu {dist.get_rank()}", visible=1)
        told, seen = messages_of("lightning_freescale"), []
        device = ProofDevice(CUDA, compute=None, synchronize=None)
        auto_transport.ProofDevice = SimpleNamespace(from_cuda=lambda: seen.append("device") or device)

        def prove(opts: Any, lane: Any, backends: Any, *rest: Any) -> Any:
            backends.register_nccl()
            seen.append(type(backends._outer()._get_backend(torch.device("cuda"))).__name__)
            return auto_transport.Verdict("native", {"native": 1.0, "host": 2.0}, {})

        auto_transport._prove = prove
        group = make_group(transport="auto")
        seen.append(type(group._get_backend(torch.device("cuda"))).__name__)
        group._backends.register_nccl()
        seen.append(type(group._get_backend(torch.device("cuda"))).__name__)
        later = make_group(transport="auto")
        seen.append(type(later._get_backend(torch.device("cuda"))).__name__)
        return list(map(str, seen)), told

    results = run_distributed(run, 2)
    assert results[0][0] == ["device", "ProcessGroupGloo", "ProcessGroupGloo", "FakeNccl", "FakeNccl"]
    warning, line = results[0][1]
    assert "ranks 0, 1 of " in warning and "torch.cuda.set_device" in warning
    assert all(fact in line for fact in ("uses NCCL", "ranks 0, 1", "NCCL 1.00 ms, host 2.00 ms", "'peer'", "'two-level'"))
    assert results[1][1] == []


def test_ranks_gather_values_of_any_length_and_miss_a_rank_that_does_not_come() -> None:
    def run() -> Any:
        p2p, rank = make_group(timeout=2.0)._executor.p2p, dist.get_rank()
        said = p2p.gather_json({"error": "\U0001f600" * 5000 * rank, "value": 1 / 3})
        begun = time.monotonic()
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="rank 1 did not respond within the timeout of 2 s"):
                p2p.gather_json("rank 1 does not come")
        dist.barrier()
        if rank == 1:
            with pytest.raises(dist.DistBackendError, match="rank 0 has given up: rank 1 did not respond"):
                p2p.gather_json("rank 1 comes late")
        return [(len(each["error"]), each["value"]) for each in said], rank or 1 < time.monotonic() - begun < 30

    assert run_distributed(run, 2) == [([(0, 1 / 3), (5000, 1 / 3)], True), ([(0, 1 / 3), (5000, 1 / 3)], 1)]
