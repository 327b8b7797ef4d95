"""What recording itself costs."""

from __future__ import annotations

import time

import torch

from lightning_freescale.profiling.recording.timeline import Timeline

_SPANS = 300


def seconds_per_stamp(device: torch.device) -> float:
    """Measured on a timeline of its own; takes about a millisecond."""
    timeline = Timeline()
    timeline.enable(device)
    timeline.open_step()
    began = time.perf_counter()
    for _ in range(_SPANS):
        with timeline.span("host", "empty"):
            pass
    return (time.perf_counter() - began) / (2 * _SPANS)
