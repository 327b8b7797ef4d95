import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightning_freescale.profiling.recording.records import ResolvedStep
from lightning_freescale.profiling.reporting import kineto
from lightning_freescale.profiling.reporting.kineto import KinetoWindow, TemporalBreakdown, slices_of, temporal_breakdown
from lightning_freescale.profiling.reporting.trace.writer import write_trace
from tests.helpers.chrome_trace import read_trace

CPU = torch.device("cpu")


def _same(seconds):
    return seconds


@pytest.fixture
def window():
    window = KinetoWindow(1, CPU)
    yield window
    if window.running:
        window.stop()


def _mark(name, seconds=0.03):
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


def test_operators_are_where_perf_counter_saw_them(window):
    def work():
        _mark("first", 0.0)  # the first of a process takes a millisecond by itself
        return time.perf_counter(), *_mark("known"), time.perf_counter()

    before, start, end, after = _recorded(window, work)
    known = next(event for event in window.events(_same) if event["name"] == "known")
    assert before - 1e-3 <= known["ts"] <= start + 1e-3
    assert end - 1e-3 <= known["ts"] + known["dur"] <= after + 1e-3
    assert (known["ph"], known["cat"]) == ("X", "user_annotation")
    assert known["tid"] == f"kineto: thread {threading.get_native_id()}"


def test_a_window_may_be_opened_again(window):
    _recorded(window, lambda: _mark("first", 0.001))
    _recorded(window, lambda: _mark("second", 0.001))
    names = {event["name"] for event in window.events(_same)}
    assert "second" in names and "first" not in names
    window.start()
    with pytest.raises(RuntimeError, match="nothing yet"):
        window.events(_same)


def test_times_go_to_the_callers_clock(window):
    _recorded(window, lambda: _mark("known"))
    here = {event["name"]: event for event in window.events(_same)}["known"]
    there = {event["name"]: event for event in window.events(lambda seconds: 2 * seconds - 5)}["known"]
    assert there["ts"] == pytest.approx(2 * here["ts"] - 5)
    assert there["dur"] == pytest.approx(2 * here["dur"])


def test_what_is_short_is_left_out_and_said(window):
    def work():
        for _ in range(100):
            torch.ones(1).add_(1)
        _mark("long")

    _recorded(window, work)
    events = window.events(_same)
    slices = [event for event in events if event["ph"] == "X"]
    assert min(event["dur"] for event in slices) >= kineto.SHORTEST
    (note,) = (event for event in events if event["ph"] == "i")
    short = int(note["name"].split(" ")[0])
    assert short >= 100 and note["name"] == f"{short} operators below 20 us and 0 slices beyond 20000 are left out"


def test_beyond_the_limit_the_longest_are_kept_and_it_is_said(window, monkeypatch):
    monkeypatch.setattr(kineto, "LIMIT", 2)

    def work():
        for number in (1, 4, 2, 3):
            _mark(str(number), 0.4 * (number > 2))

    _recorded(window, work)
    *slices, note = window.events(_same)
    assert {event["name"] for event in slices} == {"4", "3"}
    assert "beyond 2 are left out" in note["name"]


def test_nothing_is_said_where_nothing_is_left_out(window, monkeypatch):
    monkeypatch.setattr(kineto, "SHORTEST", 0.0)
    _recorded(window, lambda: _mark("known", 0.001))
    assert [event["name"] for event in window.events(_same)] == ["known"]


def test_without_a_gpu_there_is_no_breakdown(window):
    _recorded(window, lambda: _mark("known", 0.001))
    assert window.breakdown() is None


def test_a_window_goes_into_the_trace(window, tmp_path):
    def work():
        torch.nn.Linear(64, 64)(torch.ones(500, 64)).sum().backward()
        return time.perf_counter(), _mark("known"), time.perf_counter()  # a mark is over when this thread is next on a core

    start, _, end = _recorded(window, work)
    step = ResolvedStep(start - 0.001, end + 0.001)
    events = read_trace(write_trace(tmp_path / "trace.json", [[step]], kineto=[window.events(_same)]))
    known = next(event for event in events if event["name"] == "known")
    around = next(event for event in events if event["name"] == "step 0")
    assert around["ts"] <= known["ts"] and known["ts"] + known["dur"] <= around["ts"] + around["dur"]


