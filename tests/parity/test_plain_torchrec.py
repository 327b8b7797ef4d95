"""Strategy "freescale" against a hand-written loop of plain TorchRec and DDP: bitwise the same."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.testing import run_distributed
from tests.helpers import plain_torchrec
from tests.helpers.recommender import Net, RankBatches, Recommender, fixed_loader, trainer

STEPS = 20


def _with_freescale(optimizer: str, **options: Any) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    module = Recommender(optimizer)
    fit = trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=FreeScaleStrategy(**options))
    fit.fit(module, fixed_loader(rank, STEPS))
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {"losses": module.losses, "weights": state["state_dict"], "optimizer": state["optimizer_states"][0]}


def _by_hand(optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return plain_torchrec.train(Net(), optimizer, RankBatches(int(os.environ["RANK"]), STEPS))


@cache
def _plain(ranks: int, optimizer: str) -> list[dict[str, Any]]:
    """What both ways to exchange are compared with."""
    return run_distributed(_by_hand, ranks, optimizer)


@pytest.mark.parametrize("options", [{"dedup": False}, pytest.param({"overlap": False}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("sgd", marks=pytest.mark.slow), "adagrad", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)],
)
def test_bitwise_equal(optimizer: str, ranks: int, options: dict[str, Any]) -> None:
    mine = run_distributed(_with_freescale, ranks, optimizer, **options)
    plain = _plain(ranks, optimizer)
    for rank in range(ranks):
        assert mine[rank]["losses"] == plain[rank]["losses"]
    assert len(set(mine[0]["losses"])) == STEPS, "the loss must move, or equality means nothing"
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(mine[0]["weights"][f"net.{name}"], weight), name
    tables = [mine[0]["optimizer"]["state"].get(index, {}) for index in (0, 1)]
    expected = [plain[0]["states"].get(f"{table}.momentum1") for table in ("item", "cat")]
    for state, momentum in zip(tables, expected):
        assert ("sum" in state) == (optimizer != "sgd")
        if "sum" in state:
            assert torch.equal(state["sum"].flatten(), momentum.flatten())
