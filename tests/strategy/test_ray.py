"""RayFreeScaleStrategy on a local Ray: the page on it, against the same fit without Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.docs.pages import DOCS, ROOT, save_files

WITHOUT_RAY = """
from lightning_freescale import FreeScaleDataModule
from quick_start import Histories, Recommender, collate
import lightning as L

def train():
    L.seed_everything(0)
    histories = Histories(320)
    data = FreeScaleDataModule(histories, histories.lengths, batch_size=16, collate_fn=collate, loss_reduction="target_mean")
    options = dict(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(strategy="freescale", accelerator="cpu", devices=2, **options)
    trainer.fit(Recommender(), data)
    trainer.save_checkpoint("without.ckpt")

if __name__ == "__main__":
    train()
"""


def _run(script: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.third_party
def test_ray_trains_as_without_and_its_checkpoint_is_ordinary(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for page in (DOCS / "quick_start.md", DOCS / "how_to" / "ray.md"):
        save_files(page, tmp_path)
    (tmp_path / "without_ray.py").write_text(WITHOUT_RAY)
    for name in ("train_on_ray.py", "without_ray.py"):  # else costs are measured, and the clock decides who computes a sample
        script = (tmp_path / name).read_text()
        assert '"target_mean")' in script
        (tmp_path / name).write_text(script.replace('"target_mean")', '"target_mean", balance=False)'))
    found = re.search(r"^checkpoint: (.+)$", _run("train_on_ray.py", tmp_path), re.MULTILINE)
    assert found
    _run("without_ray.py", tmp_path)
    by_ray, without = (torch.load(path, weights_only=False) for path in (found[1], tmp_path / "without.ckpt"))
    assert by_ray["global_step"] == without["global_step"] == 20
    assert list(by_ray["state_dict"]) == list(without["state_dict"])
    assert all(torch.equal(by_ray["state_dict"][key], weight) for key, weight in without["state_dict"].items())


@pytest.mark.third_party
def test_ray_says_how_many_ranks_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with three workers each. Lightning knows only the device of this worker."""
    train = pytest.importorskip("ray.train")
    from lightning_freescale.strategy.ray import RayFreeScaleStrategy

    context = SimpleNamespace(get_local_world_size=lambda: 3, get_world_size=lambda: 6)
    monkeypatch.setattr(train, "get_context", lambda: context)
    strategy = RayFreeScaleStrategy()
    strategy.num_nodes = 1  # as the Trainer does
    assert (strategy.num_processes, strategy.num_nodes) == (3, 2)
    with pytest.raises(ValueError, match=r"num_nodes=4\).* 2 node"):
        strategy.num_nodes = 4


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lightning_freescale.strategy.ray", raising=False)
    with pytest.raises(ImportError, match=r"lightning-freescale\[ray\]"):
        import lightning_freescale.strategy.ray  # noqa: F401
