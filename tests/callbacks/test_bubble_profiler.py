"""Delays put into a run must come back out of the profiler, as what they are and on the rank they were put."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loggers import CSVLogger

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale._lightning.stages import ObservedLoader
from lightning_freescale.profiling.analysis.breakdown import ADDENDS, PART_NAMES, column
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.testing import run_distributed
from tests.helpers.chrome_trace import problems, read_trace
from tests.helpers.recommender import Recommender, Samples, collate, trainer
from tests.helpers.shown_page import packed

DELAY = 0.2
STEPS = 12


class SlowSamples(Samples):
    """A data set that one rank reads slowly, once per batch."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "delay": 0.0}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if os.environ["RANK"] == "0":
            time.sleep(DELAY)
        return [self[index] for index in indices]


class SlowForward(Recommender):
    """A module whose forward takes longer on rank 1."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(DELAY)
        return super().training_step(batch, batch_idx)


class SlowHook(Recommender):
    """A module with a slow hook between the batches' computations, on both ranks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(DELAY)


class SlowValidation(Recommender):
    """A module whose validation is slow."""

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        time.sleep(DELAY)


def _profile(module_class: type[Recommender], data_class: type[Samples], folder: str, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, data = module_class("adagrad"), data_class(8 * STEPS)
    profiler = BubbleProfiler(every_n_steps=4, warmup_steps=2, verbose=False)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, val_dataset=Samples(8))
    logger = CSVLogger(folder)
    fit = trainer(devices=2, callbacks=[profiler], logger=logger, log_every_n_steps=1, **options)
    fit.fit(module, loader)
    assert (profiler.report is None) == (not fit.is_global_zero)
    if profiler.report is None:
        return {}
    return {
        "breakdown": profiler.report.breakdown,
        "steps": profiler.report.steps,
        "samples": profiler.report.samples,
        "text": str(profiler.report),
        "imbalance": profiler.report.imbalance,
        "what_if": {case.name: case.speed_up for case in profiler.report.what_if},
        "exchanges": {figures.name: figures for figures in profiler.report.exchanges},
        "files": profiler.files,
        "metrics": Path(logger.log_dir, "metrics.csv").read_text(),
    }


def _median(result: dict[str, Any], rank: int) -> dict[str, float]:
    """All parts that add up, the three of compute as one."""
    parts = np.median(result["breakdown"][:, rank], axis=0)
    others = {name: parts[PART_NAMES.index(name)] for name in ADDENDS if name not in ("forward", "backward", "optimizer")}
    return {"wall": parts[0], "compute": float(np.median(column(result["breakdown"][:, rank], "compute"))), **others}


Profiled = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """What rank 0 knows after a run of a module on data; one run of each pair for all tests."""

    @cache
    def run(module: type[Recommender], data: type[Samples]) -> dict[str, Any]:
        return run_distributed(_profile, 2, module, data, str(tmp_path_factory.mktemp("profiled")))[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "data", "found"),
    [
        (Recommender, SlowSamples, {0: "data_wait", 1: "straggler_wait"}),
        (SlowForward, Samples, {0: "straggler_wait", 1: "compute"}),
        (SlowHook, Samples, {0: "host_overhead", 1: "host_overhead"}),
    ],
)
def test_delay_comes_back(module: type, data: type, found: dict[int, str], profiled: Profiled) -> None:
    result = profiled(module, data)
    for rank, part in found.items():
        parts = _median(result, rank)
        assert 0.8 * DELAY < parts.pop(part) < 1.5 * DELAY
        assert parts.pop("wall") > DELAY
        assert max(parts.values()) < 0.5 * DELAY, parts


def test_no_data_wait_is_worth_what_the_loader_takes(profiled: Profiled) -> None:
    """Also where the rows of a step are on their way while the rank waits for its data."""
    assert profiled(Recommender, SlowSamples)["what_if"]["no data wait"] > 3
    assert profiled(SlowForward, Samples)["what_if"]["no data wait"] < 1.2


def test_a_slow_rank_is_named_and_data_are_not_blamed(profiled: Profiled) -> None:
    imbalance = profiled(SlowForward, Samples)["imbalance"]
    assert imbalance.method == "cost model", "the data module knows the lengths"
    assert list(imbalance.slow) == [1]
    assert imbalance.hardware > 0.3 * DELAY > abs(imbalance.data)


