"""Record a few steps with torch.profiler: events for the trace of all ranks, and the idle time of a GPU."""

from __future__ import annotations

import gc
import gzip
import json
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from lightning_freescale.profiling.analysis.breakdown import merged
from lightning_freescale.profiling.recording.records import StepRecord
from lightning_freescale.profiling.reporting.document import write_atomically

SHORTEST = 20e-6
"""Operators on the CPU that take less than these seconds are left out."""
LIMIT = 20_000
"""The largest number of slices of a rank. GPU work is kept before operators, and the longest slices of each."""
SHARES = ("idle", "compute", "other")
_ONE_PROFILER = "Remove torch_profiler_steps, or remove Trainer(profiler='pytorch') and any torch.profiler of your own"
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of work on a stream."""
_CATEGORIES = ("cpu_op", "user_annotation", *_GPU)
_NO_COMPUTE = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|dma|.*Sync")
"""Names of communication and memory kernels."""


class KinetoWindow:
    """The kernels and operators of a few steps on one rank, recorded by torch.profiler (Kineto).

    torch has one profiler per process. A second one does not fail: it takes over the session of the first, and exporting the
    rest of that session ends the process. Therefore a window does not start while another profiler runs, and detects that it
    was taken over. It records the thread that starts it and the autograd threads of that thread. On CUDA, the profiler stays
    attached to the process and can slow down later steps.

    Args:
        steps: number of steps to record; 0 for none.
        device: device of the rank. Kernels are recorded on CUDA devices.
        file: path for the file that torch writes, ending in ``.json.gz``; None to write none.

    Attributes:
        records: the recorded steps, which the caller adds.
        slices: GPU work and operators of the window, after its stop.
    """

    def __init__(self, steps: int, device: torch.device, file: Path | None = None) -> None:
        self.steps, self.file = steps, file
        self.records: list[StepRecord] = []
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: profile | None = None
        self._ahead = 0
        self.slices: list[dict[str, Any]] = []

    @property
    def running(self) -> bool:
        """True between the start and the stop of the window."""
        return self._profile is not None

    def start(self) -> None:
        """Start between two steps, on the thread that trains. This takes most of a second.

        Raises:
            RuntimeError: another torch profiler is active.
        """
        if _in_use():
            raise RuntimeError(
                f"torch_profiler_steps needs torch's profiler, but another one is active. torch allows one per process. "
                f"{_ONE_PROFILER}"
            )
        self._profile = profile(activities=self._activities)
        self._profile.start()
        self._ahead = _unix_ahead()

    def stop(self) -> None:
        """Stop a running window between two steps, on the thread that started it. This takes about a second.

        Raises:
            RuntimeError: another profiler ended the window.
        """
        if self._profile is None:
            return
        taken_over = not torch.autograd._profiler_enabled()
        stopped, self._profile = self._profile, None
        stopped.stop()
        if taken_over:
            raise RuntimeError(
                "another torch profiler started during the torch_profiler_steps and ended their recording, which is lost. "
                f"{_ONE_PROFILER}"
            )
        with TemporaryDirectory() as folder:
            path = Path(folder) / "kineto.json.gz"
            stopped.export_chrome_trace(str(path))
            content = path.read_bytes()
        document = json.loads(gzip.decompress(content))
        self.slices = slices_of(document["traceEvents"], (document["baseTimeNanoseconds"] - self._ahead) * 1e-9)
        if self.file is not None:
            try:
                write_atomically(self.file, content)
            except OSError as error:  # training continues
                warnings.warn(f"the profiler cannot write {self.file}: {error}", stacklevel=2)

    def events(self, to_seconds: Callable[[float], float]) -> list[dict[str, Any]]:
        """Return the slices as events for :func:`~lightning_freescale.profiling.reporting.trace.write_trace`.

        They are Chrome events, except that ``tid`` is the name of the thread, and ``ts`` and ``dur`` are seconds. A further
        event states how many operators below :data:`SHORTEST` and slices beyond :data:`LIMIT` are left out.

        Args:
            to_seconds: function from this host's ``time.perf_counter`` to the clock of the trace.
        """
        found = self.slices
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


def _in_use() -> bool:
    """Return True if a profiler records in this process, or warms up for it."""
    if torch.autograd.profiler._is_profiler_enabled:
        return True
    # no flag is set during warm-up; type(), because isinstance() would load lazy modules
    others = [o for o in gc.get_objects() if issubclass(type(o), profile) and o.current_action is ProfilerAction.WARMUP]
    return any(other.profiler is not None and other.profiler.kineto_results is None for other in others)


def _unix_ahead() -> int:
    """Return Unix time minus ``perf_counter`` in nanoseconds, from the fastest of several readings."""
    readings = []
    for _ in range(10):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


def slices_of(events: Iterable[dict[str, Any]], base: float) -> list[dict[str, Any]]:
    """Return GPU work and operators among Kineto's events, in seconds; ``base`` is the zero of their clock of microseconds."""
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
        if event.get("cat") in _CATEGORIES
    ]


def temporal_breakdown(events: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the temporal breakdown of HolisticTraceAnalysis, with its classes of kernels; None if no kernel took time.

    The values are shares of the time from the start of the first kernel to the end of the last one, and add up to 1:

    - ``idle``: no stream ran a kernel.
    - ``compute``: at least one stream computed.
    - ``other``: only communication or memory kernels ran. This includes a rank that waits inside an NCCL kernel.

    Args:
        events: slices of one rank with ``cat``, ``name``, ``ts`` and ``dur``; those of the CPU are ignored.
    """
    kernels = [event for event in events if event.get("cat") in _GPU]
    span = max((_end(k) for k in kernels), default=0.0) - min((k["ts"] for k in kernels), default=0.0)
    if not span:
        return None
    busy, compute = (
        sum(end - start for start, end in merged((k["ts"], _end(k)) for k in some)) / span
        for some in (kernels, [k for k in kernels if not _NO_COMPUTE.match(k["name"])])
    )
    return dict(zip(SHARES, (1 - busy, compute, busy - compute)))


def _end(event: Mapping[str, Any]) -> float:
    return event["ts"] + event["dur"]
