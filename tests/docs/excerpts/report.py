"""docs/report.md, with the report of a short run."""

import shutil
from pathlib import Path

import lightning as L
from quick_start import Histories, Recommender, collate
from torch.utils.data import DataLoader

from lightning_freescale import BubbleProfiler
from tests.docs.excerpts import Excerpts

page, profiler = Excerpts("docs/report.md"), BubbleProfiler(dirpath=".")
trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[profiler])
trainer.fit(Recommender(), DataLoader(Histories(64), batch_size=8, collate_fn=collate))
for run in ("ddp", "freescale"):
    shutil.copy("report.json", f"{run}.json")

assert "straggler wait" in page.bash() and Path("bubbles.html").exists()
page.python(globals())
assert abs(read("freescale.json")["summary"]["bubble"] - report.bubble) < 1e-6
page.end()
