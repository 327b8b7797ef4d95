"""The reference model: its ids stand in its batches, so it overlaps with the defaults."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
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
from lightning_freescale.profiling.analysis.planned import PlannedBalance
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import trainer
from tests.helpers.reports import report_of, step

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
    checkpoint = tmp_path / "model.ckpt"
    printed = _run(tmp_path, script, "--epochs", "1", "--out", checkpoint, *options)
    assert said in printed and checkpoint.exists() and "embedding exchange:" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "metric", "between", "said"),
    [
        ("parquet.py", ["--users", "480"], "HR@10", (0.05, 1), "held at once: at most 4 of 24 row groups"),
        ("side_features.py", ["--samples", "4000", "--epochs", "3"], "AUROC", (0.65, 1), "embedding exchange:"),
        ("compressed_history.py", ["--users", "400", "--epochs", "1"], "better", (0.8, 1), "of the compressed model: 1.00"),
        ("language_model_tokens.py", ["--documents", "640", "--split-backward"], "perplexity", (1, 160), "collision rate"),
        ("zero_collision.py", ["--samples", "8000", "--epochs", "2"], "AUROC", (0.7, 1), "2 ranks"),
    ],
)
def test_an_example_learns(tmp_path: Path, script: str, options: list[str], metric: str, between: Any, said: str) -> None:
    """What has learned nothing, or only how frequent each token is, is not ``between``."""
    printed = _run(tmp_path, script, *options)
    assert said in printed
    least, most = between
    assert least < float(re.findall(rf"^{metric}: ([\d.]+)$", printed, re.MULTILINE)[-1]) <= most


@pytest.mark.slow
def test_what_is_served_is_what_was_trained(tmp_path: Path) -> None:
    printed = _run(tmp_path, "serve.py", "--users", "2")
    trained = re.findall(r"recommended to the first user, by the file's ids: \[(.*)\]", printed)[0].split(", ")
    served = {user: re.findall(r"(\d+) \(", found) for user, found in re.findall(r"^user (\d+): (.*)$", printed, re.MULTILINE)}
    assert served["1"] == trained[:5] and set(served) == {"1", "2"} and served["2"] != served["1"]
    again = _run(tmp_path, "serve.py", "--users", "2", "--checkpoint", "served.ckpt")
    assert "embedding exchange" not in again and again.splitlines()[-2:] == printed.splitlines()[-2:]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it trains on a GPU")
def test_multi_probe_hashing_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    said = _run(tmp_path, "zero_collision.py", "--map", "mpzch", fails=True)
    assert "uses HashZchManagedCollisionModule" in said and "use a GPU, or MCHManagedCollisionModule" in said


def _run(folder: Path, script: str, *options: str | Path, fails: bool = False) -> str:
    """As a user does: two processes that the Trainer starts. Returns what is printed, or if it fails the error."""
    command = [sys.executable, Path(__file__).parents[1] / "examples" / script, *options]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (found.returncode != 0) == fails, found.stderr[-2000:]
    return found.stderr if fails else found.stdout


def _report_of(plan: PlannedBalance) -> Any:
    return report_of(np.array([[step(0.1, forward=0.05)] * 2] * 3), np.full((3, 2), 16), balance=plan)


def test_the_demo_predicts_what_its_page_does_and_says_by_which_costs() -> None:
    drawn = PlannedBalance(1.4, None, 1.1, None, None, None, None, 0, 3)
    balanced = PlannedBalance(1.3, 1.05, 1.04, 0.01, None, None, None, 2, 3)
    runs = {
        name: {"report": _report_of(plan), "scores": {"test_NDCG@10": 0.0}}
        for name, plan in zip(demo.RUNGS, (drawn, balanced, balanced, balanced))
    }
    lines = demo._table(runs, 2).splitlines()
    shown = runs["+ balance"]["report"].document()["balance"]["compute"]
    (at,) = [k for k, line in enumerate(lines) if line.startswith("imbalance of compute")]
    assert f"predicted {shown['as_drawn']:.3f} as drawn, {shown['balanced']:.3f} balanced" in lines[at]
    assert f"below {shown['lower_bound']:.3f}" in lines[at + 1]
    assert "by the costs as given in 1 step, fitted to measured times in 2" in lines[at + 1]


def test_the_demo_refuses_too_few_steps_for_a_report() -> None:
    options = SimpleNamespace(epochs=1, batch_size=128, devices=1)
    with pytest.raises(SystemExit, match=r"--epochs 1 --batch-size 128 .*5 steps.*smaller --batch-size"):
        demo._refuse_too_few_steps(options, 5, 5)
    demo._refuse_too_few_steps(options, 6, 5)


def test_the_demo_has_a_row_for_each_technique_and_says_where_one_brings_nothing() -> None:
    plan = PlannedBalance(1.3, 1.05, 1.04, 0.01, None, None, None, 0, 3)
    computes = dict(zip(demo.RUNGS, (0.05, 0.08, 0.0801, 0.09)))
    runs = {
        name: {
            "report": report_of(np.array([[step(0.1, forward=c, transfer=0.01)] * 2] * 3), np.full((3, 2), 16), balance=plan),
            "scores": {"test_NDCG@10": 0.0},
        }
        for name, c in computes.items()
    }
    lines = demo._table(runs, 2).splitlines()
    rows = {name: next(line for line in lines if line.startswith(f"{name:<18}")).split() for name in demo.RUNGS}
    assert [row[-2] for row in rows.values()] == ["1.00x", "1.60x", "1.60x", "1.80x"]
    assert [line for line in lines if "brings nothing" in line] == [
        "+ overlap brings nothing here: transfer was 10.0% of the time before it"
    ]
    assert lines[-1] == "in all 80% of a bubble of 50.0% is removed: 1.80x at equal compute of at most 2.00x"
