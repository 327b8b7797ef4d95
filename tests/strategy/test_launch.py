"""Ranks that others start, torchrun on two hosts; and sessions that cannot start any, as in a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, save_files

sys.path.append(str(ROOT / "benchmarks"))

import netlab

_WHY_NOT = netlab.available()
# Lightning and torchrun would take the lab's ranks for theirs; hosts of the lab share a name, so torchrun is told who is first
ON_HOST = """
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
rendezvous="--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT --rdzv-conf is_host=$((NETLAB_HOST == 0))"
exec torchrun --nnodes 2 --nproc-per-node 2 $rendezvous --local-addr 10.77.0.$((NETLAB_HOST + 1)) train.py
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The script of the page on launching, where its reader would save it."""
    for page in (DOCS / "quick_start.md", DOCS / "how_to" / "launch.md"):
        save_files(page, tmp_path)
    return tmp_path


def _loss(command: list[str], folder: Path, nodes: int) -> float:
    """Of a run on four ranks on so many nodes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    found = re.search(r"ranks: 4 on (\d) node\(s\); loss: (\S+)", done.stdout)
    assert done.returncode == 0 and found, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(found[1]) == nodes
    return float(found[2])


@pytest.mark.slow
@pytest.mark.skipif(_WHY_NOT is not None, reason=f"netlab: {_WHY_NOT}")
def test_torchrun_on_two_hosts_trains_as_on_one(folder: Path) -> None:
    lab = [sys.executable, netlab.__file__, "--hosts", "2", "--rate", "none", "--timeout", "150", "--", "bash", "-ec", ON_HOST]
    two = _loss(lab, folder, nodes=2)
    script = folder / "train.py"
    script.write_text(script.read_text().replace("devices=2", "devices=4"))
    one = _loss(["torchrun", "--standalone", "--nproc-per-node", "4", "train.py"], folder, nodes=1)
    assert two == pytest.approx(one, rel=1e-6)


INTERACTIVE = """
import sys
sys.ps1 = ">>> "  # as in a notebook
import lightning as L
from quick_start import FreeScaleDataModule, Histories, Recommender, collate

def fit(devices):
    train = Histories(64)
    data = FreeScaleDataModule(train, train.lengths, batch_size=16, collate_fn=collate, loss_reduction="target_mean")
    options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(strategy="freescale", devices=devices, **options)
    trainer.fit(Recommender(), data)
    return trainer.world_size, trainer.global_step
"""


def _interactive(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What Python prints after this last line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INTERACTIVE + line]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_notebook_trains_on_one_rank(folder: Path) -> None:
    done = _interactive("print('trained', *fit(1))", folder)
    assert "trained 1 4" in done.stdout, done.stderr[-3000:]


def test_a_notebook_is_told_how_to_train_on_several(folder: Path) -> None:
    done = _interactive("fit(2)", folder)
    assert "RuntimeError: strategy 'freescale' cannot start 2 ranks in a notebook" in done.stderr
    assert "%%writefile train.py" in done.stderr


@pytest.mark.slow
def test_a_notebook_trains_on_ranks_that_it_has_started(folder: Path) -> None:
    line = "from lightning_freescale.testing import run_distributed; print('trained', run_distributed(fit, 2, 2, init=False))"
    done = _interactive(line, folder)
    assert "trained [(2, 2), (2, 2)]" in done.stdout, done.stderr[-3000:]
