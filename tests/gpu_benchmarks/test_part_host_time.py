"""What is read out of a trace, and the part that counts what a step costs the host, as far as it goes without a GPU."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import one_rank
import one_rank_trace
import part_host_time
import pytest
import torch
from hour_report import Report
from one_rank_fit import Fit, Steps, fit
from one_rank_trace import MARK, Profiling, Trace, read
from one_rank_workload import CPU, SASRec, Unforeseen, batches, shifted

from lightning_freescale.testing import run_distributed

TRAINING, ENGINE, AUTOGRAD = 1, 2, 3


def _event(category: str, name: str, start: float, end: float, thread: int = TRAINING, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": args}


def _marks(*times: float) -> list[dict[str, Any]]:
    return [_event("user_annotation", MARK, time, time) for time in times] + [_event("gpu_user_annotation", MARK, 0, 9_999)]


def test_idle_is_what_no_stream_covers_between_the_marks() -> None:
    busy = [
        _event("kernel", "before and in the first step", 500, 1_200, thread=7),
        _event("kernel", "beside it", 1_100, 1_400, thread=8),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1_900, 2_100, thread=8),
        _event("gpu_memset", "Memset (Device)", 2_950, 3_500, thread=7),
        _event("kernel", "behind the last step", 4_000, 4_500, thread=7),
    ]
    found = read([*_marks(1_000, 2_000, 3_000), *busy], {})
    assert found.steps == 2 and found.ms == 1
    assert found.idle == pytest.approx(1 - (400 + 200 + 50) / 2_000)
    assert found.kernels == 0.5, "one begins between the marks"


def test_counts_by_thread() -> None:
    calls = [
        _event("cuda_runtime", "cudaLaunchKernel", 10, 11),
        _event("cuda_driver", "cuLaunchKernelEx", 12, 13, ENGINE),
        _event("cuda_runtime", "cudaLaunchKernelExC", 14, 15, AUTOGRAD),
        _event("cuda_runtime", "cudaStreamSynchronize", 20, 1_020, ENGINE),
        _event("cuda_runtime", "cudaStreamSynchronize", 1_030, 1_530, ENGINE),
        _event("cuda_runtime", "cudaEventSynchronize", 30, 31),
        _event("cuda_runtime", "cudaMemcpy", 40, 140),
        _event("cuda_runtime", "cudaMemcpyAsync", 150, 250, correlation=5),
        _event("cuda_runtime", "cudaMemcpyAsync", 260, 270, correlation=6),
        _event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 200, 210, thread=7, correlation=5),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 265, 268, thread=7, correlation=6),
        _event("cpu_op", "aten::add", 300, 310),
        _event("cpu_op", "aten::empty", 300, 302),
        _event("cpu_op", "aten::copy_", 303, 310),
        _event("cpu_op", "aten::mul", 310, 311),
        _event("cpu_op", "aten::mul", 305, 306, ENGINE),
        _event("cpu_op", "autograd::engine::evaluate_function: AddBackward0", 320, 330, AUTOGRAD),
        _event("cuda_runtime", "cudaDeviceSynchronize", 9_000, 9_500),
    ]
    found = read([*_marks(0, 1_000, 2_000), *calls], {TRAINING: "training", ENGINE: "engine"}).threads
    assert found["training"] == {
        "launches": 0.5,
        "cudaEventSynchronize": 0.5,
        "blocking copies": 1,
        "waited ms": pytest.approx((0.001 + 0.1 + 0.1) / 2),
        "operators": 1,
    }
    assert found["engine"] == {"launches": 0.5, "cudaStreamSynchronize": 1, "waited ms": 0.75, "operators": 0.5}
    assert found["others"] == {"launches": 0.5}


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace has 1 marks"):
        read(_marks(0), {})


def _two_threads() -> Trace:
    profiling, numbers = Profiling(on_gpu=False), torch.ones(8)
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.wait()
        for _ in range(6):
            numbers.mul(2)
        ended.set()
        time.sleep(5)  # alive when the trace is read; the process does not wait for it

    threading.Thread(target=work, name="freescale-items", daemon=True).start()
    profiling.start()
    numbers.add(1)
    began.set()
    ended.wait()
    profiling.mark()
    numbers.add(1)
    profiling.mark()
    return profiling.stop()


def test_the_profiler_sees_all_threads() -> None:
    (found,) = run_distributed(_two_threads, 1, init=False)
    assert found.steps == 2 and found.idle is None and found.ms > 0
    assert found.threads == {"training": {"operators": 1}, "engine": {"operators": 3}, "others": {}}


def _events_of_every_profile() -> list[tuple[bool, int]]:
    """Of each profile that a process makes for two traces: whether it has marks, and how many operators it saw."""
    made, profile = [], one_rank_trace.profile

    def kept(**options: Any) -> Any:
        made.append(profile(**options))
        return made[-1]

    one_rank_trace.profile = kept
    for _ in range(2):
        profiling = Profiling(on_gpu=False)
        profiling.start()
        torch.ones(8).add(1)
        profiling.mark()
        profiling.stop()
    found = [[event.name for event in each.events()] for each in made]
    return sorted((MARK in names, names.count("aten::add")) for names in found)


def test_a_process_profiles_for_nothing_before_its_first_trace() -> None:
    (found,) = run_distributed(_events_of_every_profile, 1, init=False)
    assert found == [(False, 1), (True, 1), (True, 1)]


# -- the part


def _main(out: Path, wrong: Fit | None = None) -> int:
    if wrong is not None:
        part_host_time.train = lambda *arguments: wrong
    try:
        part_host_time.main(["--out", str(out), "--quick"])
    except SystemExit as end:
        return int(end.code)
    return -1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run without a GPU finds."""
    out = tmp_path_factory.mktemp("host_time")
    assert run_distributed(_main, 1, out) == [0]
    return json.loads((out / "part_host_time.json").read_text())


