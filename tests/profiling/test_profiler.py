"""A profiled plain loop: its waits are found, and the other ranks end if one rank fails."""

from __future__ import annotations

import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_freescale.profiling import ProfilerOptions, RunInfo, StepProfiler, Timeline, collectives_on
from lightning_freescale.profiling.analysis.breakdown import ADDENDS, column
from lightning_freescale.profiling.clock_sync import Alignment
from lightning_freescale.profiling.collection import rank_exchange
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.plain_modules import medians

pytestmark = pytest.mark.xdist_group("timing")
DELAY = 0.1
STEPS = 30
GUIDE = Path(__file__).parents[2] / "docs" / "profiler.md"


class Model(torch.nn.Linear):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY * dist.get_rank())
        return super().forward(batch).square().mean()


class Averaging(torch.optim.SGD):
    """Averages the gradients of all ranks first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
        return super().step(closure)


def _guide(folder: str) -> tuple[Any, list[str]]:
    """Run the loop of the guide; rank 1's clock is three hours ahead or behind."""
    os.chdir(folder)
    rank_exchange._TOO_UNCERTAIN = 1.0
    real, offset = time.perf_counter, 3 * 3600 * dist.get_rank()
    time.perf_counter = lambda: real() + offset
    Alignment.__init__.__defaults__ = (time.perf_counter,)
    model = Model(4, 1, bias=False)
    batches = [torch.ones(2, 4)] * STEPS
    names: dict[str, Any] = {"model": model, "optimizer": Averaging(model.parameters(), 1e-3), "loader": batches}
    section = GUIDE.read_text().split("## Without Lightning")[1]
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1), names)
    assert dist.all_reduce.__module__.startswith("torch")
    return names["report"], [thread.name for thread in threading.enumerate()]


def test_the_plain_loop_of_the_guide(tmp_path: Path) -> None:
    (report, threads), (nothing, _) = run_distributed(_guide, 2, str(tmp_path))
    assert nothing is None
    assert list(report.steps) == list(range(5, STEPS))
    assert (report.samples == 2).all()
    assert (report.run.label, report.run.world_size, report.wait_attribution.aligned) == ("plain loop", 2, True)
    assert report.status.complete
    waits, forwards = medians(report, "straggler_wait"), medians(report, "forward")
    assert 0.8 * DELAY < waits[0] < 1.5 * DELAY and waits[1] < 0.3 * DELAY
    assert 0.8 * DELAY < forwards[1] < 1.5 * DELAY and forwards[0] < 0.3 * DELAY
    np.testing.assert_allclose(sum(column(report.breakdown, name) for name in ADDENDS), column(report.breakdown, "wall"))
    (figures,) = report.exchanges
    assert (figures.name, figures.per_step, figures.moved_bytes) == ("all_reduce", 1, 16)
    assert figures.last[1] > STEPS - 10 > 5 > figures.last[0]
    assert (column(report.breakdown, "data_wait") > 0).all()
    assert column(report.breakdown, "unexplained").max() < 1e-6
    assert not [name for name in threads if name.startswith("freescale")]
    assert read(tmp_path / "bubbles" / "report.json")["status"]["complete"]
    assert {path.name for path in (tmp_path / "bubbles").iterdir()} == {"report.json", "report.html", "trace.json"}


@pytest.mark.parametrize(
    ("name", "value"), [("every_n_steps", 2.5), ("every_n_steps", 0), ("max_steps", True), ("warmup_steps", None)]
)
def test_options_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        ProfilerOptions(**{name: value})
    assert ProfilerOptions(every_n_steps=np.int64(3), warmup_steps=0).every_n_steps == 3


@contextmanager
def _profiled(folder: str | Path, group: Any = None, fit_costs: Any = None, **options: Any) -> Iterator[StepProfiler]:
    timeline, device = Timeline(), torch.device("cpu")
    timeline.enable(device)
    given = ProfilerOptions(**{"every_n_steps": 3, "warmup_steps": 0, **options})
    run = RunInfo("test", "Model", 1, 1 if group is None else group.size())
    with collectives_on(timeline, ignored_groups=[group]):
        timeline.open_step()
        yield StepProfiler(timeline, device, group, given, run, Path(folder), fit_costs)
    timeline.disable()


