"""HolisticTraceAnalysis on what a profiled run leaves, by its own parser, where it is installed."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale.profiling.reporting.kineto import KinetoWindow, slices_of, temporal_breakdown
from lightning_freescale.testing import run_distributed
from tests.helpers.chrome_trace import read_trace
from tests.helpers.plain_modules import Plain, fit, profiler


@pytest.fixture(scope="module")
def hta() -> Iterator[Any]:
    """Its class of analyses, which does not round times here to whole microseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
        yield pytest.importorskip("hta.trace_analysis").TraceAnalysis


def _fit(folder: str) -> None:
    fit(Plain(), [profiler(folder, torch_profiler_steps=3)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two ranks, three steps of it under torch.profiler."""
    made = tmp_path_factory.mktemp("bubbles")
    run_distributed(_fit, 2, str(made))
    return made


def _rows(analysis: Any, rank: int) -> Counter[tuple[str, str, int, int]]:
    """Name, category, thread and nanoseconds of every slice that it holds of a rank."""
    frame, names = analysis.t.traces[rank], analysis.t.symbol_table.sym_table
    columns = (frame["name"], frame["cat"], frame["tid"], frame["dur"])
    return Counter((names[name], names[cat], int(tid), round(dur * 1000)) for name, cat, tid, dur in zip(*columns))


def _slices(events: list[dict[str, Any]]) -> Counter[tuple[str, str, int, int]]:
    slices = [event for event in events if event["ph"] == "X"]
    return Counter((e["name"], e["cat"], int(e["tid"]), round(e["dur"] * 1000)) for e in slices)


def test_hta_reads_every_slice_of_the_trace(folder: Path, hta: Any) -> None:
    events = read_trace(folder / "trace.json")
    written = _slices(events)
    analysis = hta(trace_files={0: str(folder / "trace.json")})
    assert _rows(analysis, 0) == written
    assert {"step", "forward", "cpu_op"} <= {cat for _, cat, *_ in written}
    starts = sorted(event["ts"] for event in events if event["ph"] == "X")
    found = sorted(analysis.t.traces[0]["ts"])
    shift = starts[0] - found[0]  # it counts from the first slice
    assert [one + shift for one in found] == pytest.approx(starts, abs=2e-3)


def test_every_rank_leaves_what_torch_writes(folder: Path) -> None:
    files = sorted((folder / "torch_profiler").iterdir())
    assert [path.name for path in files] == ["rank_0.json.gz", "rank_1.json.gz"]
    documents = [json.loads(gzip.decompress(path.read_bytes())) for path in files]
    assert [document["distributedInfo"]["rank"] for document in documents] == [0, 1]


def test_hta_reads_the_folder_of_what_torch_writes(folder: Path, hta: Any) -> None:
    analysis = hta(trace_dir=str(folder / "torch_profiler"))
    assert set(analysis.t.traces) == {0, 1}
    for rank in (0, 1):
        document = json.loads(gzip.decompress((folder / "torch_profiler" / f"rank_{rank}.json.gz").read_bytes()))
        operators = [event for event in document["traceEvents"] if event.get("cat") == "cpu_op"]
        found = Counter({row: count for row, count in _rows(analysis, rank).items() if row[1] == "cpu_op"})
        assert found == _slices(operators)
        assert "aten::linear" in {name for name, *_ in found}


def test_a_file_that_cannot_be_left_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "torch_profiler").touch()
    window = KinetoWindow(1, torch.device("cpu"), tmp_path / "torch_profiler" / "rank_0.json.gz")
    window.start()
    torch.ones(4).sum()
    with pytest.warns(UserWarning, match=r"could not write .*rank_0\.json\.gz"):
        window.stop()
    assert window.breakdown() is None, "the window itself is there"


GEMM, REDUCE = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"
WORK = [  # category, name, stream, start and end in microseconds
    ("kernel", GEMM, 7, 100, 180),
    ("kernel", GEMM, 7, 200, 260),
    ("kernel", REDUCE, 20, 230, 330),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 340, 350),
    ("kernel", "void at::native::vectorized_elementwise_kernel<4>", 7, 400, 500),
    ("gpu_memset", "Memset (Device)", 7, 520, 530),
]


def _cuda_trace() -> dict[str, Any]:
    """Made up, with the fields that torch writes of kernels and of the calls that launch them."""
    events: list[dict[str, Any]] = []
    for number, (cat, name, stream, start, end) in enumerate(WORK, 1):
        call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}[cat]
        ids = {"External id": number, "correlation": number}
        host, device = {"ph": "X", "pid": 900, "tid": 900, "ts": start - 50.0}, {"device": 0, "context": 1, "stream": stream}
        events += [
            {**host, "cat": "cpu_op", "name": "aten::op", "dur": 20.0, "args": {"External id": number}},
            {**host, "cat": "cuda_runtime", "name": call, "ts": start - 45.0, "dur": 10.0, "args": {"cbid": 211, **ids}},
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": float(start), "dur": float(end - start)}
            | {"args": {**device, **ids}},
        ]
    return {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}


def test_device_idle_is_what_hta_calls_temporal_breakdown(tmp_path: Path, hta: Any) -> None:
    """On kernels that are made up: not tested on GPU."""
    path = tmp_path / "rank_0.json"
    path.write_text(json.dumps(_cuda_trace()))
    ours = temporal_breakdown(slices_of(_cuda_trace()["traceEvents"], 0.0))
    assert ours is not None
    (theirs,) = hta(trace_dir=str(tmp_path)).get_temporal_breakdown(visualize=False).to_dict("records")
    names = ("idle_time_pctg", "compute_time_pctg", "non_compute_time_pctg")
    assert [100 * ours.idle, 100 * ours.compute, 100 * ours.other] == pytest.approx([theirs[n] for n in names], abs=0.01)
    assert ours.idle == pytest.approx(100 / 430), "20 + 10 + 50 + 20 us"


def test_hta_breaks_down_kernels_of_a_device(tmp_path: Path, hta: Any) -> None:
    """All that it says about the same trace: what it cannot say of a CPU is not for lack of ours."""
    (tmp_path / "rank_0.json").write_text(json.dumps(_cuda_trace()))
    analysis = hta(trace_dir=str(tmp_path))
    kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
    assert {"COMPUTATION", "COMMUNICATION", "MEMORY"} <= set(kinds["kernel_type"].str.split(" overlapping ").explode())
    assert analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].tolist() == [30.0]
    assert not analysis.get_idle_time_breakdown(visualize=False)[0].empty
