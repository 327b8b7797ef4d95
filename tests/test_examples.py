"""The reference model: its ids stand in its batches, so it overlaps with the defaults."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from hstu import CollateWithNegatives, HSTURecommender

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import trainer

ITEMS, USERS, BATCH = 40, 32, 4
STEPS = USERS // (2 * BATCH)


def _interactions() -> pa.Table:
    draw, rows = np.random.RandomState(0), []
    for user in range(USERS):
        rows += [(user, int(item), time) for time, item in enumerate(draw.permutation(ITEMS)[: draw.randint(5, 20)])]
    return pa.table(dict(zip(("user", "item", "time"), zip(*rows))))


def _data(**options: Any) -> FreeScaleDataModule:
    data = FreeScaleDataModule.from_interactions(_interactions(), batch_size=BATCH, **options)
    data.collate_fn = CollateWithNegatives(data.histories.num_items, negatives=8)
    return data


class Recording(HSTURecommender):
    """Keeps its losses, the batches of its steps, and what the engine has counted."""

    def __init__(self, num_items: int) -> None:
        super().__init__(num_items, dim=8, layers=1)
        self.losses: list[float] = []
        self.looked_ahead = (0.0, 0.0, 0.0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def on_train_end(self) -> None:
        controller = self.trainer.strategy.overlap_controller
        if controller is not None:
            counts = controller.engine.statistics()
            names = ("predicted_lookups", "unpredicted_lookups", "mispredicted_lookups")
            self.looked_ahead = tuple(counts[name] for name in names)


def _fit(strategy: FreeScaleStrategy, ckpt_path: Any = None, callbacks: Any = None, **options: Any) -> Recording:
    L.seed_everything(0, verbose=False)
    data = _data(**options)
    model = Recording(data.histories.num_items)
    saving = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks)}
    run = trainer(devices=2, max_epochs=2, strategy=strategy, limit_val_batches=0, **saving)
    run.fit(model, data, ckpt_path=ckpt_path)
    return model


def _both(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saving = L.pytorch.callbacks.ModelCheckpoint(path, every_n_train_steps=STEPS + 2, save_top_k=-1, filename="{step}")
        overlapped = _fit(FreeScaleStrategy(dedup=False), callbacks=[saving])
    told = [str(one.message) for one in caught if "overlapped" in str(one.message)]
    return {
        "overlapped": overlapped.losses,
        "looked_ahead": overlapped.looked_ahead,
        "told": told,
        "plain": _fit(FreeScaleStrategy(overlap=False)).losses,
        "with workers": _fit(FreeScaleStrategy(dedup=False), num_workers=2).losses,
        "resumed": _fit(FreeScaleStrategy(dedup=False), ckpt_path=path / f"step={STEPS + 2}.ckpt").losses,
    }


def test_the_reference_model_overlaps_with_the_defaults_and_draws_the_same_every_time(tmp_path: Path) -> None:
    for run in run_distributed(_both, 2, tmp_path):
        assert len(set(run["overlapped"])) == 2 * STEPS
        assert run["looked_ahead"] == (2 * STEPS - 2 - 1, 2 + 1, 0) and run["told"] == []
        assert run["plain"] == run["with workers"] == run["overlapped"]
        assert run["resumed"] == run["overlapped"][STEPS + 2 :]


def test_negatives_are_drawn_for_training_alone() -> None:
    data = _data()
    collate, train = data.collate_fn, data.train.dataset
    samples = [train[0], train[1]]
    ids = collate(samples)["ids"]
    assert ids.keys() == ["item", "target", "negative"]
    assert torch.equal(ids["item"].values(), collate(samples)["features"].values())
    assert torch.equal(ids["target"].values(), collate(samples)["target"])
    assert ids["negative"].lengths().tolist() == [8, 0]
    assert torch.equal(ids["negative"].values(), collate(samples)["ids"]["negative"].values())
    assert not torch.equal(ids["negative"].values(), collate(samples[:1])["ids"]["negative"].values())
    assert "ids" not in collate([data.val_dataset[0], data.val_dataset[1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("sasrec.py", ["--max-length", "20"], "recommended to the first user"),
        ("dlrm.py", ["--samples", "800"], "the plain module rates"),
    ],
)
def test_an_example_trains_and_serves(tmp_path: Path, script: str, options: list[str], said: str) -> None:
    """As a user runs it: two processes that the Trainer starts."""
    checkpoint = tmp_path / "model.ckpt"
    command = [sys.executable, Path(__file__).parents[1] / "examples" / script, "--epochs", "1", "--out", checkpoint, *options]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert said in found.stdout and checkpoint.exists() and "embedding exchange:" in found.stdout
