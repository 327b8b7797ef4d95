"""What Lightning does under SLURM, with the variables that srun sets and an scontrol of ours: no cluster is needed."""

from __future__ import annotations

import os
import signal
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
from lightning_freescale import FreeScaleDataModule
from tests.helpers.recommender import REPEATS, Recommender, Samples, collate

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
    enable_model_summary=False,
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=3, save_last=True)],
)
trainer.fit(module, FreeScaleDataModule(samples, samples.lengths, 4, collate_fn=collate, balance=REPEATS), ckpt_path="last")
trainer.save_checkpoint(sys.argv[2])
"""


def _srun(folder: Path, port: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start two tasks of a job, on one node."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "at1").unlink(missing_ok=True)
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    (folder / "scontrol").chmod(0o755)
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
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


def _at_step(tasks: list[subprocess.Popen[str]], folder: Path, step: int) -> None:
    """Wait until rank 1 is there."""
    while not (folder / "at1").exists() or int((folder / "at1").read_text() or 0) < step:
        assert all(task.poll() is None for task in tasks), _ended(tasks)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Weights and optimizer states of a job that ends by itself."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with _reserved_port() as port:
        _ended(_srun(folder, port, "0", "end.ckpt"))
    return _end(folder / "end.ckpt")


def _goes_on(folder: Path, undisturbed: list[torch.Tensor]) -> None:
    """The job is started again, from its middle, and ends as one that nothing happened to, to the bit."""
    with _reserved_port() as port:
        printed = _ended(_srun(folder, port, "0", "end.ckpt"))
    assert "begins at step" in printed[0] and "begins at step 0" not in printed[0]
    end = _end(folder / "end.ckpt")
    assert len(end) == len(undisturbed) > 6
    assert all(torch.equal(one, other) for one, other in zip(end, undisturbed))


@pytest.mark.slow
def test_a_job_that_is_started_again_goes_on(tmp_path: Path, undisturbed: list[torch.Tensor]) -> None:
    """After one of its ranks has died, which ends the other, too."""
    with _reserved_port() as port:
        tasks = _srun(tmp_path, port, "0.01", "end.ckpt")
        _at_step(tasks, tmp_path, 10)
        tasks[1].kill()
        _ended(tasks)
    assert tasks[0].returncode == 1 and not (tmp_path / "end.ckpt").exists()
    _goes_on(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "step", "apart"), [(0, 7, 0.0), (1, 23, 0.05), (1, 45, None)])
def test_a_job_that_is_requeued_goes_on(
    tmp_path: Path, undisturbed: list[torch.Tensor], first: int, step: int, apart: float | None
) -> None:
    """SLURM's signal finds the ranks at different places of a step, one after the other, or one of them alone."""
    with _reserved_port() as port:
        tasks = _srun(tmp_path, port, "0.01", "end.ckpt")
        _at_step(tasks, tmp_path, step)
        tasks[first].send_signal(signal.SIGUSR1)
        if apart is not None:
            time.sleep(apart)
            tasks[1 - first].send_signal(signal.SIGUSR1)
        printed = _ended(tasks)
    assert not (tmp_path / "end.ckpt").exists(), printed
    assert [path.name for path in tmp_path.glob("hpc_ckpt*")] == ["hpc_ckpt_1.ckpt"]
    assert (tmp_path / "requeued").read_text() == "requeue 4242\n"
    _goes_on(tmp_path, undisturbed)
