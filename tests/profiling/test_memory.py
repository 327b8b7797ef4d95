"""Memory of real ranks, from their processes into the report, its text and the loggers' scalars."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling import ProfilerOptions, RunInfo, StepProfiler, Timeline
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.testing import run_distributed

MB = 10**6
WINDOW, WINDOWS = 3, 14


def _train(folder: Path, leak: int = 0, held: tuple[int, int] = (0, 0)) -> Any:
    """Rank 1 leaks so many bytes per window; each rank holds so many from the start."""
    rank = dist.get_rank()
    kept: list[Any] = [torch.ones(held[dist.get_rank()], dtype=torch.uint8)]
    timeline, device = Timeline(), torch.device("cpu")
    timeline.enable(device)
    options = ProfilerOptions(every_n_steps=WINDOW, warmup_steps=0, trace_steps=0)
    run = RunInfo("leak", "Model", 1, 2)
    profiler = StepProfiler(timeline, device, dist.new_group(backend="gloo"), options, run, folder)
    logged = []
    timeline.open_step()
    for _ in range(WINDOW * WINDOWS):
        with timeline.span("forward", "forward"):
            kept += [_mapped(leak // WINDOW)] if rank == 1 and leak else []
        logged.append(profiler.end_step())
    report = profiler.write_report()
    timeline.disable()
    text = None if report is None else str(report)
    return text, [one for one in logged if one is not None]


def _mapped(size: int) -> mmap.mmap:
    """Memory that comes from the kernel, as malloc may take it from what the process has given back before."""
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"1" * size)
    return held


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("leaking")
    (text, logged), _ = run_distributed(_train, 2, folder, 6 * MB)
    return read(folder / "report.json"), text, logged, (folder / "report.html").read_text()


def test_a_leak_is_flagged_and_its_rank_is_named(leaking: Any) -> None:
    document, text, _, page = leaking
    innocent, leaky = document["memory"]["ranks"]
    assert (innocent["grows"], leaky["grows"]) == (False, True)
    assert leaky["growth_bytes"] == pytest.approx(6 * MB, rel=0.2)
    line = next(line for line in text.splitlines() if line.startswith("MEMORY GROWS"))
    assert "rank 1 by " in line
    assert "rank 0" not in line
    assert 'id="memory"' in page


def test_loggers_get_it_in_bytes(leaking: Any) -> None:
    document, _, logged, _ = leaking
    last = logged[-1]
    assert logged[0]["freescale/bubble/memory_bytes"] < last["freescale/bubble/memory_bytes"]
    assert last["freescale/bubble/memory_peak_bytes"] <= max(rank["peak_bytes"] for rank in document["memory"]["ranks"])
    assert 1 <= last["freescale/bubble/memory_imbalance"] <= 2


def test_every_window_is_there(leaking: Any) -> None:
    memory = leaking[0]["memory"]
    assert memory["step"][-1] == WINDOW * WINDOWS - 1
    assert len(memory["current_bytes"]) == len(memory["step"]) >= WINDOWS - 1
    assert memory["current_bytes"][-1] == [rank["current_bytes"] for rank in memory["ranks"]]


def test_ranks_that_do_not_leak_are_left_alone_and_one_that_holds_more_shows(tmp_path: Path) -> None:
    (text, _), _ = run_distributed(_train, 2, tmp_path, 0, (0, 600 * MB))
    document = read(tmp_path / "report.json")
    memory = document["memory"]
    assert [rank["grows"] for rank in memory["ranks"]] == [False, False]
    assert "MEMORY GROWS" not in text
    own, more = (rank["current_bytes"] for rank in memory["ranks"])
    assert more - own == pytest.approx(600 * MB, rel=0.1)
    assert memory["imbalance"] == pytest.approx(2 * more / (own + more), rel=0.02)
    assert memory["peak_imbalance"] > 1.3
    assert f"on rank 1, {memory['peak_imbalance']:.2f}x the mean" in text
