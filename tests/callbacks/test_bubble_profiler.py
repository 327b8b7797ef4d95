"""The profiler reports artificial delays with the right cause and rank, and changes nothing else."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale import BubbleProfiler, FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.data import BalanceOptions
from lightning_freescale.profiling.analysis.breakdown import ADDENDS, PART_NAMES, column
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.profiling.reporting.report import BubbleReport
from lightning_freescale.testing import run_distributed
from tests.helpers.chrome_trace import problems, read_trace
from tests.helpers.plain_modules import DELAY, Plain, delayed, fit, medians, named, profiled, profiler
from tests.helpers.recommender import Recommender, Samples, collate, trainer
from tests.helpers.shown_page import packed

timing = pytest.mark.xdist_group("timing")
STEPS = 12


class SlowSamples(Samples):
    """Data whose batches take one ``DELAY`` to load on rank 0."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if os.environ["RANK"] == "0":
            time.sleep(DELAY)
        return [self[index] for index in indices]


class Slow(Recommender):
    """A module with one ``DELAY`` in a hook on both ranks, two in the forward of rank 1, and one in validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(DELAY)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        time.sleep(2 * DELAY * self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        time.sleep(DELAY)


def _loader(data: Samples, **options: Any) -> FreeScaleDataModule:
    options = {"balance": BalanceOptions(assignment_mode="fixed"), **options}
    return FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, **options)


def _recommended(module: Recommender, folder: Path) -> tuple[BubbleReport | None, dict[str, Path], str]:
    torch.manual_seed(0)
    callback, logger = profiler(None, warmup_steps=2, verbose=True), CSVLogger(folder)
    fitted = trainer(devices=2, callbacks=[callback], logger=logger, log_every_n_steps=1, val_check_interval=3)
    fitted.fit(module, _loader(SlowSamples(8 * STEPS), val_dataset=Samples(8)))
    assert (callback.report is None) == (not fitted.is_global_zero)
    return callback.report, callback.files, logger.log_dir


@timing
def test_delays_come_back_and_are_reported(tmp_path: Path) -> None:
    report, files, logged = run_distributed(_recommended, 2, Slow("adagrad"), tmp_path)[0]
    found = {"data_wait": (1, 0), "host_overhead": (1, 1), "straggler_wait": (1, 0), "transfer": (0, 0), "wait": (0, 0)}
    assert delayed(report, compute=(0, 2), **found) == []
    # every step in full
    parts = report.breakdown
    assert parts.shape == (STEPS - 2, 2, len(PART_NAMES)) and (report.samples == 4).all()
    np.testing.assert_allclose(sum(column(parts, name) for name in ADDENDS), parts[:, :, 0], rtol=1e-9)
    assert np.abs(column(parts, "unexplained")).max() < 1e-6, "nothing is left unexplained"
    assert (parts > -1e-9).all() and (column(parts, "transfer") > 0).all(), "every step exchanges something"
    # validation is no part of the step after it; the median, as a single step may be slow for reasons of the machine
    wall, after = parts[:, :, 0], np.isin(report.steps, (3, 6, 9))
    assert after.sum() == 3 and np.median(wall[after]) < np.median(wall[~after]) + DELAY / 2
    # the slow rank is the cause, not the data
    assert report.imbalance.method == "cost model", "the data module knows the lengths"
    assert list(report.imbalance.slow) == [1]
    assert report.imbalance.hardware > 0.3 * DELAY > abs(report.imbalance.data)
    gains = {case.name: case.speed_up for case in report.what_if}
    assert gains["no data wait"] < 1.2 and gains.keys() >= {
        *("perfect balance", "full overlap", "balance + overlap", "equal histories")
    }
    moved = {figures.name: figures.moved_bytes for figures in report.exchanges}
    assert {"embedding rows", "dense gradients"} <= moved.keys() and moved["embedding exchange (background)"] > 0
    # loggers and files
    header = Path(logged, "metrics.csv").read_text().splitlines()[0].split(",")
    scalars = ("fraction", "straggler_wait", "forward", "hidden", "samples_per_s", "step_s")
    assert {f"freescale/bubble/{name}" for name in scalars} <= set(header)
    names = {"report": "report.json", "page": "report.html", "trace": "trace.json"}
    assert files == {name: Path(logged, "bubbles", file) for name, file in names.items()}
    document = read(files["report"])
    assert document["status"]["complete"] and document["run"]["world_size"] == len(document["ranks"]) == 2
    assert document["median_step"] is not None and packed(files["page"])[0][0]["run"] == document["run"]
    shown = {event.get("name") for event in read_trace(files["trace"])}
    assert {"forward", "backward", "optimizer", "fetch", "embedding rows"} <= shown


class Counting(L.Callback):
    """Record the number of collectives of the default group after each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts.append(dist.group.WORLD._get_sequence_number_for_group())


