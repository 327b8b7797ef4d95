"""Each command as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale._version import __version__
from lightning_freescale.command_line.main import main

MODEL = """
from typing import Any

import lightning as L
import torch

class NextItem(L.LightningModule):
    def __init__(self, dim: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.items, self.head = torch.nn.Embedding(40, dim), torch.nn.Linear(dim, 40)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.items(batch["features"].values())), batch["target"])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch["target"])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
"""
CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, devices: 2, max_epochs: 1, logger: false, enable_progress_bar: false, enable_model_summary: false}
model: {class_path: shop.NextItem, init_args: {dim: 4}}
data:
  class_path: lightning_freescale.FreeScaleDataModule.from_interactions
  init_args: {source: visits.csv, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: a model, a config, a file of interactions."""
    (tmp_path / "shop.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG)
    rows = [(user, (user * 7 + time) % 40, time) for user in range(24) for time in range(5 + user % 9)]
    (tmp_path / "visits.csv").write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    return tmp_path


def _freescale(folder: Path, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_freescale", *map(str, words)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that exits with 2; returns what it says."""

    def run(*words: Any) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, words)])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_without_a_command_it_tells_which_there_are(capsys: pytest.CaptureFixture[str], fails: Callable[..., str]) -> None:
    main([])
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in ("fit", "validate", "test", "predict", "simulate", "balance", "profile"))
    main(["--version"])
    assert f"lightning-freescale {__version__}" in capsys.readouterr().out
    assert "did you mean 'simulate'?" in fails("simulat")
    assert "choose from fit, validate" in fails("xyz")


@pytest.mark.slow
def test_fit_and_test_from_a_config(folder: Path) -> None:
    """Two ranks with the package's strategy; the weights of the checkpoint load into the plain module."""
    keep = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=kept", "--trainer.callbacks.filename=last"]
    fitted = _freescale(folder, "fit", "--config", "config.yaml", *keep)
    assert fitted.returncode == 0, fitted.stderr[-3000:]
    assert "strategy 'freescale'" in fitted.stderr + fitted.stdout
    tested = _freescale(folder, "test", "--config", "config.yaml", "--ckpt_path", "kept/last.ckpt")
    assert tested.returncode == 0, tested.stderr[-3000:]
    assert "24.0" in tested.stdout, "every user once"
    taken = _freescale(folder, "consolidate", "kept/last.ckpt", "weights.pt")
    assert taken.returncode == 0 and "wrote 3 tensors" in taken.stdout, taken.stderr
    assert torch.load(folder / "weights.pt")["items.weight"].shape == (40, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("model:", "modell:", "did you mean 'model'?"),
        ("devices:", "devcies:", "did you mean 'devices'?"),
        ("dim: 4", "dimm: 4", "did you mean 'dim'?"),
        ("batch_size:", "batchsize:", "did you mean 'batch_size'?"),
        ("source:", "micro_batch: 2, source:", "did you mean 'micro_batches'?"),
    ],
)
def test_a_wrong_key_is_told_with_the_nearest(folder: Path, right: str, wrong: str, said: str) -> None:
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace(right, wrong, 1))
    refused = _freescale(folder, "fit", "--config", "config.yaml")
    assert refused.returncode == 2 and said in refused.stderr


def test_balance_writes_each_sample_of_an_epoch_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    lengths, plan = tmp_path / "lengths.txt", tmp_path / "plan.jsonl"
    lengths.write_text("\n".join(str(1 + 37 * n % 200) for n in range(48)))
    words = ["balance", "--lengths", str(lengths), "--ranks", "4", "--batch-size", "3", "--epochs", "2", "--plan", str(plan)]
    main(words)
    told = capsys.readouterr().out
    assert told.startswith("lengths.txt: 48 samples; lengths: mean ")
    assert "predicted, not measured: 4 ranks; cost 320 L + 1 L²; tokens: L" in told
    assert [told.count(f"\n{row}  ") for row in ("compute", "tokens ")] == [2, 2]
    assert "epoch 1: imbalance over 4 steps" in told and f"wrote {plan}" in told
    steps = [json.loads(line) for line in plan.read_text().splitlines()]
    for epoch in (0, 1):
        of_epoch = [step for step in steps if step["epoch"] == epoch]
        assert [step["step"] for step in of_epoch] == [0, 1, 2, 3]
        assert all(len(samples) == 3 for step in of_epoch for samples in step["ranks"])
        assert sorted(sample for step in of_epoch for samples in step["ranks"] for sample in samples) == list(range(48))
    assert "batch_size" in fails("balance", "--lengths", lengths, "--ranks", 4, "--batch-size", 0)


def test_balance_simulate_and_profile_are_the_modules_own(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["balance", "simulate", "--help"], "freescale balance simulate"),
        (["profile", "compare", "--help"], "freescale profile compare"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert f"usage: {said} " in capsys.readouterr().out


def test_consolidate_leaves_out_what_is_not_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    kept, weights = tmp_path / "a.ckpt", tmp_path / "weights.pt"
    torch.save({"state_dict": {"w": torch.arange(3.0)}, "optimizer_states": [1], "path": tmp_path}, kept)
    assert "--trust for the command line" in fails("consolidate", kept, weights)
    main(["consolidate", str(kept), str(weights), "--trust"])
    assert "wrote 1 tensors" in capsys.readouterr().out
    assert torch.load(weights).keys() == {"w"}
    assert "is there already" in fails("consolidate", kept, weights, "--trust")
    assert "is there already" not in fails("consolidate", tmp_path / "none.ckpt", weights)
    torch.save([1], tmp_path / "list.pt")
    assert "holds a list" in fails("consolidate", tmp_path / "list.pt", weights)
    torch.save({"w": 1}, tmp_path / "bare.pt")
    assert "and has no state_dict" in fails("consolidate", tmp_path / "bare.pt", weights)
    assert "has no freescale.json" in fails("consolidate", tmp_path, weights)
    (tmp_path / "cut.ckpt").write_bytes(kept.read_bytes()[:100])
    assert "is damaged or incomplete" in fails("consolidate", tmp_path / "cut.ckpt", weights)