def _run(profile: StepProfiler, steps: int, between: Callable[[], Any] = lambda: None) -> list[dict[str, float]]:
    """Run steps of one rank with 1, 2, ... samples, and return the scalars of the exchanges."""
    scalars = []
    for step in range(steps):
        scalars.append(profile.end_step(samples=step + 1, features=[step, 2.0]))
        between()
    return [each for each in scalars if each is not None]


def test_steps_after_the_warm_up_are_in_the_report(tmp_path: Path) -> None:
    seen: list[Any] = []
    with _profiled(tmp_path, warmup_steps=2, trace_steps=4, fit_costs=lambda given, _: seen.append(given.tolist())) as profile:
        _run(profile, 13)
        report = profile.write_report()
        steps = list(profile._buffer.recent)
    assert [after.start for after in steps[1:]] == [before.end for before in steps[:-1]], "without a gap"
    assert len(steps) == 4
    assert list(report.steps) == list(range(2, 13))
    assert report.samples[:, 0].tolist() == list(range(3, 14))
    assert (report.status.complete, report.status.warmup, report.status.not_exchanged) == (True, 2, 0)
    assert sorted(profile.files) == ["page", "report", "trace"]
    assert seen[-1] == [[[step, 2.0]] for step in range(2, 13)], "features reach the cost model"


def test_a_missing_plotly_is_a_warning_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    with pytest.warns(UserWarning, match="plotly"), _profiled(tmp_path):
        pass


def test_no_more_than_warm_up_is_nothing_to_report(tmp_path: Path) -> None:
    with _profiled(tmp_path / "new", warmup_steps=5) as profile:
        profile.timeline.close_step()
        assert profile.end_step() is None and profile.timeline.recording, "the first call may be before any step"
        _run(profile, 5)
        assert profile.write_report() is profile.write_interrupted_report("too early") is None
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["exchanges lag", "steps take long"])
def test_scalars_of_every_exchange(pause: float, tmp_path: Path) -> None:
    with _profiled(tmp_path, every_n_steps=1) as profile:
        found = _run(profile, 12, lambda: time.sleep(pause))
        profile.write_report()
    assert len(found) in (9, 10), "an exchange from the third step on, and the last one may be under way"
    samples = [one["freescale/bubble/samples_per_s"] * one["freescale/bubble/step_s"] for one in found]
    assert samples[:5] == pytest.approx([1, 2, 3, 4, 5])


def test_an_exchange_that_failed_is_heard_of_though_the_next_is_due(tmp_path: Path) -> None:
    with _profiled(tmp_path, every_n_steps=1) as profile:
        profile._exchange.exchange_steps = lambda *args: (_ for _ in ()).throw(RuntimeError("a rank is lost"))
        with pytest.raises(RuntimeError, match="a rank is lost"):
            _run(profile, 4, lambda: time.sleep(0.02))
        profile.write_interrupted_report("a rank is lost")


def test_waiting_for_an_exchange_is_no_part_of_a_step(tmp_path: Path) -> None:
    with _profiled(tmp_path, every_n_steps=2) as profile:
        exchange_steps = profile._exchange.exchange_steps
        profile._exchange.exchange_steps = lambda *args: (time.sleep(0.3), exchange_steps(*args))[1]
        _run(profile, 12)
        report = profile.write_report()
    assert column(report.breakdown, "wall").sum() < 0.6, "four of them had to be waited for"


