"""Content of a torch.profiler trace of training steps: the work of the GPU, and the requests of each thread of the host.

The training code puts a :data:`MARK` between steps. All events between the first and the last mark count. Counts and times are
per step.
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
    """Counts and times per step.

    Attributes:
        steps: number of steps between the marks.
        ms: wall time under the profiler.
        idle: share of the time in which no stream ran anything; None if the profiler saw no GPU.
        kernels: kernels that ran on the GPU.
        threads: by thread, then by name: called ``operators``, ``launches`` of kernels, each of :data:`WAITS`,
            ``blocking copies``, and ``waited ms``, the time in all those waits and copies.
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
        """Begin after all pending work of the GPU, with a mark."""
        _begin_once(self._on_gpu)
        self._profile.start()
        self.mark()

    def mark(self) -> None:
        """Mark the end of a step."""
        with record_function(MARK):
            pass

    def stop(self) -> Trace:
        """End the profile after the last mark."""
        self._profile.stop()
        names = thread_names()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return read(json.loads(path.read_text())["traceEvents"], names)


def _profile(on_gpu: bool) -> profile:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # otherwise only the starting thread is profiled
    return profile(activities=activities, experimental_config=config)


@cache
def _begin_once(on_gpu: bool) -> None:
    """Start and stop a profiler, because the first one of a process misses events of the GPU."""
    with _profile(on_gpu):
        torch.ones(8, device="cuda" if on_gpu else "cpu").add(1)
        if on_gpu:
            torch.cuda.synchronize()


def thread_names() -> dict[int, str]:
    """Return the name in :data:`THREADS` of each of Python's threads, by the system's number; the caller trains."""
    names = {thread.native_id: "engine" for thread in threading.enumerate() if thread.name.startswith("freescale-")}
    return {number: name for number, name in names.items() if number is not None} | {threading.get_native_id(): "training"}


def read(events: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> Trace:
    """Convert the events of a trace to a :class:`Trace`.

    Args:
        events: events of the Chrome trace, times in microseconds.
        names: the name in :data:`THREADS` of each thread; other threads count as others.

    Raises:
        ValueError: there are fewer than two marks.
    """
    slices = [event for event in events if event.get("ph") == "X"]
    marks = sorted(event["ts"] for event in slices if event["name"] == MARK and event["cat"] == "user_annotation")
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} marks {MARK!r}: mark the start and the end of each step")
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    on_gpu = [event for event in slices if event["cat"] in _ON_GPU]
    kernels = sum(event["cat"] == "kernel" and begin <= event["ts"] < end for event in on_gpu)
    pageable = {
        _correlation(event) for event in on_gpu if event["cat"] == "gpu_memcpy" and "Pageable" in event["name"]
    }  # the host stages such a copy, under any name of the call
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
    """Return the called operators without those that they call, and without autograd's own events."""
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
    """Return the share of ``begin`` to ``end`` that no interval covers."""
    covered, reached = 0.0, begin
    for start, stop in sorted(busy):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return 1 - covered / (end - begin)
