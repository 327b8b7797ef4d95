"""The Trainer that the parts share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import one_rank
import pytest

PARTS = Path(one_rank.__file__).parent
TRAINERS = """
import json, sys
sys.path[:0] = [{folder!r}, {parts!r}]
import lightning as L, one_rank, torch, two_ranks_training
from lightning.pytorch.strategies import DDPStrategy
try:
    L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    usual = ""
except RuntimeError as error:
    usual = str(error)
one = one_rank.trainer(torch.device("cpu"), max_epochs=1)
two = two_ranks_training._trainer(DDPStrategy(process_group_backend="gloo"), {folder!r})
print(json.dumps([usual, [[each.node_rank, each.global_rank, each.world_size] for each in (one, two)],
                  two.strategy.cluster_environment.main_address, "mpi4py.MPI" in sys.modules]))
"""


@pytest.mark.slow
def test_no_cluster_is_looked_for(tmp_path: Path) -> None:
    """An mpi4py whose MPI does not load ends a Trainer that looks for clusters; the rank comes from NODE_RANK alone."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load the MPI library')")
    (tmp_path / "mpi4py-4.0.0.dist-info").mkdir()
    (tmp_path / "mpi4py-4.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.0.0\n")
    found = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment = found | {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.9", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = TRAINERS.format(folder=str(tmp_path), parts=str(PARTS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    usual, (one, two), address, imported = json.loads(done.stdout.splitlines()[-1])
    assert usual == "cannot load the MPI library" and not imported
    assert two == [1, 1, 2] and one[2] == 1 and address == "127.0.0.9"
