"""The arithmetic of the parts, and that each finds what is wrong; test_first_hour.py runs them without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hour_report
import part_model
import part_uneven
import pytest
import sm_free_checks
import sm_free_measure
import torch
import torch.distributed as dist
import two_ranks_pair
from hour_report import Report
from one_rank_compare import bitwise, judge, relative
from one_rank_fit import Fit
from one_rank_recommender import Run
from one_rank_trace import MARK, read
from sm_free_running import Running

from lightning_freescale.comm.transports import cuda_driver, nccl, topology

pytestmark = pytest.mark.slow


# -- numbers

ONE = torch.tensor([[1.0, -2.0]])


def test_differences_by_hand() -> None:
    assert bitwise({"weight": ONE}, {"weight": ONE.clone()})
    others = [torch.nextafter(ONE, 2 * ONE), ONE.double(), ONE[0]]
    for other in (*({"weight": each} for each in others), {"bias": ONE}, {"weight": ONE, "bias": ONE}, {}):
        assert not bitwise({"weight": ONE}, other)
    assert not bitwise({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(-0.0)})
    assert bitwise({"weight": torch.tensor(float("nan"))}, {"weight": torch.tensor(float("nan"))})
    small, large = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 100.0])
    off = {"a": small + torch.tensor([0.03, 0.01]), "b": large + 0.1}
    assert relative(off, {"a": small, "b": large}) == pytest.approx((0.03, 0.04))
    assert relative({"a": small}, {"a": 0 * small}) == (float("inf"),) * 2
    with pytest.raises(ValueError, match=r"'a'.*'b'"):
        relative({"a": small}, {"b": small})


def test_what_is_within_its_tolerance(tmp_path: Path) -> None:
    def differing(loss: float = 0.0, weight: float = 0.0, state: float = 0.0) -> Run:
        return Run([1.0, 0.5 * (1 + loss)], {"w": torch.ones(2) * (1 + weight)}, {"s": torch.ones(2) * (1 + state)})

    report, still = Report("numbers", tmp_path), Run([0.5, 0.5])
    for run, tolerance in ((differing(), 0.0), (differing(state=1e-6), 1e-5)):
        judge(report, "case", "reference", run, differing(), tolerance)
    assert not report.found()["failed"]
    for run, tolerance in ((differing(weight=1e-6), 0.0), (differing(loss=1e-4), 1e-5), (differing(weight=float("nan")), 1e-5)):
        judge(report, "case", "reference", run, differing(), tolerance)
    judge(report, "case", "reference", still, still, 0.0)  # losses that do not move prove nothing
    assert [row["ok"] for row in report.found()["rows"]] == [True] * 2 + [False] * 4 and len(report.found()["failed"]) == 4


# -- the host's time and a model's

TRAINING, ENGINE, AUTOGRAD = 1, 2, 3


def _event(category: str, name: str, start: float, end: float, thread: int = TRAINING, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": args}


def _marks(*times: float) -> list[dict[str, Any]]:
    return [_event("user_annotation", MARK, time, time) for time in times] + [_event("gpu_user_annotation", MARK, 0, 9_999)]


def test_a_trace_by_hand() -> None:
    busy = [
        _event("kernel", "before and in the first step", 500, 1_200, thread=7),
        _event("kernel", "beside it", 1_100, 1_400, thread=8),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1_900, 2_100, thread=8),
        _event("gpu_memset", "Memset (Device)", 2_950, 3_500, thread=7),
        _event("kernel", "behind the last step", 4_000, 4_500, thread=7),
    ]
    found = read([*_marks(1_000, 2_000, 3_000), *busy], {})
    assert found.steps == 2 and found.ms == 1 and found.kernels == 0.5
    assert found.idle == pytest.approx(1 - (400 + 200 + 50) / 2_000)
    calls = [
        _event("cuda_runtime", "cudaLaunchKernel", 10, 11),
        _event("cuda_driver", "cuLaunchKernelEx", 12, 13, ENGINE),
        _event("cuda_runtime", "cudaLaunchKernelExC", 14, 15, AUTOGRAD),
        _event("cuda_runtime", "cudaStreamSynchronize", 20, 1_020, ENGINE),
        _event("cuda_runtime", "cudaMemcpy", 40, 140),
        _event("cuda_runtime", "cudaMemcpyAsync", 150, 250, correlation=5),
        _event("cuda_runtime", "cudaMemcpyAsync", 260, 270, correlation=6),
        _event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 200, 210, thread=7, correlation=5),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 265, 268, thread=7, correlation=6),
        _event("cpu_op", "aten::add", 300, 310),
        _event("cpu_op", "aten::copy_", 303, 310),
        _event("cpu_op", "aten::mul", 310, 311),
        _event("cuda_runtime", "cudaDeviceSynchronize", 9_000, 9_500),
    ]
    threads = read([*_marks(0, 1_000, 2_000), *calls], {TRAINING: "training", ENGINE: "engine"}).threads
    assert threads["training"] == {"launches": 0.5, "blocking copies": 1, "waited ms": pytest.approx(0.1), "operators": 1}
    assert threads["engine"] == {"launches": 0.5, "cudaStreamSynchronize": 0.5, "waited ms": 0.5}
    assert threads["others"] == {"launches": 0.5}
    with pytest.raises(ValueError, match="1"):
        read(_marks(0), {})


def test_rounds_of_a_model_are_compared_with_plain_of_the_same_round(tmp_path: Path) -> None:
    cpu = {"training": 0.5, "engine": 0.0, "others": 0.0}
    plain = [Fit(ms, cpu) for ms in (1.0, 2.0, 4.0)]  # the machine slows down for both
    overlapped = [Fit(ms, cpu, predicted=0.9) for ms in (1.1, 2.0, 3.6)]
    report = Report("model", tmp_path)
    part_model._compare(report, "hstu", {"plain": plain, "overlap": overlapped})
    _, row = report.found()["rows"]
    assert (row["step_ms"], row["low"], row["high"], row["rounds"]) == (2.0, 1.1, 3.6, 3)
    assert (row["over_plain"], row["over_low"], row["over_high"]) == (1.0, 0.9, pytest.approx(1.1))
    assert row["host_busy"] == 0.25 and not report.found()["failed"]
    part_model._compare(report, "hstu", {"plain": plain[:1], "overlap": [Fit(1.0, cpu, predicted=0.0)]})
    assert report.found()["failed"], "nothing was overlapped"


# -- contention


def test_contention_by_hand() -> None:
    """The first round warms up; the machine slows down for all in the last two."""
    taken = {("gemm", "alone"): [9.0, 1.0, 2.0, 2.0], ("gemm", "host"): [9.0, 1.1, 2.2, 2.4]}
    figures = sm_free_measure.make_figures(taken, {("gemm_", "host"): [0.0, 1.0, 2.0, 3.0]})
    assert figures["gemm_host_slowdown"] == pytest.approx(1.1)
    assert figures["gemm_host_slowdown_high"] == pytest.approx(1.15)
    assert figures["gemm_alone_ms"] == 2 and figures["gemm_host_gbps"] == 2
    running = Running(lambda: 0)
    running._marks = [(1.0, 0), (2.0, 10**9), (4.0, 5 * 10**9)]
    assert running.gbps(1.5, 3.0) == pytest.approx((3 - 0.5) / 1.5)


@pytest.mark.parametrize(
    ("gpus", "links", "measured"),
    [
        (1, [], {"host": 1, "peer": 1}),
        (4, [], {"native": 2, "host": 2}),
        (4, [1, 2, 3], {"nccl-zero-cta": 2, "native": 2, "host": 2, "peer": 2, "communicators": 2}),
    ],
)
def test_uneven_parts_between_gpus(
    gpus: int, links: list[int], measured: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, int] = {}

    def run(work: Any, *given: Any, timeout: float, devices: int) -> Any:
        found["communicators" if work is sm_free_measure.communicators else given[1]] = devices
        return iter(())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(topology, "_linked_devices", lambda device: links)
    monkeypatch.setattr(cuda_driver, "import_cuda_bindings", lambda: object())
    monkeypatch.setattr(hour_report.harness, "where", lambda: {"commit": ""})
    monkeypatch.setattr(two_ranks_pair, "run", run)
    with pytest.raises(SystemExit, match="0"):
        part_uneven.main(["--out", str(tmp_path)])
    assert found == measured
    skipped = {each["what"] for each in json.loads((tmp_path / "part_uneven.json").read_text())["skipped"]}
    assert skipped == {"nccl-zero-cta", "native", "host", "peer", "communicators"} - measured.keys()


def test_lanes_on_one_communicator_and_on_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[Any, int, int]] = []

    class Communicator:
        def __init__(self, rank: int, size: int, *place: Any) -> None:
            self.window = torch.zeros(size, 100, dtype=torch.uint8)

        def all_to_all(self, stream: Any, output: torch.Tensor, input: torch.Tensor) -> None:
            used.append((self, stream, input.storage_offset()))
            assert output.storage_offset() == input.storage_offset() + 100 and len(input) == len(output) == 40

    free, streams, said = iter([9000, 5000, 4800]), iter([1, 2]), []
    monkeypatch.setattr(nccl, "NcclCommunicator", Communicator)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    for name, value in {"mem_get_info": lambda: (next(free), 0), "Stream": lambda: next(streams), "synchronize": list}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(sm_free_checks, "kernels", lambda step: (step() or 0, "nothing"))
    rank: Any = SimpleNamespace(rank=0, device=0, timeout=1.0, init_gloo=list, say=said.append)
    sm_free_measure.communicators(rank, 40)
    shared, apart = used[:2], used[-2:]
    assert shared[0][0] is shared[1][0] and apart[0][0] is not apart[1][0]
    assert [use[1:] for use in shared] == [use[1:] for use in apart] == [(1, 0), (2, 40)]
    assert [about["lanes"] for kind, about in said if kind == "row"] == ["one communicator", "one per lane"]
    assert said[-1] == ("figure", {"name": "communicator_mib", "value": 0.0})