def test_parts_sum_to_wall_time_and_are_reported(profiled: Profiled) -> None:
    result = profiled(Recommender, Samples)
    parts = result["breakdown"]
    assert parts.shape == (STEPS - 2, 2, len(PART_NAMES))
    added = sum(column(parts, name) for name in ADDENDS)
    np.testing.assert_allclose(added, parts[:, :, 0], rtol=1e-9)
    assert np.abs(column(parts, "unexplained")).max() < 1e-6, "nothing is left unexplained"
    assert (parts > -1e-9).all()
    assert (column(parts, "transfer") > 0).all(), "every step exchanges something"
    assert (result["samples"] == 4).all()
    assert "rank 1" in result["text"]
    for name in ("fraction", "straggler_wait", "forward", "hidden", "samples_per_s", "step_s"):
        assert f"freescale/bubble/{name}" in result["metrics"].splitlines()[0].split(",")
    assert {"embedding rows", "dense gradients"} <= set(result["exchanges"])
    assert any("background" in name for name in result["exchanges"]), "the lane's exchanges run behind compute"


def test_the_files_are_there_and_readable(profiled: Profiled) -> None:
    files = profiled(Recommender, Samples)["files"]
    assert {name: path.name for name, path in files.items()} == {
        "report": "report.json", "page": "report.html", "trace": "trace.json",
    }  # fmt: skip
    assert {path.parent.name for path in files.values()} == {"bubbles"}
    document = read(files["report"])
    assert document["status"]["complete"]
    assert document["run"]["world_size"] == len(document["ranks"]) == 2
    assert document["median_step"] is not None
    assert {case["name"] for case in document["what_if"]} >= {
        "perfect balance",
        "full overlap",
        "balance + overlap",
        "no contention",
    }
    assert problems(json.loads(files["trace"].read_text())) == []
    events = read_trace(files["trace"])
    assert {"forward", "backward", "optimizer", "fetch", "embedding rows"} <= {event.get("name") for event in events}
    assert packed(files["page"])[0][0]["run"] == document["run"]


@pytest.mark.slow
def test_validation_is_not_part_of_a_step(tmp_path: Path) -> None:
    result = run_distributed(_profile, 2, SlowValidation, Samples, str(tmp_path), val_check_interval=3)[0]
    wall, after = result["breakdown"][:, :, 0], np.isin(result["steps"], (3, 6, 9))  # it comes after every third step
    assert after.sum() == 3
    # the median, as a single step may be slow for reasons of the machine
    assert np.median(wall[after]) < np.median(wall[~after]) + DELAY / 2


def _losses() -> list[float]:
    torch.manual_seed(0)
    module, data = Recommender("adagrad"), Samples(8 * STEPS)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate)
    trainer(devices=3).fit(module, loader)
    return module.losses


def _profiled_losses(folder: str) -> list[float]:
    torch.manual_seed(0)
    module, data = Recommender("adagrad"), Samples(8 * STEPS)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate)
    trainer(devices=3, callbacks=[BubbleProfiler(folder, verbose=False, every_n_steps=3, torch_profiler_steps=2)]).fit(
        module, loader
    )
    return module.losses


def test_profiling_does_not_change_the_numbers(tmp_path: Path) -> None:
    assert run_distributed(_profiled_losses, 3, str(tmp_path)) == run_distributed(_losses, 3)


@pytest.mark.parametrize("argument", ["every_n_steps", "max_steps", "warmup_steps", "trace_steps", "torch_profiler_steps"])
def test_bad_argument(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}=-1"):
        BubbleProfiler(**{argument: -1})


def _resumed_report(path: str) -> int:
    data, steps = Samples(8 * STEPS), []
    for stop, ckpt in ((3, None), (STEPS, path)):
        profiler = BubbleProfiler(f"{path}.bubbles", verbose=False, warmup_steps=1, trace_steps=0)
        fit = trainer(devices=2, max_steps=stop, callbacks=[profiler, _Save(path)])
        fit.fit(Recommender(), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate), ckpt_path=ckpt)
        steps.append(0 if profiler.report is None else len(profiler.report.breakdown))
    return steps[1]


class _Save(L.Callback):
    """Saves in the middle of the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
def test_profiles_a_run_that_resumed_inside_an_epoch(tmp_path: Path) -> None:
    assert run_distributed(_resumed_report, 2, str(tmp_path / "x.ckpt"))[0] >= STEPS - 3 - 2


class Stateful:
    """A loader with a state of its own."""

    worker_init_fn: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {"at": 2}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def test_the_observed_loader_looks_like_the_loader() -> None:
    loader = Stateful()
    observed = ObservedLoader(loader, Timeline())
    observed.worker_init_fn = print
    assert loader.worker_init_fn is print
    assert isinstance(observed, _Stateful)
    observed.load_state_dict(observed.state_dict())
    assert loader.loaded == {"at": 2}
    assert list(observed) == [0, 1, 2]
    assert not hasattr(ObservedLoader([1], Timeline()), "state_dict")
