"""What Lightning does under SLURM, with the variables that srun sets: no cluster is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale.testing import _reserved_port

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
import lightning as L
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning_freescale import FreeScaleDataModule
from tests.helpers.recommender import Recommender, Samples, collate

class Slow(Recommender):
    def training_step(self, batch, batch_idx):
        Path(f"at{self.global_rank}").write_text(str(self.global_step))
        if not self.losses:
            print("begins at step", self.global_step, flush=True)
        time.sleep(float(sys.argv[1]))
        return super().training_step(batch, batch_idx)

L.seed_everything(0, verbose=False)
samples, module = Samples(320), Slow("adagrad")
module.dropout = 0.2
trainer = L.Trainer(
    strategy="freescale", accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_progress_bar=False,
    enable_model_summary=False, plugins=[SLURMEnvironment(auto_requeue=False)],
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=3, save_last=True)],
)
trainer.fit(module, FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate), ckpt_path="last")
trainer.save_checkpoint(sys.argv[2])
"""


def _srun(folder: Path, port: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start two tasks of a job, on one node."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "at1").unlink(missing_ok=True)
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    common |= {"SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    common |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "train.py", *arguments],
            cwd=folder,
            env=os.environ | common | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in range(2)
    ]


def _ended(tasks: list[subprocess.Popen[str]]) -> list[str]:
    """Return what they have printed."""
    try:
        return [task.communicate(timeout=120)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()


def _end(path: Path) -> list[torch.Tensor]:
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    states = [state for optimizer in saved["optimizer_states"] for state in optimizer["state"].values()]
    return [*saved["state_dict"].values(), *(value for state in states for value in state.values())]


@pytest.mark.slow
def test_a_job_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """After one of its ranks has died, which ends the other, too."""
    for name in ("undisturbed", "dying"):
        (tmp_path / name).mkdir()
    with _reserved_port() as port:
        _ended(_srun(tmp_path / "undisturbed", port, "0", "end.ckpt"))
    dying = tmp_path / "dying"
    with _reserved_port() as port:
        tasks = _srun(dying, port, "0.01", "end.ckpt")
        while not (dying / "at1").exists() or int((dying / "at1").read_text() or 0) < 10:
            assert all(task.poll() is None for task in tasks), _ended(tasks)
            time.sleep(0.05)
        tasks[1].kill()
        _ended(tasks)
        assert tasks[0].returncode == 1 and not (dying / "end.ckpt").exists()
    with _reserved_port() as port:
        printed = _ended(_srun(dying, port, "0", "end.ckpt"))
    assert "begins at step" in printed[0] and "begins at step 0" not in printed[0]
    ends = [_end(folder / "end.ckpt") for folder in (tmp_path / "undisturbed", dying)]
    assert len(ends[0]) == len(ends[1]) > 6
    assert all(torch.equal(one, other) for one, other in zip(*ends))
