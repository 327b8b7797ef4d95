"""A fit on two nodes tells callbacks, loggers, the profiler and its user which rows are hot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_freescale import BubbleProfiler, FreeScaleStrategy
from lightning_freescale.profiling.reporting.document import read
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import Recommender, fixed_loader, trainer

STEPS, TABLES = 12, ["net.embeddings.embeddings.item", "net.embeddings.embeddings.cat"]
Told = tuple[int, str, list[int], list[float]]


class Tells(L.Callback):
    def __init__(self) -> None:
        self.told: list[Told] = []
        self.asked: list[dict[str, tuple[Tensor, Tensor]]] = []

    def on_hot_rows_changed(self, trainer: L.Trainer, module: Any, table: str, rows: Tensor, counts: Tensor) -> None:
        assert isinstance(module, Recommender) and trainer.lightning_module is module
        self.told.append((trainer.global_step, table, rows.tolist(), counts.tolist()))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.asked.append(trainer.strategy.hot_rows())


def _fit(folder: Path, hot_rows: Any) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    tells, profiler = Tells(), BubbleProfiler(folder / "bubbles", every_n_steps=4, verbose=True)
    strategy = FreeScaleStrategy(hot_rows=hot_rows, **({"rerank_every_n_steps": 4} if hot_rows else {}))
    options = {"devices": 2, "num_nodes": 2, "max_epochs": 1, "log_every_n_steps": 4, "logger": CSVLogger(folder)}
    fitting = trainer(strategy=strategy, callbacks=[tells, profiler], **options)
    fitting.fit(Recommender(), fixed_loader(rank, STEPS))
    report, files = strategy.overlap_report, profiler.files
    assert strategy.hot_rows() == {}, "outside of a run"
    logged = (Path(fitting.logger.log_dir) / "metrics.csv").read_text() if rank == 0 else ""
    document = read(files["report"])["heat"] if rank == 0 else None
    return {
        "told": tells.told,
        "asked": [{name: [each.tolist() for each in pair] for name, pair in asked.items()} for asked in tells.asked],
        "heat": None if report is None or report.heat is None else vars(report.heat),
        "logged": logged.splitlines()[:1],
        "document": document,
    }


def test_hot_rows_reach_callbacks_loggers_and_reports(tmp_path: Path) -> None:
    ranks = run_distributed(_fit, 4, tmp_path, 0.5)
    told = ranks[0]["told"]
    assert [(step, table) for step, table, *_ in told] == [(step, table) for step in (2, 4, 8) for table in TABLES]
    for other in ranks[1:]:
        assert other["told"] == told, "in the same step of every rank"
    assert all(len(rows) == len(counts) > 0 and min(counts) >= 1 for _, _, rows, counts in told)
    asked = ranks[0]["asked"]
    assert asked[0] == {table: [[], []] for table in TABLES}
    assert asked[5] == {table: [rows, counts] for step, table, rows, counts in told if step == 4}
    heat = ranks[0]["heat"]
    assert heat["rows"] == sum(len(rows) for step, _, rows, _ in told if step == 8)
    assert 0 < heat["rows_of_half"] < heat["rows_of_most"] <= 63 and heat["largest_load"] >= 1
    assert 0 < heat["hot_far_bytes"] <= heat["hot_direct_bytes"] and heat["hot_near_bytes"] > 0
    assert ranks[0]["document"].keys() == heat.keys() and ranks[0]["document"]["rows"] == heat["rows"]
    (header,) = ranks[0]["logged"]
    assert {f"freescale/heat/{name}" for name in heat} <= set(header.split(","))


def test_without_hot_rows_nothing_is_told(tmp_path: Path) -> None:
    for found in run_distributed(_fit, 4, tmp_path, 0):
        assert found["told"] == [] and found["heat"] is None and found["document"] is None
        assert found["asked"] == [{}] * STEPS
        assert not any("freescale/heat" in line for line in found["logged"])