def test_profiling_changes_no_number_and_adds_no_collective_to_the_default_group(tmp_path: Path) -> None:
    def run(watched: bool) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        module, counting = Recommender("adagrad"), Counting()
        callbacks = [profiler(tmp_path, every_n_steps=3, torch_profiler_steps=2)] if watched else []
        trainer(devices=2, callbacks=callbacks).fit(module, _loader(Samples(8 * STEPS)))
        fit(Plain(), [counting, *callbacks])
        return module.losses, np.diff(counting.counts).tolist()

    for with_it, (losses, counts) in run_distributed(lambda: (run(True), run(False)), 2):
        assert with_it == (losses, counts)
        assert min(counts) > 0, "or the count does not count"


@pytest.mark.slow
def test_calibration_alone_does_not_take_waits_for_compute() -> None:
    class Patched(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            self.seen = dist.all_reduce is not original

    original, patched = dist.all_reduce, Patched()

    def run() -> tuple[bool, bool]:
        strategy = FreeScaleStrategy(overlap="torchrec")
        fitted = trainer(devices=2, strategy=strategy, callbacks=[patched])
        fitted.fit(Recommender(), _loader(Samples(64)))
        return patched.seen, dist.all_reduce is original

    assert run_distributed(run, 2) == [(True, True)] * 2


class SlowStart(IterableDataset):
    """A data set whose first sample is late."""

    def __iter__(self) -> Iterator[Tensor]:
        time.sleep(DELAY)
        yield from torch.ones(4, 4)


class Normed(Plain):
    """A module with buffers, which DDP broadcasts before each forward; rank 0 is late."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(DELAY * (1 - self.global_rank))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(self.norm(batch)).square().mean()


class Sharded(Plain):
    """A module with two layers, each sharded."""

    def configure_model(self) -> None:
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        for part in (*self.layer, self.layer):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


LOOPS: dict[str, tuple[L.LightningModule, dict[str, Any]]] = {
    "a late rank": (Plain(DELAY), {}),
    "accumulation": (Plain(), {"accumulate_grad_batches": 2}),
    "validation between": (Plain(0.0, 2 * DELAY), {"val_check_interval": 3, "validation_rows": SlowStart()}),
    "two epochs": (Plain(0.0, 5 * DELAY), {"max_epochs": 2, "steps": 7}),
    "an object, clipping": (Plain(), {"strategy": DDPStrategy(find_unused_parameters=True), "gradient_clip_val": 1.0}),
    "few steps": (Plain(), {"limit_val_batches": 0, "steps": 3}),
    "buffers": (Normed(), {"limit_val_batches": 0, "steps": 8}),
    "kineto": (Plain(), {"profiling": {"torch_profiler_steps": 3}}),
    "logged": (Plain(), {"limit_val_batches": 0, "steps": 7, "profiler": SimpleProfiler()}),
    "sharded": (Sharded(DELAY), {"limit_val_batches": 0, "steps": 8, "strategy": ModelParallelStrategy(2, 1)}),
}
COUNTS = {"few steps": 2, "kineto": 13 - 3, "logged": 6, "buffers": 7, "sharded": 7}
GRADIENTS = {"accumulation": ("dense gradients", 0.5), "sharded": ("reduce_scatter_single", 2.0)}
VALIDATED = {"validation between": [3, 6, 9, 12], "two epochs": [7]}


def _looped(folder: Path) -> dict[str, BubbleReport]:
    reports = {}
    for name, (module, options) in LOOPS.items():
        logger = CSVLogger(folder, name="", version="") if name == "logged" else False
        original, strategy = dist.all_reduce, options.get("strategy")
        reports[name] = profiled(folder / name, module, logger=logger, **options)
        assert strategy is None or "training_step" not in vars(strategy), "the strategy is as it was"
        assert dist.all_reduce is original and dist.all_reduce.__module__.startswith("torch"), "and so is torch.distributed"
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("freescale")]
    return reports


@timing
def test_any_loop_under_ddp(tmp_path: Path) -> None:
    reports, nothing = run_distributed(_looped, 2, tmp_path)
    assert set(nothing.values()) == {None}
    for name, report in reports.items():
        parts, count = report.breakdown, COUNTS.get(name, 13)
        assert (len(report.steps), parts.shape[:2]) == (count, (count, 2)), name
        np.testing.assert_allclose(parts[..., 1:-1].sum(axis=-1), parts[..., 0], rtol=1e-9, err_msg=name)
        assert column(parts, "unexplained").max() < 1e-6, name
        gradients, per_step = GRADIENTS.get(name, ("dense gradients", 1.0))
        assert named(report, gradients).per_step == pytest.approx(per_step, abs=0.1), name
        for part in ("straggler_wait", "transfer"):
            reported = sum(getattr(figures, f"{part}_s") for figures in report.exchanges)
            assert reported == pytest.approx(column(parts, part).mean(), rel=1e-6), f"{name}: exchanges are those of the steps"
    for name, steps in VALIDATED.items():  # the median, as a single step may be slow for reasons of the machine
        walls = column(reports[name].breakdown, "wall")[np.isin(reports[name].steps, steps)]
        assert walls.shape == (len(steps), 2) and np.median(walls) < DELAY, f"{name}: it is no part of a step"
    late, buffers, sharded = reports["a late rank"], reports["buffers"], reports["sharded"]
    assert delayed(late, straggler_wait=(1, 0), compute=(0, 1)) == delayed(sharded, straggler_wait=(1, 0)) == []
    assert named(sharded, "all_gather_single").per_step >= 2, "in forward"
    assert (late.run.strategy, late.run.parameters, list(late.imbalance.slow)) == ("DDPStrategy", 5, [1])
    assert list(late.steps) == list(range(1, 14)) and (late.samples == 2).all()
    assert named(late, "all_reduce").per_step >= 1, "what the module logs over all ranks is an exchange, too"
    assert named(buffers, "buffers").per_step == 1
    assert 0.8 * DELAY < medians(buffers, "straggler_wait")[1] < 1.5 * DELAY and medians(buffers, "compute")[1] < 0.5 * DELAY
    # a window of torch.profiler is in the trace and not in the report
    events = read_trace(tmp_path / "kineto" / "trace.json")
    assert any(event["args"]["name"].startswith("kineto: ") for event in events if event["name"] == "thread_name")
    assert "aten::linear" in {event["name"] for event in events}
    assert len([event for event in events if event["name"] == "step 8"]) == 2, "its steps are there on both ranks"
    windows = sorted(path.name for path in (tmp_path / "kineto" / "torch_profiler").iterdir())
    assert windows == ["rank_0.json.gz", "rank_1.json.gz"]
    header, *rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert [row for row in rows if row[header.index("freescale/bubble/fraction")]], "the last step is exchanged, and logged"


def test_one_device(tmp_path: Path) -> None:
    report = profiled(tmp_path, Plain(), devices=1, strategy="auto")
    assert report is not None and report.wait_attribution.aligned
    assert report.breakdown.shape[:2] == (13, 1) and not column(report.breakdown, "straggler_wait").any()
    assert read(tmp_path / "report.json")["status"]["complete"]
    assert problems(json.loads((tmp_path / "trace.json").read_text())) == []
    callback = profiler(tmp_path)
    after = fit(Plain(), [callback], devices=1, strategy="auto", limit_train_batches=0)
    assert "training_step" not in vars(after.strategy) and callback.report is None, "of a fit without a step"


class Uneventful(Plain):
    """A module whose steps take ``DELAY`` / 4, and whose start of training takes three ``DELAY``."""

    def on_train_start(self) -> None:
        time.sleep(3 * DELAY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(DELAY / 4)
        return self.layer(batch).square().mean()


class SlowToSave(L.Callback):
    """A checkpoint takes three ``DELAY``."""

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: Any) -> None:
        time.sleep(3 * DELAY)


@timing
def test_a_resumed_run_has_all_of_its_steps_and_no_spike(tmp_path: Path) -> None:
    """Resume inside an epoch, at its end, and with warm-up steps, which count from the resume."""
    options: dict[str, Any] = {"steps": 9, "limit_val_batches": 0}

    def resumed(at: int, warmup: int) -> BubbleReport:
        second, folder = profiler(tmp_path / f"{at} {warmup}", warmup_steps=warmup), tmp_path / f"step={at}.ckpt"
        fit(Uneventful(), [second], max_epochs=2 if at == 9 else 1, ckpt_path=str(folder), **options)
        return second.report

    def run() -> Any:
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        first = profiler(tmp_path / "first", warmup_steps=0)
        fit(Uneventful(), [first, saving, SlowToSave()], enable_checkpointing=True, **options)
        return first.report, {at: resumed(at, 0) for at in (3, 9)}, resumed(3, 2)

    first, reports, warmed_up = run_distributed(run, 2)[0]
    assert list(first.steps) == list(range(9)), "saving is no step"
    assert column(first.breakdown, "wall").max() < 2 * DELAY, "nor part of one"
    for at, report in reports.items():
        assert list(report.steps) == list(range(9 if at == 9 else 9 - at)), "the first step after the resume is there"
        assert (report.samples == 2).all()
        for name in ("wall", "host_overhead", "straggler_wait"):
            assert column(report.breakdown, name).max() < 2 * DELAY, (at, name)
        assert column(report.breakdown, "data_wait").max() < DELAY / 2, at
        assert column(report.breakdown, "unexplained").max() < 1e-6, at
    assert list(warmed_up.steps) == list(range(2, 6))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for argument in ("every_n_steps", "trace_steps", "torch_profiler_steps"):
        with pytest.raises(ValueError, match=rf"{argument}=-1"):
            BubbleProfiler(**{argument: -1})
    with pytest.raises(ValueError, match="BubbleProfilers"):
        fit(Plain(), [profiler(tmp_path), profiler(tmp_path)], devices=1, strategy="auto")
    own = PyTorchProfiler(dirpath=str(tmp_path))
    with pytest.raises(ValueError, match="torch_profiler_steps=2"):
        fit(Plain(), [profiler(tmp_path, torch_profiler_steps=2)], devices=1, strategy="auto", profiler=own)
    own.profiler = None  # whose finalizer fails where nothing was profiled


class Fails(Plain):
    """A module whose validation fails."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        raise ValueError("bad metric")


def test_a_folder_that_cannot_be_written_and_a_failure_after_the_fit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def run() -> list[bool]:
        original = dist.all_reduce
        with pytest.raises(OSError, match="dirpath="):
            fit(Plain(), [profiler(tmp_path / "file" / "bubbles")])
        found = [dist.all_reduce is original]
        # a failure after the fit leaves its report
        module, kept = Fails(), profiler(tmp_path / "kept")
        after = fit(module, [kept], limit_val_batches=0)
        after.limit_val_batches = 1
        with pytest.raises(ValueError, match="bad metric"):
            after.validate(module, DataLoader(torch.ones(4, 4), batch_size=2), verbose=False)
        return [*found, kept.report is not None]

    assert run_distributed(run, 2, timeout=60) == [[True, True], [True, False]]
    assert read(tmp_path / "kept" / "report.json")["status"]["complete"]
