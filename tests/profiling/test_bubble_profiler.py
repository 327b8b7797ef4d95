"""Delays put into a run must come back out of the profiler, as what they are and on the rank they were put."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loggers import CSVLogger

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.profiling.attribution import PART_NAMES
from lightning_freescale.profiling.loader import ObservedLoader
from lightning_freescale.profiling.timeline import Timeline
from lightning_freescale.testing import run_distributed
from tests.recommender import Recommender, Samples, collate, trainer

DELAY = 0.1
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
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, validate=Samples(8))
    logger = CSVLogger(folder)
    fit = trainer(devices=2, callbacks=[profiler], logger=logger, log_every_n_steps=1, **options)
    fit.fit(module, loader)
    assert profiler.report is not None
    return {
        "parts": profiler.report.parts,
        "samples": profiler.report.samples,
        "text": str(profiler.report),
        "trace": str(profiler.trace),
        "metrics": Path(logger.log_dir, "metrics.csv").read_text() if fit.is_global_zero else "",
        "losses": module.losses,
    }


def _median(result: dict[str, Any], rank: int) -> dict[str, float]:
    return dict(zip(PART_NAMES, np.median(result["parts"][:, rank], axis=0)))


@pytest.mark.parametrize(
    ("module", "data", "found"),
    [
        (Recommender, SlowSamples, {0: "data_wait", 1: "straggler_wait"}),
        (SlowForward, Samples, {0: "straggler_wait", 1: "compute"}),
        (SlowHook, Samples, {0: "host_overhead", 1: "host_overhead"}),
    ],
)
def test_delay_comes_back(module: type, data: type, found: dict[int, str], tmp_path: Path) -> None:
    result = run_distributed(_profile, 2, module, data, str(tmp_path))[0]
    for rank, part in found.items():
        parts = _median(result, rank)
        assert 0.8 * DELAY < parts.pop(part) < 1.5 * DELAY
        assert parts.pop("wall") > DELAY
        assert max(parts.values()) < 0.5 * DELAY, parts


def test_parts_sum_to_wall_time_and_are_reported(tmp_path: Path) -> None:
    results = run_distributed(_profile, 2, Recommender, Samples, str(tmp_path))
    parts = results[0]["parts"]
    assert parts.shape == (STEPS - 2, 2, len(PART_NAMES))
    np.testing.assert_allclose(parts[:, :, 1:].sum(axis=2), parts[:, :, 0], rtol=1e-9)
    assert np.abs(parts[:, :, -1]).max() < 1e-6, "nothing is left unexplained"
    assert (parts[:, :, :-1] >= 0).all()
    assert (parts[:, :, PART_NAMES.index("transfer")] > 0).all(), "every step exchanges something"
    np.testing.assert_array_equal(parts, results[1]["parts"])
    assert (results[0]["samples"] == 4).all()
    assert "rank 1" in results[0]["text"]
    assert "freescale/bubble" in results[0]["metrics"]
    assert "freescale/straggler_wait" in results[0]["metrics"]
    events = json.loads(Path(results[0]["trace"]).read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"forward", "backward", "optimizer", "fetch", "wait: embedding rows"} <= {e["name"] for e in events}


def test_validation_is_not_part_of_a_step(tmp_path: Path) -> None:
    result = run_distributed(_profile, 2, SlowValidation, Samples, str(tmp_path), val_check_interval=3)[0]
    assert result["parts"][:, :, 0].max() < DELAY


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
    trainer(devices=3, callbacks=[BubbleProfiler(verbose=False, trace_path=f"{folder}/t.json")]).fit(module, loader)
    return module.losses


def test_profiling_does_not_change_the_numbers(tmp_path: Path) -> None:
    assert run_distributed(_profiled_losses, 3, str(tmp_path)) == run_distributed(_losses, 3)


def test_needs_the_strategy() -> None:
    with pytest.raises(ValueError, match="strategy='freescale'"):
        L.Trainer(strategy="auto", accelerator="cpu", callbacks=[BubbleProfiler()], logger=False).fit(
            Recommender(), [{"features": None}]
        )


@pytest.mark.parametrize("argument", ["every_n_steps", "keep_steps", "warmup_steps", "trace_steps"])
def test_bad_argument(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}=-1"):
        BubbleProfiler(**{argument: -1})


def _resumed_report(path: str) -> int:
    data, steps = Samples(8 * STEPS), []
    for stop, ckpt in ((3, None), (STEPS, path)):
        profiler = BubbleProfiler(verbose=False, warmup_steps=1, trace_steps=0)
        fit = trainer(devices=2, max_steps=stop, callbacks=[profiler, _Save(path)])
        fit.fit(Recommender(), FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate), ckpt_path=ckpt)
        steps.append(0 if profiler.report is None else len(profiler.report.parts))
    return steps[1]


class _Save(L.Callback):
    """Saves in the middle of the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


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