def _kineto_events():
    """As Kineto writes them on a GPU, cut down to what is read."""
    host = {"ph": "X", "pid": 100, "tid": 101, "ts": 10.0, "dur": 5.0}
    return [
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 101, "ts": 0.0, "args": {"name": "thread 101 (python)"}},
        {**host, "cat": "cpu_op", "name": "aten::mm", "args": {"External id": 1}},
        {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {}},
        {"ph": "s", "id": 1, "pid": 100, "tid": 101, "ts": 10.0, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20.0, "dur": 4.0, "args": {"stream": 7}},
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD",
            "pid": 0,
            "tid": 20,
            "ts": 26.0,
            "dur": 2.0,
            "args": {"stream": 20},
        },
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 29.0, "dur": 1.0, "args": {}},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "pid": 0, "tid": 7, "ts": 20.0, "dur": 10.0, "args": {}},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "ts": 0.0,
            "dur": 99.0,
        },
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 99.0},
    ]


def test_kernels_come_from_their_streams():
    found = slices_of(_kineto_events(), 3.0)
    assert [(event["name"], event["tid"], event["cat"]) for event in found] == [
        ("aten::mm", "kineto: thread 101", "cpu_op"),
        ("gemm", "kineto: stream 7", "kernel"),
        ("Memcpy HtoD", "kineto: stream 20", "gpu_memcpy"),
        ("Memset (Device)", "kineto: stream 7", "gpu_memset"),
    ]
    assert found[1]["ts"] == pytest.approx(3.00002, abs=1e-9) and found[1]["dur"] == pytest.approx(4e-6)


@pytest.fixture
def gpu_window(monkeypatch):
    """A window that has seen kernels."""
    window = KinetoWindow(1, CPU)
    monkeypatch.setattr(window, "_slices", slices_of(_kineto_events(), 3.0))
    return window


def test_the_breakdown_is_of_the_kernels(gpu_window):
    found = gpu_window.breakdown()
    assert (found.idle, found.compute, found.other) == pytest.approx((0.3, 0.4, 0.3))


def test_kernels_are_never_too_short_and_go_before_operators(gpu_window, monkeypatch):
    assert [event["name"] for event in gpu_window.events(_same)][:3] == ["gemm", "Memcpy HtoD", "Memset (Device)"]
    monkeypatch.setattr(kineto, "SHORTEST", 0.0)
    monkeypatch.setattr(kineto, "LIMIT", 2)
    assert [event["name"] for event in gpu_window.events(_same)][:-1] == ["gemm", "Memcpy HtoD"]
    assert gpu_window.breakdown().idle == pytest.approx(0.3)  # of all kernels


@pytest.mark.parametrize(("device", "kernels"), [("cpu", False), ("cuda", True)])
def test_kernels_are_asked_for_on_cuda(device, kernels):
    assert (ProfilerActivity.CUDA in KinetoWindow(1, torch.device(device))._activities) is kernels


@pytest.mark.parametrize("steps", [0, -1])
def test_a_window_has_steps(steps):
    with pytest.raises(ValueError, match=f"torch_profiler_steps={steps}"):
        KinetoWindow(steps, CPU)


def test_start_and_stop_come_in_order(window):
    with pytest.raises(RuntimeError, match="not running"):
        window.stop()
    with pytest.raises(RuntimeError, match="nothing yet"):
        window.events(_same)
    with pytest.raises(RuntimeError, match="nothing yet"):
        window.breakdown()
    window.start()
    assert window.running
    with pytest.raises(RuntimeError, match="active"):
        window.start()
    with pytest.raises(RuntimeError, match="nothing yet"):
        window.events(_same)
    window.stop()
    assert not window.running


def test_it_does_not_begin_beside_another_profiler(window):
    with profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(RuntimeError, match=r"torch_profiler_steps.*profiler='pytorch'"):
            window.start()
        assert not window.running
        _mark("theirs", 0.0)
    assert "theirs" in {event.name for event in other.events()}


def test_it_does_not_begin_beside_a_profiler_of_another_thread(window):
    started, over = threading.Event(), threading.Event()

    def theirs():
        with profile(activities=[ProfilerActivity.CPU]):
            started.set()
            over.wait(60)

    thread = threading.Thread(target=theirs)
    thread.start()
    try:
        assert started.wait(60)
        with pytest.raises(RuntimeError, match="torch_profiler_steps"):
            window.start()
    finally:
        over.set()
        thread.join()