def test_reports_while_it_runs_and_when_it_is_interrupted(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        _run(profile, 5)
        profile.end_epoch()
        document = read(tmp_path / "report.json")
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
        _run(profile, 2)
        report = profile.write_interrupted_report("Ctrl-C")
    status = document["status"]
    assert (status["complete"], status["reason"], status["steps"], status["not_exchanged"]) == (False, "still running", 3, 2)
    assert document["series"]["step"] == [0, 1, 2] and document["what_if"] == []
    assert list(report.steps) == [0, 1, 2]
    assert (report.status.complete, report.status.reason, report.status.not_exchanged) == (False, "Ctrl-C", 4)
    assert report.median_step is not None
    assert sorted(profile.files) == ["page", "report", "trace"]


def test_overhead_is_per_step(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        profile._stamp_cost = 1.0
        _run(profile, 10)
        profile._pending.result()
        profile._worker.cpu_seconds = 50.0
        _run(profile, 3)
        report = profile.write_report()
        stamps = profile.timeline.stamps
    assert (report.overhead.stamps, report.overhead.exchange) == pytest.approx((stamps / 13, 50.0 / 13))


HELD, LEAK = 400 * 10**6, 6 * 10**6
WINDOW, WINDOWS = 3, 14


def _leaks(folder: Path) -> Any:
    """Rank 1 holds ``HELD`` bytes from the start, and leaks ``LEAK`` per window."""
    rank = dist.get_rank()
    kept: list[Any] = [torch.ones(HELD * rank, dtype=torch.uint8)]
    with _profiled(folder, dist.new_group(backend="gloo"), every_n_steps=WINDOW, trace_steps=0) as profile:
        logged = []
        for _ in range(WINDOW * WINDOWS):
            if rank == 1:  # from the kernel, as malloc may take it from what the process has given back before
                kept.append(mmap.mmap(-1, LEAK // WINDOW, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                kept[-1].write(b"1" * (LEAK // WINDOW))
            logged.append(profile.end_step())
        profile.write_report()
    return [one for one in logged if one is not None]


def test_a_leak_is_flagged_and_its_rank_is_named(tmp_path: Path) -> None:
    logged = run_distributed(_leaks, 2, tmp_path)[0]
    memory = read(tmp_path / "report.json")["memory"]
    innocent, leaky = memory["ranks"]
    assert (innocent["grows"], leaky["grows"]) == (False, True)
    assert leaky["growth_bytes"] == pytest.approx(LEAK, rel=0.2)
    assert memory["step"][-1] == WINDOW * WINDOWS - 1
    current = np.array(memory["current_bytes"])
    assert len(current) == len(memory["step"]) >= WINDOWS - 1
    assert current[-1].tolist() == [rank["current_bytes"] for rank in memory["ranks"]]
    own, more = current.mean(axis=0)
    assert more - own == pytest.approx(HELD + LEAK * WINDOWS / 2, rel=0.15)
    assert memory["imbalance"] == pytest.approx(2 * more / (own + more), rel=0.02)
    scalars = {name.removeprefix("freescale/bubble/"): value for name, value in logged[-1].items()}
    assert logged[0]["freescale/bubble/memory_bytes"] < scalars["memory_bytes"]
    assert scalars["memory_peak_bytes"] <= max(rank["peak_bytes"] for rank in memory["ranks"])
    assert 1.2 <= scalars["memory_imbalance"] <= 2


def _interrupted(folder: Path, steps: int) -> None:
    """Rank 1 stops after some steps, while an exchange is due; rank 0 is interrupted three steps later."""
    with _profiled(folder, dist.new_group(backend="gloo")) as profile:
        for _ in range(steps):
            profile.end_step()
        profile._pending.result()
        if dist.get_rank() == 1:
            while not (folder / "outcome").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt
        no_scalars = [profile.end_step() is None for _ in range(3)]
        began = time.monotonic()
        report = profile.write_interrupted_report("rank 1 is lost")
        assert time.monotonic() - began < 20, "not the group's timeout"
    daemons = [thread.daemon for thread in threading.enumerate() if thread.name.startswith("freescale")]
    (folder / "outcome").write_text(repr((no_scalars, len(report.steps), report.status.not_exchanged, daemons)))
    raise KeyboardInterrupt  # without a word to rank 1


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("steps", "kept"), [(7, 3), (4, 7)], ids=["the second", "the first"])
def test_interrupted_while_an_exchange_waits_for_a_lost_rank(steps: int, kept: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_distributed(_interrupted, 2, tmp_path, steps)
    no_scalars, found, left, daemons = eval((tmp_path / "outcome").read_text())
    assert no_scalars == [steps == 4, True, True], "of the first exchange"
    assert (found, left) == (kept, steps + 3 - kept)
    assert daemons == [True], "the thread still waits, and keeps no process from ending"
    document = read(tmp_path / "report.json")
    status = document["status"]
    assert (status["complete"], status["reason"], status["not_exchanged"]) == (False, "rank 1 is lost", left)
    assert ("rank 0 alone" in str(document["wait_attribution"]["reason"])) == (kept == 7)
    assert document["series"]["step"] == list(range(kept))
    assert {path.name for path in tmp_path.iterdir()} >= {"report.json", "report.html", "trace.json"}
