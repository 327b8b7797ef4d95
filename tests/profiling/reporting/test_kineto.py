import gzip
import json
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting import kineto
from lightning_freescale.profiling.reporting.kineto import KinetoWindow, slices_of, temporal_breakdown
from lightning_freescale.profiling.reporting.trace import write_trace
from lightning_freescale.testing import run_distributed
from tests.helpers.chrome_trace import read_trace

CPU = torch.device("cpu")


def _same(seconds):
    return seconds


@pytest.fixture
def window():
    window = KinetoWindow(1, CPU)
    yield window
    window.stop()


def _mark(name, seconds=0.001):
    with record_function(name):
        start = time.perf_counter()
        time.sleep(seconds)
        return start, time.perf_counter()


def _recorded(window, work):
    window.start()
    try:
        return work()
    finally:
        window.stop()


@pytest.mark.xdist_group("timing")
def test_operators_are_where_perf_counter_saw_them(window, tmp_path):
    def work():
        _mark("first", 0.0)  # the first of a process takes a millisecond by itself
        torch.nn.Linear(64, 64)(torch.ones(500, 64)).sum().backward()
        return time.perf_counter(), *_mark("known", 0.03), time.perf_counter()

    before, start, end, after = _recorded(window, work)
    known = next(event for event in window.events(_same) if event["name"] == "known")
    assert before - 1e-3 <= known["ts"] <= start + 1e-3
    assert end - 1e-3 <= known["ts"] + known["dur"] <= after + 1e-3
    assert (known["ph"], known["cat"]) == ("X", "user_annotation")
    assert known["tid"] == f"kineto: thread {threading.get_native_id()}"
    there = next(event for event in window.events(lambda seconds: 2 * seconds - 5) if event["name"] == "known")
    assert there["ts"] == pytest.approx(2 * known["ts"] - 5) and there["dur"] == pytest.approx(2 * known["dur"])
    assert temporal_breakdown(window.slices) is None, "there is no GPU"
    # a mark is over when this thread is next on a core
    row = [ResolvedStep(before - 0.001, after + 0.001)]
    events = read_trace(write_trace(tmp_path / "trace.json", [row], kineto=[window.events(_same)]))
    known, around = (next(event for event in events if event["name"] == name) for name in ("known", "step 0"))
    assert around["ts"] <= known["ts"] and known["ts"] + known["dur"] <= around["ts"] + around["dur"]


def test_what_is_short_is_left_out_and_said(window):
    def work():
        for _ in range(100):
            torch.ones(1).add_(1)
        _mark("long", 0.03)

    _recorded(window, work)
    events = window.events(_same)
    assert min(event["dur"] for event in events if event["ph"] == "X") >= kineto.SHORTEST
    (note,) = (event for event in events if event["ph"] == "i")
    assert int(note["name"].split(" ")[0]) >= 100 and "and 0 slices" in note["name"]


def test_a_file_that_cannot_be_left_is_a_warning(tmp_path):
    for name in ("a_file", "a_folder"):
        window = KinetoWindow(1, CPU, tmp_path / name / "rank_0.json.gz")
        if name == "a_file":
            (tmp_path / name).touch()
            with pytest.warns(UserWarning, match=r"a_file/rank_0\.json\.gz"):
                _recorded(window, lambda: _mark("known"))
        else:
            _recorded(window, lambda: _mark("known"))
        assert temporal_breakdown(window.slices) is None, "the window itself is there"
    (written,) = (tmp_path / "a_folder").iterdir()
    document = json.loads(gzip.decompress(written.read_bytes()))
    assert "known" in {event.get("name") for event in document["traceEvents"]}


def _on_gpu(cat, name, thread, start, seconds):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": seconds, "args": {}}


def _kineto_events():
    """As Kineto writes them on a GPU, cut down to what is read."""
    host = {"ph": "X", "pid": 100, "tid": 101, "ts": 10.0, "dur": 5.0, "args": {}}
    return [
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 101, "ts": 0.0, "args": {"name": "thread 101 (python)"}},
        {**host, "cat": "cpu_op", "name": "aten::mm"},
        {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"ph": "s", "id": 1, "pid": 100, "tid": 101, "ts": 10.0, "cat": "ac2g", "name": "ac2g"},
        _on_gpu("kernel", "gemm", 7, 20.0, 4.0),
        _on_gpu("gpu_memcpy", "Memcpy HtoD", 20, 26.0, 2.0),
        _on_gpu("gpu_memset", "Memset (Device)", 7, 29.0, 1.0),
        _on_gpu("gpu_user_annotation", "step", 7, 20.0, 10.0),
        {**_on_gpu("Trace", "PyTorch Profiler (0)", "PyTorch Profiler", 0.0, 99.0), "pid": "Spans"},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 99.0},
    ]


