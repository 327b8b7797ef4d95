"""A plain loop that is profiled: what is waited for is found, and whatever happens to a rank, the others end."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_freescale._worker import WorkerThread
from lightning_freescale.profiling import ProfilerOptions, RunInfo, StepProfiler, Timeline, collectives_on
from lightning_freescale.profiling.analysis.breakdown import ADDENDS, column
from lightning_freescale.profiling.clock_sync.alignment import Alignment
from lightning_freescale.profiling.collection import rank_exchange
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.testing import RankFailed, run_distributed

DELAY = 0.1
STEPS = 30
GUIDE = Path(__file__).parents[2] / "docs" / "profiler.md"


def _medians(report: BubbleReport, name: str) -> list[float]:
    return np.median(column(report.breakdown, name), axis=0).tolist()


class Model(torch.nn.Linear):
    """Rank 1 takes its time."""

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


def _guide(folder: str, loader: str, hours: float = 0.0, too_uncertain: float = 1.0) -> tuple[Any, list[str]]:
    """The loop of the guide, word for word but for its ``loader``; rank 1's clock may be hours off."""
    os.chdir(folder)
    rank_exchange._TOO_UNCERTAIN = too_uncertain
    real, offset = time.perf_counter, hours * 3600 * dist.get_rank()
    time.perf_counter = lambda: real() + offset
    Alignment.__init__.__defaults__ = (time.perf_counter,)
    model = Model(4, 1, bias=False)
    batches = [torch.ones(2, 4)] * STEPS
    names: dict[str, Any] = {"model": model, "optimizer": Averaging(model.parameters(), 1e-3), "loader": batches}
    section = GUIDE.read_text().split("## Without Lightning")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    assert "in batches_on(timeline, loader):" in code
    exec(code.replace("batches_on(timeline, loader)", loader), names)
    assert dist.all_reduce.__module__.startswith("torch")
    return names["report"], [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("hours", [pytest.param(0, marks=pytest.mark.slow), 3], ids=["clocks alike", "clocks hours apart"])
def test_the_plain_loop_of_the_guide(hours: float, tmp_path: Path) -> None:
    (report, threads), (nothing, _) = run_distributed(_guide, 2, str(tmp_path), "batches_on(timeline, loader)", hours)
    assert nothing is None
    assert list(report.steps) == list(range(5, STEPS))
    assert (report.samples == 2).all()
    assert (report.run.label, report.run.world_size, report.wait_attribution.aligned) == ("plain loop", 2, True)
    assert report.status.complete
    waits, forwards = _medians(report, "straggler_wait"), _medians(report, "forward")
    assert 0.8 * DELAY < waits[0] < 1.5 * DELAY and waits[1] < 0.3 * DELAY
    assert 0.8 * DELAY < forwards[1] < 1.5 * DELAY and forwards[0] < 0.3 * DELAY
    np.testing.assert_allclose(sum(column(report.breakdown, name) for name in ADDENDS), column(report.breakdown, "wall"))
    (figures,) = report.exchanges
    assert (figures.name, figures.per_step, figures.moved) == ("all_reduce", 1, 16)
    assert figures.last[1] > STEPS - 10 > 5 > figures.last[0]
    assert (column(report.breakdown, "data_wait") > 0).all()
    assert column(report.breakdown, "unexplained").max() < 1e-6
    assert not [name for name in threads if name.startswith("freescale")]
    assert read(tmp_path / "bubbles" / "report.json")["status"]["complete"]
    assert {path.name for path in (tmp_path / "bubbles").iterdir()} == {"report.json", "report.html", "trace.json"}


def test_clocks_that_disagree_and_a_loader_that_is_not_observed(tmp_path: Path) -> None:
    report = run_distributed(_guide, 2, str(tmp_path), "loader", too_uncertain=1e-9)[0][0]
    assert not report.wait_attribution.aligned
    assert "agreed only within" in report.wait_attribution.reason
    assert "agreed only within" in read(tmp_path / "bubbles" / "report.json")["wait_attribution"]["reason"]
    assert _medians(report, "wait")[0] > 0.8 * DELAY
    assert not column(report.breakdown, "straggler_wait").any() and not column(report.breakdown, "transfer").any()
    assert {case.name for case in report.what_if if "clocks" in (case.note or "")} == {
        "perfect balance",
        "full overlap",
        "balance + overlap",
    }
    assert not column(report.breakdown, "data_wait").any() and column(report.breakdown, "unexplained").any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("every_n_steps", 2.5), ("every_n_steps", "50"), ("every_n_steps", 0), ("max_steps", True), ("warmup_steps", None)],
)
def test_options_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: pass a whole number, ")):
        ProfilerOptions(**{name: value})
    assert ProfilerOptions(every_n_steps=np.int64(3)).every_n_steps == 3


