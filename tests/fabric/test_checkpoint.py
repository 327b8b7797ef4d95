"""fabric.save writes the unsharded module's checkpoint; fabric.load goes on from it to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale.testing import RankFailed, run_distributed
from tests.helpers.fabric_loop import fabric_for, run_loop, set_up, whole
from tests.helpers.recommender import OPTIMIZERS, Net

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
    run_loop(fabric, model, optimizer, loader)  # which the checkpoint undoes
    remainder = fabric.load(path / f"{strategy}.ckpt", {"model": model, "optimizer": optimizer})
    losses = run_loop(fabric, model, optimizer, loader)
    return {"losses": losses, "remainder": remainder, **whole(fabric, model, optimizer)}


def test_saved_as_the_plain_module_and_resumed_to_the_bit(tmp_path: Path) -> None:
    run_distributed(_saved, 2, tmp_path, "freescale", 1)
    checkpoint = torch.load(tmp_path / "freescale.ckpt")
    net = Net()
    net.load_state_dict(checkpoint["model"], strict=True)
    optimizer = OPTIMIZERS["adagrad"](net.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert float(optimizer.state[net.embeddings.embeddings["item"].weight]["sum"].max()) > 0
    straight = run_distributed(_saved, 2, tmp_path / "straight", "freescale", 2)
    resumed = run_distributed(_resumed, 2, tmp_path, "freescale")
    assert resumed[0]["remainder"] == {"seen": STEPS}
    assert [run["losses"] for run in resumed] == [run["losses"] for run in straight]
    assert len(set(resumed[0]["losses"])) == STEPS
    for name, weight in straight[0]["weights"].items():
        assert torch.equal(resumed[0]["weights"][name], weight), name


def test_goes_on_from_a_checkpoint_of_ddp(tmp_path: Path) -> None:
    run_distributed(_saved, 2, tmp_path, "ddp", 1)
    straight = run_distributed(_saved, 2, tmp_path / "straight", "ddp", 2)
    resumed = run_distributed(_resumed, 2, tmp_path, "ddp")
    for rank in range(2):
        assert resumed[rank]["losses"] == pytest.approx(straight[rank]["losses"], rel=1e-5)


def _save_shards(path: Path) -> None:
    fabric = fabric_for()
    model, *_ = set_up(fabric)
    fabric.save(path / "shards.ckpt", {"model": model.state_dict()})


def test_a_ranks_own_shards_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"pass the module itself, \{'model': model\}"):
        run_distributed(_save_shards, 2, tmp_path)
    assert not (tmp_path / "shards.ckpt").exists()


def _whole_table() -> torch.Tensor:
    fabric = fabric_for()
    model, optimizer, loader = set_up(fabric, steps=3)
    run_loop(fabric, model, optimizer, loader)
    table = fabric.strategy.full_weight("embeddings.embeddings.item")
    with fabric.strategy.writing_tables():
        for shard in fabric.strategy.tables.shards():
            shard.weight.mul_(2)
    weights = fabric.strategy.get_module_state_dict(model._forward_module)
    if fabric.is_global_zero:
        assert torch.equal(weights["embeddings.embeddings.item.weight"], 2 * table)
    return table


def test_tables_are_read_and_written_by_hand() -> None:
    first, second = run_distributed(_whole_table, 2)
    assert torch.equal(first, second)


def _evaluated(path: Path) -> tuple[float, float]:
    fabric = fabric_for()
    torch.manual_seed(1)
    model = fabric.setup(Net())
    fabric.load(path / "freescale.ckpt", {"model": model}, strict=False)
    batch = next(iter(set_up_loader(fabric)))
    net = Net()
    net.load_state_dict(torch.load(path / "freescale.ckpt")["model"])
    with torch.no_grad():
        return float(model(batch["features"]).sum()), float(net(batch["features"]).sum())


def set_up_loader(fabric: Any) -> Any:
    from tests.helpers.recommender import fixed_loader

    return fabric.setup_dataloaders(fixed_loader(fabric.global_rank, 2), use_distributed_sampler=False)


def test_a_module_alone_is_evaluated(tmp_path: Path) -> None:
    run_distributed(_saved, 2, tmp_path, "freescale", 1)
    for sharded, plain in run_distributed(_evaluated, 2, tmp_path):
        assert sharded == pytest.approx(plain, rel=1e-6)