def test_it_does_not_begin_beside_a_profiler_that_warms_up(window):
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1)) as other:
        with pytest.raises(RuntimeError, match="torch_profiler_steps"):
            window.start()
        other.step()
        _mark("theirs", 0.0)
    assert "theirs" in {event.name for event in other.events()}


@pytest.mark.parametrize("stages", [None, schedule(wait=0, warmup=5, active=1)])
def test_it_begins_after_another_profiler(window, stages):
    """Even if that one never came further than its warm-up."""
    not_begun = profile(schedule=schedule(wait=0, warmup=1, active=1))
    with profile(activities=[ProfilerActivity.CPU], schedule=stages) as over:
        pass
    _recorded(window, lambda: _mark("known", 0.001))
    assert "known" in {event["name"] for event in window.events(_same)}
    del not_begun, over


_TAKEN = """
import torch
from torch.profiler import ProfilerActivity, profile
from lightning_freescale.profiling.reporting.kineto import KinetoWindow

window = KinetoWindow(1, torch.device("cpu"))
window.start()
with profile(activities=[ProfilerActivity.CPU]):
    torch.ones(1).add_(1)
try:
    window.stop()
except RuntimeError as error:
    print("told:", error)
try:
    window.events(lambda seconds: seconds)
except RuntimeError as error:
    print("then:", error)
"""


@pytest.mark.slow
def test_a_window_that_another_profiler_took_over_says_so():
    """In a process of its own: where nobody looks, torch ends it."""
    done = subprocess.run([sys.executable, "-c", _TAKEN], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "told: another torch profiler began inside the window of torch_profiler_steps" in done.stdout
    assert "then: the window of torch_profiler_steps holds nothing yet" in done.stdout


# -- how long a GPU ran no kernel


def _kernel(start, end, name="gemm", cat="kernel", stream=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": f"kineto: stream {stream}"}


def _shares(*kernels):
    found = temporal_breakdown(kernels)
    return pytest.approx((found.idle, found.compute, found.other))


def test_idle_is_what_no_stream_fills():
    assert _shares(_kernel(10, 12), _kernel(11, 14, stream=8), _kernel(18, 20)) == (0.4, 0.6, 0.0)


def test_time_outside_the_first_and_last_kernel_does_not_count():
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0}
    assert _shares(operator, _kernel(10, 20)) == (0.0, 1.0, 0.0)


def test_a_kernel_inside_a_longer_one_counts_once():
    assert _shares(_kernel(0, 10), _kernel(2, 3), _kernel(4, 5), _kernel(15, 20)) == (0.25, 0.75, 0.0)


def test_kernels_need_no_order():
    assert _shares(_kernel(15, 20), _kernel(0, 10)) == (0.25, 0.75, 0.0)


@pytest.mark.parametrize(
    ("name", "cat"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
        ("Memset (Device)", "gpu_memset"),
    ],
)
def test_communication_and_memory_count_where_no_compute_hides_them(name, cat):
    assert _shares(_kernel(0, 6), _kernel(4, 10, name, cat, stream=20)) == (0.0, 0.6, 0.4)
    assert _shares(_kernel(0, 10), _kernel(4, 10, name, cat, stream=20)) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", ["void at::native::vectorized_elementwise_kernel<4>()", "sm90_xmma_gemm", "my_ncclKernel"])
def test_everything_else_is_compute(name):
    assert _shares(_kernel(0, 10, name)) == (0.0, 1.0, 0.0)


def test_without_kernels_there_is_nothing_to_tell():
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0}
    note = {"ph": "i", "cat": "note", "name": "note", "ts": 0.0}
    assert temporal_breakdown([operator, note]) is None
    assert temporal_breakdown([]) is None


def test_a_window_of_no_length_has_no_shares():
    assert temporal_breakdown([_kernel(5, 5)]) is None


def test_shares_add_up():
    found = temporal_breakdown([_kernel(0.1, 0.35), _kernel(0.3, 0.7, "Memcpy DtoH", "gpu_memcpy"), _kernel(0.9, 1.0)])
    assert isinstance(found, TemporalBreakdown)
    assert found.idle + found.compute + found.other == pytest.approx(1.0, abs=1e-15)
