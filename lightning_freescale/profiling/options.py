"""How to profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SplitBy = Literal["auto", "clocks", "bandwidth"]
_LEAST = {"every_n_steps": 1, "warmup_steps": 0, "keep_steps": 1, "trace_steps": 0, "kineto_steps": 0}


@dataclass(frozen=True)
class Options:
    """How to profile.

    Attributes:
        every_n_steps: how often the ranks exchange what they recorded.
        warmup_steps: first steps to leave out.
        keep_steps: the report covers this many steps at most, the last ones.
        trace_steps: how many of the last steps keep all their stamps, for the trace; 0 for no trace. With more than 64 ranks
            fewer, 3200 steps times ranks in all.
        kineto_steps: how many steps after the first exchange torch.profiler watches; they are in the trace, not in the report.
        split_waits_by: how to tell waiting for a slower rank from transferring: by when the ranks arrived (``"clocks"``), by
            bytes over bandwidth (``"bandwidth"``), or by arrivals as long as the clocks agree well enough (``"auto"``).
        link_bandwidth: bytes per second of a rank's link, estimated if not given.

    Raises:
        ValueError: a value does not fit.
    """

    every_n_steps: int = 50
    warmup_steps: int = 5
    keep_steps: int = 2000
    trace_steps: int = 50
    kineto_steps: int = 0
    split_waits_by: SplitBy = "auto"
    link_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r}: pass {least} or more")
        if self.split_waits_by not in ("auto", "clocks", "bandwidth"):
            raise ValueError(f"split_waits_by={self.split_waits_by!r}: pass 'auto', 'clocks' or 'bandwidth'")
        if self.link_bandwidth is not None and not self.link_bandwidth > 0:
            raise ValueError(f"link_bandwidth={self.link_bandwidth!r}: pass bytes per second, more than 0")
