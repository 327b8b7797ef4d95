"""docs/profiler.md: the callback, the commands, and the profiler in a loop of one's own."""

import os
import shutil
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from quick_start import Histories, Recommender, collate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_freescale.testing import run_distributed
from tests.docs.excerpts import Excerpts, shell

SCRIPT = """
import argparse
import lightning as L
from quick_start import Histories, Recommender, collate
from torch.utils.data import DataLoader
import lightning_freescale

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    assert parser.parse_args().lr == 0.1
    trainer = L.Trainer(strategy="freescale", accelerator="cpu", devices=2, max_epochs=1, logger=False)
    trainer.fit(Recommender(), DataLoader(Histories(160), batch_size=8, collate_fn=collate))
"""
CLI = """
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    LightningCLI(BoringModel, trainer_defaults={"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False})
"""


def _profiled(command: str) -> None:
    """Check that the command leaves a report, without the one before."""
    shutil.rmtree("bubbles", ignore_errors=True)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # of the Trainer in this process, which listens there still
    printed = shell(command)
    assert Path("bubbles/report.json").exists() and "Verdict:" in printed, printed[-3000:]


def own_loop() -> float:
    """Return the bubble of six steps on rank 0."""
    page, net = Excerpts("docs/profiler.md"), torch.nn.Linear(4, 1)
    for language in ("python", "bash"):
        page.text(language)
    model = DistributedDataParallel(net)
    batches = [torch.ones(8, 4) for _ in range(6)]
    names = {"loader": batches, "model": lambda batch: model(batch).mean()}
    names |= {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    page.python(names)
    if dist.get_rank() == 0:
        page.end()
    return names["report"].bubble if dist.get_rank() == 0 else 0.5


if __name__ == "__main__":
    assert 0 < run_distributed(own_loop, 2)[0] < 1
    model, data = Recommender(), DataLoader(Histories(64), batch_size=8, collate_fn=collate)
    page = Excerpts("docs/profiler.md")
    here = "1, accelerator='cpu', max_epochs=1, logger=False"
    page.python(globals(), devices=here)
    Path("train.py").write_text(SCRIPT), Path("main.py").write_text(CLI)
    for command in page.text("bash").replace("\\\n", "").splitlines():
        _profiled(command)
