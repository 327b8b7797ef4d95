"""torch.profiler over a few steps: events for the trace of all ranks, and how long a GPU ran no kernel."""

from __future__ import annotations

import gc
import gzip
import json
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from lightning_freescale.profiling.reporting.document import write_atomically

SHORTEST = 20e-6
"""Seconds; operators on the CPU that take less are left out."""
LIMIT = 20_000
"""Slices of one rank; if there are more, GPU work is kept before operators, and the longest of each."""
_ONE_PROFILER = (
    "leave out torch_profiler_steps, or use a Trainer without profiler='pytorch' and no torch.profiler of your own meanwhile"
)
_CPU = ("cpu_op", "user_annotation")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what occupies a stream."""
_NO_COMPUTE = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|dma|.*Sync")
"""Names of communication and memory kernels."""


@dataclass(frozen=True)
class TemporalBreakdown:
    """Shares of the time from the first kernel's start to the last one's end; they add up to 1.

    Attributes:
        idle: no stream ran anything.
        compute: at least one stream computed.
        other: communication or memory that no compute hid. A rank that waits inside an NCCL kernel is here, not in ``idle``.
    """

    idle: float
    compute: float
    other: float


class KinetoWindow:
    """Kernels and operators of a few steps on one rank, seen by torch.profiler (Kineto).

    torch has one profiler per process. A second one does not fail: it takes over the first one's session, and exporting what is
    left of that ends the process. So a window does not begin beside another, and notices if it was taken over. It sees the
    thread that starts it, and what autograd runs for it. On CUDA it stays attached to the process and can slow later steps.

    Args:
        steps: how many steps the caller leaves between start and stop.
        device: the rank's; kernels are recorded if it is a CUDA device.
        file: where to leave what torch itself writes, for other tools; its name ends in ``.json.gz``. None for nowhere.
    """

    def __init__(self, steps: int, device: torch.device, file: Path | None = None) -> None:
        self.steps, self.file = steps, file
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: profile | None = None
        self._ahead = 0
        self._slices: list[dict[str, Any]] = []

    @property
    def running(self) -> bool:
        """Whether the window was started and not stopped."""
        return self._profile is not None

    def start(self) -> None:
        """Begin between two steps, on the thread that trains. It costs most of a second, so do it in a pause.

        Raises:
            RuntimeError: torch's profiler is in use.
        """
        if _in_use():
            raise RuntimeError(
                "torch_profiler_steps needs torch's profiler, but another one is active, and torch allows one per process: "
                f"{_ONE_PROFILER}"
            )
        self._profile = profile(activities=self._activities)
        self._profile.start()
        self._ahead = _unix_ahead()

    def stop(self) -> None:
        """End between two steps, on the thread that started it. It takes about a second: Kineto writes a file.

        Raises:
            RuntimeError: another profiler ended it.
        """
        taken = not torch.autograd._profiler_enabled()
        stopped, self._profile = self._profile, None
        assert stopped is not None, "start() comes before"
        stopped.stop()
        if taken:
            raise RuntimeError(
                "another torch profiler began inside the window of torch_profiler_steps and ended it, nothing of it is left: "
                f"{_ONE_PROFILER}"
            )
        with TemporaryDirectory() as folder:
            path = Path(folder) / "kineto.json.gz"
            stopped.export_chrome_trace(str(path))
            document = json.loads(gzip.decompress(path.read_bytes()))
            if self.file is not None:
                _leave(path, self.file)
        self._slices = slices_of(document["traceEvents"], (document["baseTimeNanoseconds"] - self._ahead) * 1e-9)

    def events(self, to_seconds: Callable[[float], float]) -> list[dict[str, Any]]:
        """Return the window's slices for :func:`~lightning_freescale.profiling.reporting.trace.write_trace`.

        They are Chrome events but for ``tid``, which is the thread's name, and ``ts`` and ``dur``, which are seconds. Operators
        below :data:`SHORTEST` and slices beyond :data:`LIMIT` are left out, which one more event tells.

        Args:
            to_seconds: from this host's ``time.perf_counter`` to the clock of the trace.
        """
        found = self._slices
        kept = [event for event in found if event["cat"] in _GPU or event["dur"] >= SHORTEST]
        short, beyond = len(found) - len(kept), max(0, len(kept) - LIMIT)
        if beyond:
            kept = sorted(kept, key=lambda event: (event["cat"] not in _GPU, -event["dur"]))[:LIMIT]
        edges = ((to_seconds(event["ts"]), to_seconds(_end(event))) for event in kept)
        events = [{**event, "ts": start, "dur": end - start} for event, (start, end) in zip(kept, edges)]
        if short or beyond:
            text = f"{short} operators below {SHORTEST * 1e6:.0f} us and {beyond} slices beyond {LIMIT} are left out"
            first = to_seconds(min(event["ts"] for event in found))
            events.append({"ph": "i", "s": "t", "cat": "note", "name": text, "tid": "kineto: left out", "ts": first})
        return events

    def breakdown(self) -> TemporalBreakdown | None:
        """Return where the GPU's time went in the window, of all of its kernels; None if none ran."""
        return temporal_breakdown(self._slices)


