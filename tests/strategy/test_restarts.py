"""torchrun --max-restarts: a script whose ranks die goes on by itself, and ends as if none had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale.testing import _reserved_port

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_freescale import FreeScaleDataModule
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate

DEATHS = {deaths!r}  # attempt: rank and step

class Dies(Recommender):
    def training_step(self, batch, batch_idx):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if not self.losses and self.global_rank == 0:
            print("attempt", attempt, "begins at step", self.global_step, flush=True)
        if DEATHS.get(attempt) == (self.global_rank, self.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

L.seed_everything(0, verbose=False)
samples, module = Samples(64), Dies("adagrad")
module.dropout = 0.2
trainer = L.Trainer(
    strategy="freescale", accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=3, save_last=True)],
)
trainer.fit(module, FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate, balance=REPEATS), ckpt_path="last")
trainer.save_checkpoint("end.ckpt")
"""


def _torchrun(folder: Path, deaths: dict[int, tuple[int, int]], *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(deaths=deaths))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        *options,
        "train.py",
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def _end(folder: Path) -> list[torch.Tensor]:
    saved: dict[str, Any] = torch.load(folder / "end.ckpt", weights_only=True)
    states = [state for optimizer in saved["optimizer_states"] for state in optimizer["state"].values()]
    return [*saved["state_dict"].values(), *(value for state in states for value in state.values())]


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_ranks_that_die_are_started_again(tmp_path: Path, rendezvous: str) -> None:
    """Once before there is a checkpoint, then in both epochs; the end is that of a run that nobody died in, to the bit."""
    undisturbed = _torchrun(tmp_path / "undisturbed", {}, "--standalone")
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    with _reserved_port() as port:
        options = ("--standalone",) if rendezvous == "c10d" else ("--master-port", str(port))
        done = _torchrun(tmp_path / "dying", {0: (1, 1), 1: (0, 5), 2: (1, 12)}, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    begun = [line for line in done.stdout.splitlines() if line.startswith("attempt")]
    assert begun == [f"attempt {attempt} begins at step {step}" for attempt, step in enumerate([0, 0, 3, 12])]
    assert "there is no last checkpoint available" in done.stderr, "the first attempts say that they begin anew"
    ends = [_end(tmp_path / name) for name in ("undisturbed", "dying")]
    assert len(ends[0]) == len(ends[1]) > 6
    assert all(torch.equal(one, other) for one, other in zip(*ends))
