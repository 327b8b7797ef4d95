"""fabric.save writes the unsharded module's checkpoint. fabric.load continues from it with the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.fabric_loop import fabric_for, run_all, run_loop, set_up, whole
from tests.helpers.recommender import OPTIMIZERS, Net, fixed_loader

STEPS = 8


def _saved(path: Path, strategy: str, loops: int) -> dict[str, Any]:
    fabric = fabric_for(strategy)
    model, optimizer, loader = set_up(fabric, "adagrad", STEPS)
    for _ in range(loops):
        losses = run_loop(fabric, model, optimizer, loader)
        fabric.save(path / f"{strategy}.ckpt", {"model": model, "optimizer": optimizer, "seen": STEPS})
    return {"losses": losses, **whole(fabric, model, optimizer)}


def _resumed(path: Path, strategy: str) -> dict[str, Any]:
    fabric = fabric_for("freescale")
    model, optimizer, loader = set_up(fabric, "adagrad", STEPS)
    run_loop(fabric, model, optimizer, loader)  # the checkpoint reverts this
    remainder = fabric.load(path / f"{strategy}.ckpt", {"model": model, "optimizer": optimizer})
    losses = run_loop(fabric, model, optimizer, loader)
    return {"losses": losses, "remainder": remainder, **whole(fabric, model, optimizer)}


def _save_shards(path: Path) -> bool:
    fabric = fabric_for()
    model, *_ = set_up(fabric)
    with pytest.raises(ValueError, match=r"\{'model': model\}"):
        fabric.save(path / "shards.ckpt", {"model": model.state_dict()})
    return (path / "shards.ckpt").exists()


def _evaluated(path: Path) -> tuple[float, float]:
    """Return the sums of the outputs of the restored module, which has no optimizer here, and of the plain module."""
    fabric = fabric_for()
    torch.manual_seed(1)
    model = fabric.setup(Net())
    fabric.load(path / "freescale.ckpt", {"model": model}, strict=False)
    batch = next(iter(fabric.setup_dataloaders(fixed_loader(fabric.global_rank, 2), use_distributed_sampler=False)))
    net = Net()
    net.load_state_dict(torch.load(path / "freescale.ckpt")["model"])
    with torch.no_grad():
        return float(model(batch["features"]).sum()), float(net(batch["features"]).sum())


def test_saved_as_the_plain_module_and_resumed_to_the_bit(tmp_path: Path) -> None:
    straight, _, resumed, evaluated, shards = run_all(
        2,
        partial(_saved, tmp_path / "straight", "freescale", 2),
        partial(_saved, tmp_path, "freescale", 1),
        partial(_resumed, tmp_path, "freescale"),
        partial(_evaluated, tmp_path),
        partial(_save_shards, tmp_path),
    )
    checkpoint = torch.load(tmp_path / "freescale.ckpt")
    net = Net()
    net.load_state_dict(checkpoint["model"], strict=True)
    optimizer = OPTIMIZERS["adagrad"](net.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert float(optimizer.state[net.embeddings.embeddings["item"].weight]["sum"].max()) > 0
    assert resumed[0]["remainder"] == {"seen": STEPS}
    assert [run["losses"] for run in resumed] == [run["losses"] for run in straight]
    assert len(set(resumed[0]["losses"])) == STEPS
    for name, weight in straight[0]["weights"].items():
        assert torch.equal(resumed[0]["weights"][name], weight), name
    for sharded, plain in evaluated:
        assert sharded == pytest.approx(plain, rel=1e-6)
    assert not any(shards), "a rank's own shards are not saved"


def test_goes_on_from_a_checkpoint_of_ddp(tmp_path: Path) -> None:
    straight, _, resumed = run_all(
        2,
        partial(_saved, tmp_path / "straight", "ddp", 2),
        partial(_saved, tmp_path, "ddp", 1),
        partial(_resumed, tmp_path, "ddp"),
    )
    for rank in range(2):
        assert resumed[rank]["losses"] == pytest.approx(straight[rank]["losses"], rel=1e-5)
