"""HolisticTraceAnalysis on what a profiled run leaves, by its own parser, where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_freescale.profiling.reporting.kineto import slices_of, temporal_breakdown


@pytest.fixture(scope="module")
def hta() -> Iterator[Any]:
    """Yield HTA's class of analyses, without its rounding to whole microseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
        yield pytest.importorskip("hta.trace_analysis").TraceAnalysis


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
    """On kernels that are made up."""
    path = tmp_path / "rank_0.json"
    path.write_text(json.dumps(_cuda_trace()))
    ours = temporal_breakdown(slices_of(_cuda_trace()["traceEvents"], 0.0))
    assert ours is not None
    analysis = hta(trace_dir=str(tmp_path))
    (theirs,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    names = ("idle_time_pctg", "compute_time_pctg", "non_compute_time_pctg")
    assert [100 * share for share in ours.values()] == pytest.approx([theirs[n] for n in names], abs=0.01)
    assert ours["idle"] == pytest.approx(100 / 430), "20 + 10 + 50 + 20 us"
    kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
    assert {"COMPUTATION", "COMMUNICATION", "MEMORY"} <= set(kinds["kernel_type"].str.split(" overlapping ").explode())
    assert analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].tolist() == [30.0]
    assert not analysis.get_idle_time_breakdown(visualize=False)[0].empty
