"""Fabric(strategy="freescale") against "ddp" of the unsharded module, and against the loop of plain TorchRec."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lightning_freescale.testing import run_distributed
from tests.helpers import plain_torchrec
from tests.helpers.fabric_loop import fabric_for, run_loop, set_up, whole
from tests.helpers.recommender import Net, RankBatches

STEPS = 12


def _train(strategy: str = "freescale", optimizer: str = "adagrad", **options: Any) -> dict[str, Any]:
    loop = {name: options.pop(name) for name in ("accumulate", "clip") if name in options}
    fabric = fabric_for(strategy, **options)
    model, updates, loader = set_up(fabric, optimizer, STEPS)
    losses = run_loop(fabric, model, updates, loader, **loop)
    return {"losses": losses, **whole(fabric, model, updates)}


def _by_hand(optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return plain_torchrec.train(Net(), optimizer, RankBatches(int(os.environ["RANK"]), STEPS))


def _close(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(set(mine[0]["losses"])) == STEPS, "the loss must move, or equality means nothing"
    for rank, run in enumerate(mine):
        assert run["losses"] == pytest.approx(other[rank]["losses"], rel=1e-5)
    for name, weight in other[0]["weights"].items():
        torch.testing.assert_close(mine[0]["weights"][name], weight, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bitwise_equal_to_plain_torchrec(ranks: int) -> None:
    mine = run_distributed(_train, ranks, dedup=False)
    plain = run_distributed(_by_hand, ranks, "adagrad")
    for rank in range(ranks):
        assert mine[rank]["losses"] == plain[rank]["losses"]
    assert len(set(mine[0]["losses"])) == STEPS
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(mine[0]["weights"][name], weight), name
    for index, table in enumerate(("item", "cat")):
        state = mine[0]["optimizer"]["state"][index]["sum"]
        assert torch.equal(state.flatten(), plain[0]["states"][f"{table}.momentum1"].flatten())


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, pytest.param({"overlap": False}, marks=pytest.mark.slow)])
def test_same_as_ddp(optimizer: str, options: dict[str, Any]) -> None:
    mine = run_distributed(_train, 2, optimizer=optimizer, **options)
    ddp = run_distributed(_train, 2, "ddp", optimizer)
    _close(mine, ddp)
    assert mine[0]["optimizer"]["state"].keys() == ddp[0]["optimizer"]["state"].keys()
