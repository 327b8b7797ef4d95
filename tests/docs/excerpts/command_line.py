import os
from pathlib import Path

import numpy as np

from tests.docs.excerpts import Excerpts, shell

SHOP = """
import lightning as L
import torch

class NextItem(L.LightningModule):
    def __init__(self, dim: int = 8):
        super().__init__()
        self.items, self.head = torch.nn.Embedding(40, dim), torch.nn.Linear(dim, 40)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.head(self.items(batch["features"].values())), batch["target"])

    def test_step(self, batch, batch_idx):
        self.log("users", float(len(batch["target"])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
SCRIPT = """
import sys
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

assert sys.argv[1:] == ["--lr", "0.1"]
L.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False).fit(BoringModel())
"""
# what the page leaves to the machine, and the checkpoint that it goes on from
HERE = "--trainer.accelerator cpu --trainer.logger false --config here.yaml"
SAVE = "trainer: {callbacks+: [{class_path: ModelCheckpoint, init_args: {dirpath: ., save_last: true}}]}"

page = Excerpts("docs/command_line.md")
Path("shop.py").write_text(SHOP)
Path("shop.yaml").write_text(page.text("yaml"))
Path("here.yaml").write_text(SAVE)
visits = [(user, (user * 7 + time) % 40, time) for user in range(640) for time in range(5 + user % 9)]
Path("visits.csv").write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in visits))

fit, test = page.text("bash").splitlines()
assert "straggler wait" in shell(fit.replace("--config shop.yaml", f"--config shop.yaml {HERE}"))
shell(f"{test} --trainer.accelerator cpu --trainer.logger false")

Path("train.py").write_text(SCRIPT)
assert page.bash().count("Verdict:") == 2, "of the run, and shown again"

np.savetxt("lengths.txt", np.arange(1, 1025), fmt="%d")
page.bash()
assert '"ranks": [[' in Path("plan.jsonl").read_text()

page.bash()
assert Path("weights.pt").exists()
page.bash()
assert Path("folder.ckpt").is_dir()
page.bash()
assert Path("changes.pt").exists()
os.environ["HOME"] = os.getcwd()
page.bash()
assert "complete " in Path(".local/share/bash-completion/completions/freescale").read_text()
page.end()
