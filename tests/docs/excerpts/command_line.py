from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from tests.docs.excerpts import Excerpts, shell
from tests.helpers.shop import write_shop

# what the page leaves to the machine, and the checkpoint that it goes on from
HERE = "--trainer.accelerator cpu --trainer.logger false --config here.yaml"
SAVE = "trainer: {callbacks+: [{class_path: ModelCheckpoint, init_args: {dirpath: ., save_last: true}}]}"

page = Excerpts("docs/command_line.md")
write_shop(Path(), users=640)
Path("shop.yaml").write_text(page.text("yaml"))
Path("here.yaml").write_text(SAVE)

fit, test = page.text("bash").splitlines()
shell(fit.replace("--config shop.yaml", f"--config shop.yaml {HERE}"))
shell(f"{test} --trainer.accelerator cpu --trainer.logger false")

np.savetxt("lengths.txt", np.arange(1, 1025), fmt="%d")
page.bash()
assert '"ranks": [[' in Path("plan.jsonl").read_text()

dcp.save({"model": {"score.weight": torch.ones(2, 3)}, "epoch": 3}, checkpoint_id="torchrec.dcp")
page.bash()
assert Path("start.ckpt").exists()
assert Path("weights.pt").exists() and Path("folder.ckpt").is_dir() and Path("changes.pt").exists()
page.end()
