"""FreeScaleStrategy(exchange="two_level"): several ranks on each of several nodes train as under "ddp"."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.strategy import module_setup
from lightning_freescale.testing import run_distributed
from tests.helpers.overlap_training import CountingModel, Run, assert_same, fit, my_loader

STEPS, NODES, EACH = 7, 2, 2


def _on_nodes(optimizer: str, strategy: Any, **options: Any) -> Run:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % EACH), GROUP_RANK=str(rank // EACH), LOCAL_WORLD_SIZE=str(EACH))
    torch.manual_seed(0)
    options = {"max_epochs": 2, "devices": EACH, "num_nodes": NODES, "strategy": strategy, **options}
    return fit(CountingModel(optimizer), my_loader(STEPS), **options)


def _all(optimizer: str, **options: Any) -> dict[str, Run]:
    flat, two_level = FreeScaleStrategy(), FreeScaleStrategy(exchange="two_level")
    named = {"ddp": "ddp", "flat": flat, "two_level": two_level}
    runs = {name: _on_nodes(optimizer, strategy, **options) for name, strategy in named.items()}
    assert two_level.overlap_report.cross_node_bytes < flat.overlap_report.cross_node_bytes, "means of all ranks"
    assert "to other nodes), plain TorchRec" in str(two_level.overlap_report)
    return runs


@pytest.mark.parametrize(
    ("optimizer", "options"), [("rowwise_adagrad", {"accumulate_grad_batches": 3}), ("sgd", {"gradient_clip_val": 0.05})]
)
def test_as_under_ddp(optimizer: str, options: dict[str, Any]) -> None:
    ranks = run_distributed(_all, NODES * EACH, optimizer, **options)
    for runs in ranks:
        assert runs["two_level"].losses == pytest.approx(runs["ddp"].losses, rel=1e-5)
        assert runs["two_level"].losses == pytest.approx(runs["flat"].losses, rel=1e-6)
        assert len(set(runs["ddp"].losses)) > 1, "the loss must move, or equality means nothing"
        assert runs["two_level"].looked_ahead() == runs["flat"].looked_ahead()
        assert 0 < runs["two_level"].statistics["cross_node_bytes"] < runs["flat"].statistics["cross_node_bytes"]
    assert_same(ranks[0]["two_level"].weights, ranks[0]["ddp"].weights, rtol=1e-4, atol=1e-6)


def _on_one_node() -> tuple[list[str], float]:
    told, strategy = [], FreeScaleStrategy(exchange="two_level")
    module_setup.rank_zero_info = told.append
    run = fit(CountingModel(), my_loader(2), max_epochs=1, strategy=strategy)
    assert "to other nodes" not in str(strategy.overlap_report)
    return told, run.statistics["cross_node_bytes"]


def test_one_level_is_the_flat_exchange() -> None:
    for told, crossed in run_distributed(_on_one_node, 2):
        assert [text for text in told if "exchange='two_level' with num_nodes=1 and 2 ranks each is the flat exchange" in text]
        assert crossed == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "tree"}, r"FreeScaleStrategy\(exchange='tree'\): pass 'flat' or 'two_level'"),
        ({"dedup": False}, r"FreeScaleStrategy\(exchange='two_level', dedup=False\): sums within a node first"),
        ({"overlap": False}, r"FreeScaleStrategy\(exchange='two_level', overlap=False\): its rows are TorchRec's"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreeScaleStrategy(**{"exchange": "two_level", **options})
