"""What a rank holds of memory, as the kernel and torch's allocator say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_freescale.profiling.recording import memory as module
from lightning_freescale.profiling.recording.memory import MemoryReading, memory_reader

MB = 10**6


def test_what_a_process_takes_and_gives_back_is_seen() -> None:
    read = memory_reader(torch.device("cpu"))
    assert read is not None
    before = read()
    held = torch.ones(100 * MB, dtype=torch.uint8)
    with_it = read()
    assert with_it.current - before.current == pytest.approx(100 * MB, abs=5 * MB)
    assert with_it.peak >= with_it.current
    del held
    after = read()
    assert after.current - before.current == pytest.approx(0, abs=5 * MB)
    assert after.peak >= with_it.current - 5 * MB
    assert after.reserved is None


def test_where_the_kernel_does_not_say_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STATUS", tmp_path / "none")
    assert memory_reader(torch.device("cpu")) is None
    (tmp_path / "none").write_text("Name:\tpython\nVmHWM:\t  100 kB\n")
    assert memory_reader(torch.device("cpu")) is None
    assert memory_reader(torch.device("meta")) is None


@contextmanager
def _allocator(monkeypatch: pytest.MonkeyPatch, **figures: int) -> Iterator[list[torch.device]]:
    """Torch's names for the counters, on a machine without CUDA; synchronising is an error."""
    asked: list[torch.device] = []
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: asked.append(device) or figure)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a reading waits for nobody"))
    yield asked


def test_on_cuda_the_allocator_of_the_own_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 3)
    with _allocator(monkeypatch, memory_allocated=1, max_memory_allocated=2, memory_reserved=3) as asked:
        read = memory_reader(device)
        assert read is not None
        assert read() == MemoryReading(current=1, peak=2, reserved=3)
    assert asked == 2 * [device] * 3, "once to see whether it counts"


def test_an_allocator_that_does_not_count_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_allocated", refuse)
    assert memory_reader(torch.device("cuda", 0)) is None
