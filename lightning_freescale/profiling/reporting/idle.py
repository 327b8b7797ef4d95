"""How long a GPU ran no kernel, as HolisticTraceAnalysis counts it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what occupies a stream."""
_NO_COMPUTE = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|dma|.*Sync")
"""Names of communication and memory kernels."""


@dataclass(frozen=True)
class Breakdown:
    """Shares of the time from the first kernel's start to the last one's end; they add up to 1.

    Attributes:
        idle: no stream ran anything.
        compute: at least one stream computed.
        other: communication or memory that no compute hid. A rank that waits inside an NCCL kernel is here, not in ``idle``.
    """

    idle: float
    compute: float
    other: float


def temporal_breakdown(events: Iterable[Mapping[str, Any]]) -> Breakdown | None:
    """The temporal breakdown of HolisticTraceAnalysis, whose names of kernels are used; None if no kernel took any time.

    Not tested on GPU: tested on events made up for the purpose.

    Args:
        events: slices of one rank with ``cat``, ``name``, ``ts`` and ``dur``; those not of a GPU are passed over.
    """
    kernels = [event for event in events if event.get("cat") in GPU]
    span = max((_end(k) for k in kernels), default=0.0) - min((k["ts"] for k in kernels), default=0.0)
    if not span:
        return None
    busy = _union(kernels) / span
    compute = _union(k for k in kernels if not _NO_COMPUTE.match(k["name"])) / span
    return Breakdown(1 - busy, compute, busy - compute)


def _union(kernels: Iterable[Mapping[str, Any]]) -> float:
    """Time during which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k["ts"]):
        total += max(0.0, _end(kernel) - max(kernel["ts"], until))
        until = max(until, _end(kernel))
    return total


def _end(kernel: Mapping[str, Any]) -> float:
    return kernel["ts"] + kernel["dur"]
