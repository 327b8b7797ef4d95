"""Real steps of the reference model on two ranks, for ``calibration.py``: as drawn, by the analytic model, by the default."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import lightning as L
import numpy as np
import torch
from demo import COLUMNS, RATINGS, quiet
from hstu import CollateWithNegatives, HSTURecommender
from overhead import COST

from lightning_freescale import BubbleProfiler, FreeScaleDataModule
from lightning_freescale.balance import CostModel
from lightning_freescale.data import Histories, HistoryDataset, read_interactions
from lightning_freescale.profiling.analysis.breakdown import column
from lightning_freescale.profiling.recording.records import HostClock
from lightning_freescale.strategy.tuning.cost_calibrator import WINDOW, CostCalibrator
from lightning_freescale.testing import run_distributed

RANKS, BATCH, SAMPLES, ITEMS = 2, 16, 640, 10_000
TRAIN_TAKES_OFF = 3  # two items are held out, and the last remaining one has no next
FAMILIES: dict[str, Callable[[np.random.RandomState], Any]] = {
    "movielens": lambda draw: None,
    "short": lambda draw: draw.randint(3, 51, SAMPLES),
    "heavy-tail": lambda draw: np.clip(draw.lognormal(4, 1.2, SAMPLES), 3, 2000).astype(int),
}
VARIANTS: dict[str, Any] = {
    "floor": {"balance": False},  # histories of one length: the jitter of this machine
    "drawn": {"balance": False},
    "analytic": {"cost": CostModel()},
    "auto": {},
}


def measure(families: list[str], rounds: int, epochs: int, clock: str) -> dict[str, float]:
    """Train all variants in turns, and return medians over the rounds, without each fit's first epoch."""
    found = run_distributed(_rounds, RANKS, families, rounds, epochs, clock, timeout=3600)[0]
    figures: dict[str, float] = {}
    for family in families:
        runs = {variant: np.median([each[family, variant] for each in found], axis=0) for variant in VARIANTS}
        wait, floor = {name: float(row[2]) for name, row in runs.items()}, float(runs["floor"][2])
        predicted, measured, _, _, exchange, share = runs["auto"]
        from_data = {name: float(row[3]) for name, row in runs.items()}
        jitter = float(runs["floor"][1] - 1)
        figures |= {f"{family}_{name}_imbalance": float(row[1]) for name, row in runs.items() if name != "floor"}
        figures |= {f"{family}_exchange_ms": 1e3 * float(exchange), f"{family}_exchange_share": float(share)}
        figures |= {f"{family}_{name}_wait_ms": 1e3 * seconds for name, seconds in wait.items()}
        figures |= {f"{family}_{name}_data_wait_ms": 1e3 * seconds for name, seconds in from_data.items()}
        figures[f"{family}_predicted"], figures[f"{family}_jitter"] = float(predicted), jitter
        figures[f"{family}_apart"] = abs(float(measured - predicted))
        figures[f"{family}_apart_beyond_jitter"] = max(0.0, float(predicted - measured), float(measured - predicted) - jitter)
        for name in ("analytic", "auto"):
            figures[f"{family}_{name}_data_wait_left"] = from_data[name] / max(from_data["drawn"], 1e-9)
            figures[f"{family}_{name}_wait_left"] = max(0.0, wait[name] - floor) / max(wait["drawn"] - floor, floor / 10)
    return figures


def _rounds(families: list[str], rounds: int, epochs: int, clock: str) -> list[dict[tuple[str, str], list[float]]]:
    quiet()
    if clock == "cpu":  # of the computing thread, which has its own core
        HostClock.__init__ = lambda self: setattr(self, "stamp", time.thread_time)
    return [
        {(family, variant): _fit(family, variant, epochs, clock) for family in families for variant in VARIANTS}
        for _ in range(rounds)
    ]


def _fit(family: str, variant: str, epochs: int, clock: str) -> list[float]:
    """Return the measurements of rank 0 in one fit.

    Returns:
        Predicted and measured imbalance, the straggler wait in seconds per step, and the part of it that the report attributes
        to the data, all after the first epoch; processor seconds of an exchange of measured times, including its fit, and their
        share of the compute up to the last exchange.
    """
    histories = _histories(family)
    if variant == "floor":
        lengths = HistoryDataset(histories, np.flatnonzero(histories.lengths > TRAIN_TAKES_OFF), "train").lengths
        wanted = COST(lengths).mean()
        alike = int(np.abs(COST(np.arange(1, 3000)) - wanted).argmin()) + 1
        histories = _draw_histories(np.random.RandomState(0), np.full(len(lengths), alike))
    dataset = HistoryDataset(histories, np.flatnonzero(histories.lengths > TRAIN_TAKES_OFF), "train")
    data = FreeScaleDataModule(
        dataset,
        dataset.lengths,
        BATCH,
        collate_fn=CollateWithNegatives(histories.num_items),
        loss_reduction="target_mean",
        **VARIANTS[variant],
    )
    with tempfile.TemporaryDirectory() as folder:
        first_epoch = len(data.sampler(0, RANKS))
        profiler = BubbleProfiler(folder, verbose=False, trace_steps=0)
        profiler.options = replace(profiler.options, warmup_steps=first_epoch)
        torch.manual_seed(0)
        trainer = L.Trainer(
            strategy="freescale",
            accelerator="cpu",
            devices=RANKS,
            max_epochs=epochs,
            limit_val_batches=0,
            callbacks=[profiler],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        with _timed_exchanges() as spent:
            trainer.fit(HSTURecommender(num_items=histories.num_items), data)
    report = profiler.report
    if report is None:
        return []
    compute = column(report.breakdown, "compute")
    wait = float((compute.max(axis=1, keepdims=True) - compute).mean())
    if clock == "wall":
        wait = report.shares["straggler_wait"] * report.step_s
    steps = len(spent) * WINDOW
    share = sum(spent) / (steps * float(column(report.breakdown, "compute").mean())) if spent else 0.0
    data_wait = 0.0 if report.imbalance is None else report.imbalance.data
    mean = sum(spent) / max(len(spent), 1)
    return [report.predicted_imbalance or 1.0, report.compute_imbalance, wait, data_wait, mean, share]


@contextmanager
def _timed_exchanges() -> Iterator[list[float]]:
    """Record the processor seconds of each exchange of measured times on the training thread."""
    spent: list[float] = []
    exchange = CostCalibrator._exchange

    def timed(*arguments: Any) -> None:
        began = time.thread_time()
        exchange(*arguments)
        spent.append(time.thread_time() - began)

    CostCalibrator._exchange = timed
    try:
        yield spent
    finally:
        CostCalibrator._exchange = exchange


def _histories(family: str) -> Histories:
    draw = np.random.RandomState(0)
    lengths = FAMILIES[family](draw)
    return read_interactions(RATINGS, **COLUMNS) if lengths is None else _draw_histories(draw, lengths)


def _draw_histories(draw: np.random.RandomState, lengths: Any) -> Histories:
    """Draw histories whose training samples have these lengths; few items are popular."""
    offsets = np.append(0, np.cumsum(lengths + TRAIN_TAKES_OFF))
    items = (ITEMS * draw.rand(offsets[-1]) ** 3).astype(int)
    return Histories(items, np.arange(offsets[-1]) * 3600, offsets, np.arange(len(lengths)), np.arange(ITEMS))