@contextmanager
def _profiled(folder: str | Path, group: Any = None, fit_costs: Any = None, **options: Any) -> Any:
    timeline, device = Timeline(), torch.device("cpu")
    timeline.enable(device)
    given = ProfilerOptions(**{"every_n_steps": 3, "warmup_steps": 0, **options})
    run = RunInfo("test", "Model", 1, 1 if group is None else group.size())
    with collectives_on(timeline, ignored_groups=[group]):
        timeline.open_step()
        yield StepProfiler(timeline, device, group, given, run, Path(folder), fit_costs)
    timeline.disable()


def _subgroups(folder: str) -> Any:
    rank_exchange._TOO_UNCERTAIN = 1.0  # however busy the machine is
    pair, own, rank = dist.new_group([0, 1]), dist.new_group(backend="gloo"), dist.get_rank()
    with _profiled(folder, own) as profile:
        for _ in range(8):
            time.sleep((0, DELAY, 3 * DELAY)[rank])
            if rank < 2:
                dist.all_reduce(torch.ones(4), group=pair)
            profile.end_step()
        return profile.write_report()


def test_nobody_waits_for_ranks_outside_of_a_subgroup(tmp_path: Path) -> None:
    report = run_distributed(_subgroups, 3, str(tmp_path))[0]
    waits = _medians(report, "straggler_wait")
    assert 0.7 * DELAY < waits[0] < 1.8 * DELAY
    assert waits[1] < 0.5 * DELAY and waits[2] == 0
    assert report.last[2] == 0 and sum(report.last) == 8
    assert report.exchanges[0].per_step == pytest.approx(2 / 3)


# -- one rank


def _rank_alone(profile: StepProfiler, steps: int, between: Any = None) -> list[dict[str, float]]:
    news = []
    for step in range(steps):
        scalars = profile.end_step(samples=step + 1)
        news += [] if scalars is None else [scalars]
        if between is not None:
            between()
    return news


def test_steps_after_the_warm_up_are_in_the_report(tmp_path: Path) -> None:
    with _profiled(tmp_path, warmup_steps=2, trace_steps=4) as profile:
        _rank_alone(profile, 13)
        report = profile.write_report()
        steps = list(profile._buffer.recent)
    assert [after.start for after in steps[1:]] == [before.end for before in steps[:-1]], "without a gap"
    assert len(steps) == 4
    assert list(report.steps) == list(range(2, 13))
    assert report.samples[:, 0].tolist() == list(range(3, 14))
    assert (report.status.complete, report.status.warmup, report.status.not_exchanged) == (True, 2, 0)
    assert sorted(profile.files) == ["page", "report", "trace"]


def test_what_the_page_will_lack_is_told_when_it_can_be_helped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    lacks = {"expected_warning": UserWarning, "match": "no pictures without the package plotly"}
    with ExitStack() as stack:
        with pytest.warns(**lacks):
            profile = stack.enter_context(_profiled(tmp_path))
        _rank_alone(profile, 5)
        with pytest.warns(**lacks):
            profile.write_report()
    assert sorted(profile.files) == ["page", "report", "trace"]


