"""What a trace of torch.profiler says of a training step: what the GPU did, and what each thread of the host asked it to do.

Whoever trains puts a :data:`MARK` between two steps; all between the first and the last one counts. Counts and times are per
step.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "between two steps"
THREADS = ("training", "engine", "others")
"""Of the host: the one that runs the loop, those that run the engine's jobs, and the rest, such as autograd's."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass
class Trace:
    """Per step.

    Attributes:
        steps: between the marks.
        ms: of wall time, under the profiler.
        idle: share of the time in which no stream ran anything; None if the profiler saw no GPU.
        kernels: that ran on the GPU.
        threads: by thread, then by name: ``operators`` that were called, ``launches`` of kernels, each of :data:`WAITS`,
            ``blocking copies``, and ``waited ms``, all in those waits and copies.
    """

    steps: int
    ms: float
    idle: float | None
    kernels: float
    threads: dict[str, dict[str, float]]


class Profiling:
    """torch.profiler over all threads, from :meth:`start` on; the caller marks the steps."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._profile = _profile(on_gpu)

    def start(self) -> None:
        """Begin, behind all that the GPU has to do, with a mark."""
        _begin_once(self._on_gpu)
        self._profile.start()
        self.mark()

    def mark(self) -> None:
        """A step ends."""
        with record_function(MARK):
            pass

    def stop(self) -> Trace:
        """End; the last mark has been made."""
        self._profile.stop()
        names = thread_names()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return read(json.loads(path.read_text())["traceEvents"], names)


def _profile(on_gpu: bool) -> profile:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # else the starting thread's alone
    return profile(activities=activities, experimental_config=config)


@cache
def _begin_once(on_gpu: bool) -> None:
    """Profile for nothing: a profiler that starts for the first time in a process misses events of the GPU."""
    with _profile(on_gpu):
        torch.ones(8, device="cuda" if on_gpu else "cpu").add(1)
        if on_gpu:
            torch.cuda.synchronize()


def thread_names() -> dict[int, str]:
    """Which of :data:`THREADS` Python's threads are, by the system's number; the caller trains."""
    names = {thread.native_id: "engine" for thread in threading.enumerate() if thread.name.startswith("freescale-")}
    return {number: name for number, name in names.items() if number is not None} | {threading.get_native_id(): "training"}


def read(events: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> Trace:
    """A trace's events as a :class:`Trace`.

    Args:
        events: of the Chrome trace, times in microseconds.
        names: which of :data:`THREADS` a thread is; those left out are others.

    Raises:
        ValueError: there are no two marks.
    """
    slices = [event for event in events if event.get("ph") == "X"]
    marks = sorted(event["ts"] for event in slices if event["name"] == MARK and event["cat"] == "user_annotation")
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} marks {MARK!r}: mark the begin and the end of every step")
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    on_gpu = [event for event in slices if event["cat"] in _ON_GPU]
    kernels = sum(event["cat"] == "kernel" and begin <= event["ts"] < end for event in on_gpu)
    pageable = {
        _correlation(event) for event in on_gpu if event["cat"] == "gpu_memcpy" and "Pageable" in event["name"]
    }  # such a copy is staged by the host, whatever the call is named
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for event in [*_outermost(slices), *(event for event in slices if event["cat"] in _CALLS)]:
        if begin <= event["ts"] < end:
            _count(event, counts[names.get(event["tid"], "others")], pageable)
    return Trace(
        steps=steps,
        ms=(end - begin) / steps / 1e3,
        idle=_idle([(event["ts"], event["ts"] + event["dur"]) for event in on_gpu], begin, end) if on_gpu else None,
        kernels=kernels / steps,
        threads={thread: {name: value / steps for name, value in counts[thread].items()} for thread in THREADS},
    )


def _outermost(slices: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The operators that were called, without those that they call, and without what autograd tells of itself."""
    reached: dict[int, float] = {}
    called = [event for event in slices if event["cat"] == "cpu_op" and event["name"].startswith(("aten::", "fbgemm::"))]
    for event in sorted(called, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= reached.get(event["tid"], 0.0):
            reached[event["tid"]] = event["ts"] + event["dur"]
            yield event


def _count(event: Mapping[str, Any], counts: Counter[str], pageable: set[Any]) -> None:
    name, waits = event["name"], False
    if event["cat"] == "cpu_op":
        counts["operators"] += 1
    elif "LaunchKernel" in name or "LaunchCooperativeKernel" in name:
        counts["launches"] += 1
    elif name in WAITS:
        counts[name] += 1
        waits = True
    elif "emcpy" in name and ("Async" not in name or _correlation(event) in pageable):
        counts["blocking copies"] += 1
        waits = True
    if waits:
        counts["waited ms"] += event["dur"] / 1e3


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _idle(busy: list[tuple[float, float]], begin: float, end: float) -> float:
    """The share of ``begin`` to ``end`` that no interval covers."""
    covered, reached = 0.0, begin
    for start, stop in sorted(busy):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return 1 - covered / (end - begin)
