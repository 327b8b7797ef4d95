"""A timeline for tests of the profiler."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale.profiling.recording.timeline import Timeline


@pytest.fixture
def timeline() -> Timeline:
    made = Timeline()
    made.enable(torch.device("cpu"))
    return made