def test_no_more_than_warm_up_is_nothing_to_report(tmp_path: Path) -> None:
    with _profiled(tmp_path / "new", warmup_steps=5) as profile:
        _rank_alone(profile, 5)
        assert profile.write_report() is None
        assert profile.write_interrupted_report("too early") is None
    assert not list(tmp_path.rglob("*.*"))


def test_the_first_call_may_be_before_any_step(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        profile.timeline.close_step()
        assert profile.end_step() is None
        assert profile.timeline.recording
        _rank_alone(profile, 2)
        assert len(profile.write_report().steps) == 2


@pytest.mark.parametrize("between", [None, lambda: time.sleep(0.02)], ids=["exchanges lag", "steps take long"])
def test_news_of_every_exchange(between: Any, tmp_path: Path) -> None:
    with _profiled(tmp_path, every_n_steps=1) as profile:
        news = _rank_alone(profile, 12, between)
        profile.write_report()
    assert len(news) in (9, 10), "an exchange from the third step on, and the last one may be under way"
    assert [one["freescale/bubble/samples_per_s"] * one["freescale/bubble/step_s"] for one in news][:5] == pytest.approx(
        [1, 2, 3, 4, 5]
    )


def test_an_exchange_that_failed_is_heard_of_though_the_next_is_due(tmp_path: Path) -> None:
    with _profiled(tmp_path, every_n_steps=1) as profile:
        profile._exchange.exchange_steps = lambda *args: (_ for _ in ()).throw(RuntimeError("a rank is gone"))
        with pytest.raises(RuntimeError, match="a rank is gone"):
            _rank_alone(profile, 4, lambda: time.sleep(0.02))
        profile.write_interrupted_report("a rank is gone")


def test_waiting_for_an_exchange_is_no_part_of_a_step(tmp_path: Path) -> None:
    with _profiled(tmp_path, every_n_steps=2) as profile:
        exchange_steps = profile._exchange.exchange_steps
        profile._exchange.exchange_steps = lambda *args: (time.sleep(0.3), exchange_steps(*args))[1]
        _rank_alone(profile, 12)
        report = profile.write_report()
    assert column(report.breakdown, "wall").sum() < 0.6, "four of them had to be waited for"


def test_a_report_while_it_runs(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        _rank_alone(profile, 5)
        profile.end_epoch()
        document = read(tmp_path / "report.json")
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
        profile.write_report()
    assert document["series"]["step"] == [0, 1, 2]
    assert document["status"] == {
        "complete": False, "reason": "still running", "steps": 3, "first_step": 0, "warmup": 0, "not_exchanged": 2,
    }  # fmt: skip
    assert document["what_if"] == []


def test_interrupted_after_an_exchange(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        _rank_alone(profile, 7)
        profile.end_epoch()
        report = profile.write_interrupted_report("Ctrl-C")
    assert list(report.steps) == [0, 1, 2]
    assert (report.status.complete, report.status.reason, report.status.not_exchanged) == (False, "Ctrl-C", 4)
    assert report.median_step is not None
    assert sorted(profile.files) == ["page", "report", "trace"]


def test_what_the_profiler_takes_is_told_per_step(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        profile._stamp_cost = 1.0
        _rank_alone(profile, 10)
        profile._exchange.spent = 5.0
        profile._worker.cpu_seconds = 20.0
        report = profile.write_report()
        stamps = profile.timeline.stamps
    assert report.overhead.stamps == stamps / 10
    assert report.overhead.exchange > 0


def test_what_exchanges_take_is_told(tmp_path: Path) -> None:
    with _profiled(tmp_path) as profile:
        _rank_alone(profile, 10)
        profile._pending.result()
        profile._worker.cpu_seconds = 50.0
        _rank_alone(profile, 3)
        report = profile.write_report()
    assert report.overhead.exchange == pytest.approx(50.0 / 13)


def test_features_reach_the_one_who_explains(tmp_path: Path) -> None:
    seen = []

    def fit_costs(features: Any, compute: Any) -> None:
        seen.append(features.tolist())

    with _profiled(tmp_path, every_n_steps=2, fit_costs=fit_costs) as profile:
        for step in range(5):
            profile.end_step(1, [step, 2.0])
        profile.write_report()
    assert seen[-1] == [[[step, 2.0]] for step in range(5)]


# -- a rank that is gone


def _leave(how: str, outcome: Path) -> None:
    if how == "dies":
        os._exit(9)
    while not outcome.exists():
        time.sleep(0.01)
    raise KeyboardInterrupt


def _steps_until_it_raises(profile: StepProfiler) -> tuple[int, float, str]:
    began = time.monotonic()
    for step in range(10_000):
        try:
            profile.end_step()
        except RuntimeError as error:
            return step, time.monotonic() - began, type(error).__name__
        time.sleep(0.001)
    raise AssertionError("it never raised")


def _lost(folder: str, how: str, steps: int, timeout: float, go_on: bool) -> None:
    """Rank 1 leaves after some steps, while an exchange is due; what becomes of rank 0 is written."""
    own, rank = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)), dist.get_rank()
    with _profiled(folder, own) as profile:
        for _ in range(steps):
            profile.end_step()
        profile._pending.result()
        if rank == 1:
            _leave(how, Path(folder, "outcome"))
        raised = _steps_until_it_raises(profile) if go_on else [profile.end_step() for _ in range(3)]
        began = time.monotonic()
        report = profile.write_interrupted_report("rank 1 is gone")
        took = time.monotonic() - began
    alive = [thread for thread in threading.enumerate() if thread.name.startswith("freescale")]
    assert all(thread.daemon for thread in alive)
    (Path(folder) / "outcome").write_text(repr((raised, took, len(report.steps), report.status.not_exchanged, len(alive))))
    raise KeyboardInterrupt  # the other ranks have nothing to say


def _outcome(folder: Path, *args: Any) -> Any:
    with pytest.raises(RankFailed):
        run_distributed(_lost, 2, str(folder), *args)
    return eval((folder / "outcome").read_text())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("how", "timeout", "least", "most"), [("dies", 20, 0, 10), ("is silent", 2.5, 2, 15)])
def test_a_lost_rank_is_heard_of_within_the_timeout(
    how: str, timeout: float, least: float, most: float, tmp_path: Path
) -> None:
    (_, seconds, _), took, steps, left, alive = _outcome(tmp_path, how, 7, timeout, True)
    assert least < seconds < most
    assert took < 2, "not the timeout once more"
    assert steps == 3, "the first exchange was fine"
    assert left >= 4 and alive == 0
    status = read(tmp_path / "report.json")["status"]
    assert (status["complete"], status["reason"], status["not_exchanged"]) == (False, "rank 1 is gone", left)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("steps", "kept"), [(7, 3), (4, 7)], ids=["the second", "the first"])
def test_interrupted_while_an_exchange_waits_for_a_lost_rank(steps: int, kept: int, tmp_path: Path) -> None:
    news, took, found, left, alive = _outcome(tmp_path, "is silent", steps, 60, False)
    assert [scalars is None for scalars in news] == [steps == 4, True, True], "of the first exchange"
    assert took < 20, "not the group's timeout"
    assert (found, left) == (kept, steps + 3 - kept)
    assert alive == 1, "it still waits, and keeps nobody from ending"
    document = read(tmp_path / "report.json")
    assert ("rank 0 alone" in str(document["wait_attribution"]["reason"])) == (kept == 7)
    assert document["series"]["step"] == list(range(kept))
    assert {path.name for path in tmp_path.iterdir()} >= {"report.json", "report.html", "trace.json"}


def _leaves_a_thread() -> None:
    WorkerThread("waits").submit(time.sleep, 60)


def test_a_thread_that_waits_keeps_no_process_from_ending() -> None:
    process = multiprocessing.get_context("fork").Process(target=_leaves_a_thread)
    process.start()
    process.join(40)
    assert process.exitcode == 0