def test_kernels_come_from_their_streams_and_go_before_operators(window, monkeypatch):
    found = slices_of(_kineto_events(), 3.0)
    assert [(event["name"], event["tid"], event["cat"]) for event in found] == [
        ("aten::mm", "kineto: thread 101", "cpu_op"),
        ("gemm", "kineto: stream 7", "kernel"),
        ("Memcpy HtoD", "kineto: stream 20", "gpu_memcpy"),
        ("Memset (Device)", "kineto: stream 7", "gpu_memset"),
    ]
    assert found[1]["ts"] == pytest.approx(3.00002, abs=1e-9) and found[1]["dur"] == pytest.approx(4e-6)
    monkeypatch.setattr(window, "slices", found)
    breakdown = temporal_breakdown(window.slices)
    assert breakdown == pytest.approx({"idle": 0.3, "compute": 0.4, "other": 0.3})
    names = [event["name"] for event in window.events(_same)]
    assert names[:3] == ["gemm", "Memcpy HtoD", "Memset (Device)"], "kernels are never too short"
    monkeypatch.setattr(kineto, "SHORTEST", 0.0)
    monkeypatch.setattr(kineto, "LIMIT", 2)
    *kept, note = window.events(_same)
    assert [event["name"] for event in kept] == ["gemm", "Memcpy HtoD"], "the longest"
    assert " 2 slices " in note["name"] and note["ts"] == found[0]["ts"]
    assert temporal_breakdown(window.slices)["idle"] == pytest.approx(0.3), "of all kernels"


def test_a_window_has_steps_and_kernels_on_cuda():
    for device, kernels in (("cpu", False), ("cuda", True)):
        assert (ProfilerActivity.CUDA in KinetoWindow(1, torch.device(device))._activities) is kernels


def test_start_and_stop_come_in_order_and_again(window, monkeypatch):
    monkeypatch.setattr(kineto, "SHORTEST", 0.0)
    for name in ("first", "second"):
        window.start()
        assert window.running
        with pytest.raises(RuntimeError, match="torch_profiler_steps"):
            window.start()
        _mark(name)
        window.stop()
        assert not window.running
        assert [event["name"] for event in window.events(_same)] == [name], "nothing is left out, and no event says so"


@pytest.mark.parametrize("warms_up", [False, True])
def test_it_does_not_begin_beside_another_profiler(window, warms_up):
    stages = schedule(wait=0, warmup=1, active=1) if warms_up else None
    with profile(activities=[ProfilerActivity.CPU], schedule=stages) as other:
        with pytest.raises(RuntimeError, match=r"torch_profiler_steps.*profiler='pytorch'"):
            window.start()
        assert not window.running
        if warms_up:
            other.step()
        _mark("theirs", 0.0)
    assert "theirs" in {event.name for event in other.events()}


@pytest.mark.parametrize("stages", [None, schedule(wait=0, warmup=5, active=1)])
def test_it_begins_after_another_profiler(window, stages):
    """Even if that one never came further than its warm-up."""
    not_begun = profile(schedule=schedule(wait=0, warmup=1, active=1))
    with profile(activities=[ProfilerActivity.CPU], schedule=stages) as over:
        pass
    _recorded(window, lambda: _mark("known"))
    assert "known" in {event["name"] for event in window.events(_same)}
    del not_begun, over


def test_a_window_that_another_profiler_took_over_says_so():
    """In a process of its own: torch ends the process where this is not noticed."""

    def run():
        window = KinetoWindow(1, CPU)
        window.start()
        with profile(activities=[ProfilerActivity.CPU]):
            torch.ones(1).add_(1)
        with pytest.raises(RuntimeError, match="torch_profiler_steps"):
            window.stop()

    run_distributed(run, 1, init=False)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0}


def _kernel(start, end, name="gemm", cat="kernel", stream=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": f"kineto: stream {stream}"}


def _beside(until, name, cat):
    """Return a kernel that computes, and another one from 4 to 10."""
    return [_kernel(0, until), _kernel(4, 10, name, cat, stream=20)]


SENDS = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
MOVES = [(NCCL, "kernel"), (SENDS, "kernel"), ("Memcpy HtoD", "gpu_memcpy"), ("Memset (Device)", "gpu_memset")]
SHARES = [  # idle, compute, other
    ([_kernel(10, 12), _kernel(11, 14, stream=8), _kernel(18, 20)], (0.4, 0.6, 0.0)),
    ([OPERATOR, _kernel(10, 20)], (0.0, 1.0, 0.0)),
    ([_kernel(15, 20), _kernel(0, 10), _kernel(2, 3), _kernel(4, 5)], (0.25, 0.75, 0.0)),
    *(([_kernel(0, 10, name)], (0.0, 1.0, 0.0)) for name in ("void vectorized_elementwise_kernel<4>()", "my_ncclKernel")),
    # communication and memory count where no compute hides them
    *((_beside(6, name, cat), (0.0, 0.6, 0.4)) for name, cat in MOVES),
    *((_beside(10, name, cat), (0.0, 1.0, 0.0)) for name, cat in MOVES),
]


def test_shares_of_idle_compute_and_other():
    for kernels, shares in SHARES:
        found = temporal_breakdown(kernels)
        assert list(found.values()) == pytest.approx(shares), kernels
    for events in ([], [OPERATOR, {"ph": "i", "cat": "note", "name": "note", "ts": 0.0}], [_kernel(5, 5)]):
        assert temporal_breakdown(events) is None, "nothing takes time"