@pytest.mark.slow
def test_every_way_is_what_it_is_called(ran: dict[str, Any]) -> None:
    assert not ran["failed"]
    steps = {row["variant"]: row for row in ran["rows"] if "thread" not in row}
    assert steps.keys() == set(part_host_time.VARIANTS) and all(row["step_ms"] > 0 for row in steps.values())


@pytest.mark.slow
def test_the_engine_has_a_thread_where_it_runs(ran: dict[str, Any]) -> None:
    rows = {(row["variant"], row["thread"]): row for row in ran["rows"] if "thread" in row}
    assert ("plain", "engine") not in rows
    for variant in ("overlap", "inline"):
        assert rows[variant, "engine"]["operators"] > 50 and rows[variant, "engine"]["cpu_ms"] > 0
        assert rows[variant, "training"]["operators"] > 100
    assert "launches" not in rows["overlap", "training"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["GPU idle share", "kernels", "launches", "waits of the host", "blocking copies"])
def test_says_what_it_leaves_out(ran: dict[str, Any], what: str) -> None:
    assert {"what": what, "why": part_host_time.ON_GPU} in ran["skipped"]


def test_another_way_than_it_says_fails(tmp_path: Path) -> None:
    threads = {"training": {"operators": 1.0}, "engine": {}, "others": {}}
    wrong = Fit(1.0, dict.fromkeys(threads, 1.0), predicted=0.0, trace=Trace(1, 1.0, None, 0.0, threads))
    assert run_distributed(_main, 1, tmp_path, wrong) == [1]
    failed = json.loads((tmp_path / "part_host_time.json").read_text())["failed"]
    assert [one["what"] for one in failed] == ["plain", "overlap"], "only the inline one knows no ids"


def test_shows_what_a_gpu_does(tmp_path: Path) -> None:
    threads = {"training": {"launches": 9.0, "cudaStreamSynchronize": 2.0}, "engine": {}, "others": {}}
    report = Report("host_time", tmp_path)
    part_host_time.show(report, "plain", Fit(1.0, dict.fromkeys(threads, 0.0), None, Trace(1, 1.0, 0.25, 7.0, threads)), True)
    step, training = report.found()["rows"]
    assert step["gpu_idle"] == 0.25 and step["kernels"] == 7
    assert training["launches"] == 9 and training["cudaStreamSynchronize"] == 2 and training["cudaEventSynchronize"] == 0
    assert report.found()["figures"]["plain_training_waits"] == 2


def test_a_blind_profiler_is_told(tmp_path: Path) -> None:
    threads: dict[str, dict[str, float]] = {"training": {"operators": 1.0}, "engine": {}, "others": {}}
    report = Report("host_time", tmp_path)
    part_host_time.show(report, "plain", Fit(1.0, dict.fromkeys(threads, 0.0), None, Trace(1, 1.0, None, 0.0, threads)), True)
    assert report.found()["skipped"] == [{"what": "plain: what the GPU does", "why": "torch.profiler saw nothing on the GPU"}]
    assert "gpu_idle" not in report.found()["rows"][0]


# -- what is trained


def test_unforeseen_ids_are_the_same_ids() -> None:
    made = batches(CPU, 1, pin=False)
    (batch,), model = shifted(made), Unforeseen(CPU)
    assert torch.equal(model.looked_up(batch).values(), made[0]["ids"].values())
    assert not torch.equal(batch["ids"].values(), made[0]["ids"].values())


def test_padding_does_not_reach_an_item() -> None:
    torch.manual_seed(0)
    block, (x,) = SASRec(CPU).blocks[0], torch.randn(1, 2, 7, CPU.dim)
    padded = torch.cat([x, torch.randn(2, 3, CPU.dim)], dim=1)
    torch.testing.assert_close(block(padded)[:, :7], block(x))


def test_positions_are_those_of_the_items() -> None:
    (batch,) = batches(CPU, 1, pin=False)
    lengths = batch["features"].lengths().tolist()
    expected = [history * CPU.longest + place for history, length in enumerate(lengths) for place in range(length)]
    assert batch["positions"].tolist() == expected and len(set(lengths)) > 1


def _too_few() -> None:
    with one_rank.one_rank() as device:
        fit(SASRec(CPU), batches(CPU, 2, pin=False), Steps(1, 1), device, overlap=False)


def test_as_many_batches_as_steps() -> None:
    with pytest.raises(Exception, match="2 batches for 3 steps"):
        run_distributed(_too_few, 1)
