"""The reference model overlaps by default, and every example trains from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import demo
from hstu import CollateWithNegatives, HSTURecommender

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import trainer
from tests.helpers.reports import full_report

pytestmark = pytest.mark.slow

ITEMS, USERS, BATCH = 40, 32, 4
STEPS = USERS // (2 * BATCH)


def _data(**options: Any) -> FreeScaleDataModule:
    draw, rows = np.random.RandomState(0), []
    for user in range(USERS):
        rows += [(user, int(item), time) for time, item in enumerate(draw.permutation(ITEMS)[: draw.randint(5, 20)])]
    table = pa.table(dict(zip(("user", "item", "time"), zip(*rows))))
    data = FreeScaleDataModule.from_interactions(table, batch_size=BATCH, **options)
    data.collate_fn = CollateWithNegatives(data.histories.num_items, negatives=8)
    return data


class Recording(HSTURecommender):
    def __init__(self, num_items: int) -> None:
        super().__init__(num_items, dim=8, layers=1)
        self.losses: list[float] = []
        self.looked_ahead: tuple[float, ...] = ()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def on_train_end(self) -> None:
        if (engine := self.trainer.strategy.engine) is not None:
            counts, names = engine.statistics(), ("predicted", "unpredicted", "mispredicted")
            self.looked_ahead = tuple(counts[f"{name}_lookups"] for name in names)


def _fit(strategy: FreeScaleStrategy, **options: Any) -> Recording:
    L.seed_everything(0, verbose=False)
    data = _data(**options)
    model = Recording(data.histories.num_items)
    trainer(devices=2, max_epochs=2, strategy=strategy, limit_val_batches=0).fit(model, data)
    return model


def _all() -> dict[str, Any]:
    overlapped = _fit(FreeScaleStrategy(dedup=False))
    return {
        "overlapped": overlapped.losses,
        "looked_ahead": overlapped.looked_ahead,
        "plain": _fit(FreeScaleStrategy(overlap="torchrec")).losses,
        "with workers": _fit(FreeScaleStrategy(dedup=False), num_workers=2).losses,
    }


def test_the_reference_model_overlaps_with_the_defaults_and_draws_the_same_every_time() -> None:
    for run in run_distributed(_all, 2):
        assert len(set(run["overlapped"])) == 2 * STEPS and run["looked_ahead"] == (2 * STEPS - 2 - 1, 2 + 1, 0)
        assert run["plain"] == run["with workers"] == run["overlapped"]
    data = _data()
    ids = data.collate_fn([data.train.dataset[0], data.train.dataset[1]])["ids"]
    assert ids.keys() == ["item", "target", "negative"] and ids["negative"].lengths().tolist() == [8, 0]
    assert "ids" not in data.collate_fn([data.val_dataset[0], data.val_dataset[1]]), "negatives are for training alone"


def _run(folder: Path, script: str, *options: str) -> str:
    """Run an example in two processes that the Trainer starts, and return its output."""
    command = [sys.executable, Path(__file__).parents[1] / "examples" / script, *options]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.parametrize(
    ("script", "options", "metric", "between"),
    [
        ("parquet.py", "--users 480", "HR@10", (0.05, 1)),
        ("side_features.py", "--samples 4000 --epochs 3", "AUROC", (0.65, 1)),
        ("compressed_history.py", "--users 400 --epochs 1", "better", (0.8, 1)),
        ("language_model_tokens.py", "--documents 640 --split-backward", "perplexity", (1, 160)),
        ("zero_collision.py", "--samples 8000 --epochs 2", "AUROC", (0.7, 1)),
    ],
)
def test_an_example_learns(tmp_path: Path, script: str, options: str, metric: str, between: Any) -> None:
    """Check a metric that is not ``between`` for models that learn nothing or only frequencies."""
    printed, (least, most) = _run(tmp_path, script, *options.split()), between
    assert least < float(re.findall(rf"^{metric}: ([\d.]+)$", printed, re.MULTILINE)[-1]) <= most


@pytest.mark.parametrize("loss", ["bce", "ce"])
def test_sasrec_trains_with_each_loss(tmp_path: Path, loss: str) -> None:
    printed = _run(tmp_path, "sasrec.py", "--epochs", "1", "--max-length", "50", "--loss", loss)
    assert len(re.findall(r"recommended to the first user, by the file's ids: \[(.*)\]", printed)[0].split(", ")) == 10
    assert "embedding exchange" in (tmp_path / "bubbles" / "report.json").read_text(), "the table is sharded"


def test_served_recommendations_equal_those_of_training(tmp_path: Path) -> None:
    printed = _run(tmp_path, "serve.py", "--users", "2")
    trained = re.findall(r"recommended to the first user, by the file's ids: \[(.*)\]", printed)[0].split(", ")
    served = {user: re.findall(r"(\d+) \(", found) for user, found in re.findall(r"^user (\d+): (.*)$", printed, re.MULTILINE)}
    assert served["1"] == trained[:5] and set(served) == {"1", "2"} and served["2"] != served["1"]
    again = _run(tmp_path, "serve.py", "--users", "2", "--checkpoint", "served.ckpt")
    assert again.splitlines()[-2:] == printed.splitlines()[-2:]


def test_the_table_of_the_demo_is_printed() -> None:
    names = ("plain", "+ balance", "+ overlap", "+ split backward")
    text = demo._table({name: {"report": full_report(), "scores": {"test_NDCG@10": 0.0123}} for name in names}, 2)
    assert "0.0123" in text and "no assignment gets below" in text and "in all 0% of a bubble of 30.0% is removed" in text
