"""The profiler under strategies that know nothing of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy

from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.testing import run_distributed
from tests.helpers.chrome_trace import problems, read_trace
from tests.helpers.plain_modules import Plain, fit, named, profiler

DELAY = 0.2


def _ddp(
    folder: str, profiling: dict[str, Any] | None = None, forward: float = 0.0, validation: float = 0.0, **options: Any
) -> BubbleReport | None:
    """A forward takes that long on rank 1, a validation on both."""
    callback = profiler(folder, **(profiling or {}))
    trainer = fit(Plain(forward, validation), [callback], **options)
    methods = [name for name in ("backward", "training_step", "optimizer_step") if name in vars(trainer.strategy)]
    assert not methods, "the strategy is as it was"
    assert dist.all_reduce.__module__.startswith("torch"), "and so is torch.distributed"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("freescale")]
    return callback.report


def _medians(report: BubbleReport, name: str) -> list[float]:
    return np.median(column(report.breakdown, name), axis=0).tolist()


def test_ddp_on_a_plain_module(tmp_path: Path) -> None:
    report, nothing = run_distributed(_ddp, 2, str(tmp_path), forward=DELAY)
    assert nothing is None
    assert report.run.strategy == "DDPStrategy"
    assert report.run.parameters == 5
    assert list(report.steps) == list(range(1, 14))
    assert (report.samples == 2).all()
    waits, computes = _medians(report, "straggler_wait"), _medians(report, "compute")
    assert 0.8 * DELAY < waits[0] < 1.5 * DELAY and waits[1] < 0.5 * DELAY
    assert 0.8 * DELAY < computes[1] < 1.5 * DELAY and computes[0] < 0.5 * DELAY
    assert column(report.breakdown, "unexplained").max() < 1e-6
    assert named(report, "dense gradients").per_step == 1
    assert named(report, "all_reduce").per_step >= 1, "what the module logs over all ranks is an exchange, too"
    assert list(report.imbalance.slow) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps", "validated"),
    [
        ({"accumulate_grad_batches": 2}, 13, []),
        ({"val_check_interval": 3, "validation": 2 * DELAY}, 13, [3, 6, 9, 12]),
        ({"max_epochs": 2, "steps": 7, "validation": 5 * DELAY}, 13, [7]),
        ({"gradient_clip_val": 1.0}, 13, []),
        ({"strategy": DDPStrategy(find_unused_parameters=True)}, 13, []),
        ({"limit_val_batches": 0, "steps": 3}, 2, []),
    ],
    ids=["accumulation", "validation between", "two epochs", "clipping", "an object", "few steps"],
)
def test_any_loop(options: dict[str, Any], steps: int, validated: list[int], tmp_path: Path) -> None:
    """``validated``: the steps before which there is a validation."""
    report = run_distributed(_ddp, 2, str(tmp_path), **options)[0]
    assert len(report.steps) == steps
    if validated:  # the median, as a single step may be slow for reasons of the machine
        walls = column(report.breakdown, "wall")[np.isin(report.steps, validated)]
        assert walls.shape == (len(validated), 2)
        assert np.median(walls) < options["validation"], "it is no part of a step"
    np.testing.assert_allclose(report.breakdown[..., 1:-1].sum(axis=-1), report.breakdown[..., 0], rtol=1e-9)
    assert column(report.breakdown, "unexplained").max() < 1e-6
    assert named(report, "dense gradients").per_step == pytest.approx(
        0.5 if "accumulate_grad_batches" in options else 1.0, abs=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("used", [SimpleProfiler, PyTorchProfiler])
def test_beside_a_profiler_of_the_users(used: type, tmp_path: Path) -> None:
    def run() -> tuple[int, str]:
        own = used(dirpath=str(tmp_path), filename=f"own{dist.get_rank()}")
        report = _ddp(str(tmp_path / "bubbles"), steps=8, profiler=own)
        return 0 if report is None else len(report.steps), own.summary()

    (steps, summary), _ = run_distributed(run, 2)
    assert steps == 7
    assert summary


def test_two_torch_profilers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="torch_profiler_steps"):
        run_distributed(_ddp, 2, str(tmp_path), {"torch_profiler_steps": 2}, profiler=PyTorchProfiler(dirpath=str(tmp_path)))


@pytest.mark.slow
def test_a_kineto_window_is_in_the_trace_and_not_in_the_report(tmp_path: Path) -> None:
    report = run_distributed(_ddp, 2, str(tmp_path), {"torch_profiler_steps": 3})[0]
    assert len(report.steps) == 13 - 3
    trace = tmp_path / "trace.json"
    events = read_trace(trace)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any(name.startswith("kineto: ") for name in names)
    assert {event["pid"] for event in events if "kineto" in str(event.get("cat", "")) or event["name"] == "aten::linear"}
    assert len([event for event in events if event["name"] == "step 8"]) == 2, "its steps are there on both ranks"


def test_one_device(tmp_path: Path) -> None:
    callback = profiler(tmp_path)
    fit(Plain(), [callback], devices=1, strategy="auto")
    report = callback.report
    assert report is not None
    assert report.wait_attribution.aligned
    assert report.breakdown.shape[:2] == (13, 1)
    assert not column(report.breakdown, "straggler_wait").any()
    assert not problems_of(tmp_path)


def problems_of(folder: Path) -> list[str]:
    """Of the files of a report."""
    import json

    read(folder / "report.json")
    return problems(json.loads((folder / "trace.json").read_text()))


class Counting(L.Callback):
    """How many collectives the default group has had, after each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts.append(torch.distributed.group.WORLD._get_sequence_number_for_group())


def _collectives(profiled: bool, folder: str) -> list[int]:
    counting = Counting()
    fit(Plain(), [counting, *([profiler(folder, torch_profiler_steps=2)] if profiled else [])])
    return np.diff(counting.counts).tolist()


def test_no_collective_on_the_default_group_in_a_step(tmp_path: Path) -> None:
    with_it, without = (run_distributed(_collectives, 2, profiled, str(tmp_path))[0] for profiled in (True, False))
    assert with_it == without
    assert min(without) > 0, "or the count does not count"


def _logged(folder: str) -> list[list[str]]:
    fit(Plain(), [profiler(folder)], steps=7, logger=CSVLogger(folder, name="", version=""), limit_val_batches=0)
    path = Path(folder, "metrics.csv")
    return [line.split(",") for line in path.read_text().splitlines()] if dist.get_rank() == 0 else []


def test_an_exchange_of_the_last_step_is_logged_too(tmp_path: Path) -> None:
    header, *rows = run_distributed(_logged, 2, str(tmp_path))[0]
    assert [row for row in rows if row[header.index("freescale/bubble/fraction")]]