def _leave(written: Path, file: Path) -> None:
    """Copy a file for other tools; a warning if that fails, as training goes on."""
    try:
        write_atomically(file, written.read_bytes())
    except OSError as error:
        warnings.warn(f"the profiler could not write {file}: {error}", stacklevel=2)


def _in_use() -> bool:
    """Whether a profiler records in this process, or is warming up to."""
    if torch.autograd.profiler._is_profiler_enabled:
        return True
    # while one warms up no flag is set; type(), because isinstance() would wake lazy modules
    others = [o for o in gc.get_objects() if issubclass(type(o), profile) and o.current_action is ProfilerAction.WARMUP]
    return any(other.profiler is not None and other.profiler.kineto_results is None for other in others)


def _unix_ahead() -> int:
    """Unix time minus ``perf_counter`` in nanoseconds, of the quickest of some readings of both."""
    readings = []
    for _ in range(10):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


def slices_of(events: Iterable[dict[str, Any]], base: float) -> list[dict[str, Any]]:
    """Return GPU work and operators among Kineto's events, in seconds; ``base`` is when its clock of microseconds was zero."""
    return [
        {
            "ph": "X",
            "cat": event["cat"],
            "name": event["name"],
            "tid": f"kineto: {'stream' if event['cat'] in _GPU else 'thread'} {event['tid']}",
            "ts": base + event["ts"] * 1e-6,
            "dur": event["dur"] * 1e-6,
        }
        for event in events
        if event.get("cat") in (*_CPU, *_GPU)
    ]


def temporal_breakdown(events: Iterable[Mapping[str, Any]]) -> TemporalBreakdown | None:
    """Return the shares that HolisticTraceAnalysis calls temporal breakdown, by its names of kernels; None if none took time.

    Args:
        events: slices of one rank with ``cat``, ``name``, ``ts`` and ``dur``; those not of a GPU are passed over.
    """
    kernels = [event for event in events if event.get("cat") in _GPU]
    span = max((_end(k) for k in kernels), default=0.0) - min((k["ts"] for k in kernels), default=0.0)
    if not span:
        return None
    busy = _union(kernels) / span
    compute = _union(k for k in kernels if not _NO_COMPUTE.match(k["name"])) / span
    return TemporalBreakdown(1 - busy, compute, busy - compute)


def _union(kernels: Iterable[Mapping[str, Any]]) -> float:
    """Time during which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k["ts"]):
        total += max(0.0, _end(kernel) - max(kernel["ts"], until))
        until = max(until, _end(kernel))
    return total


def _end(event: Mapping[str, Any]) -> float:
    return event["ts"] + event["dur"]
