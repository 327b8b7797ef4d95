"""docs/profiler.md: the callback, reports compared, and the profiler in a loop of one's own."""

import shutil
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from quick_start import Histories, Recommender, collate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_freescale.testing import run_distributed
from tests.docs.excerpts import Excerpts


def own_loop() -> float:
    """The bubble of six steps, as rank 0 has it."""
    page, net = Excerpts("docs/profiler.md"), torch.nn.Linear(4, 1)
    page.text("python"), page.text("bash")
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
    page.python(globals(), devices="1, accelerator='cpu', max_epochs=1, logger=False")
    for run in ("ddp", "freescale"):
        Path(run).mkdir()
        shutil.copy("bubbles/report.json", f"{run}/report.json")
    page.bash()
    assert Path("both.html").exists()
