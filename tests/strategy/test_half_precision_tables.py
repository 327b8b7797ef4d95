"""Fits with tables of 16 bits: those of plain TorchRec, checkpoints that keep the dtype, and evaluation; and ``wire=``."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.checkpoint.conversion import open_checkpoint
from lightning_freescale.testing import run_distributed
from tests.helpers.bags import TABLES, BagModel, Batch, bag_loader, configs
from tests.helpers.catalogue_models import NextItem
from tests.helpers.catalogue_models import loader as catalogue_loader
from tests.helpers.micro_batch_training import Model, run
from tests.helpers.overlap_training import PLAIN, STEPS, Case, CountingModel, assert_same, compared, continued, departures
from tests.helpers.plain_embeddings import KEYS, SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import DIM, fixed_loader, tables, trainer

FP16, BF16 = DataType.FP16, DataType.BF16


def _half(module: Any, kind: DataType = FP16) -> Any:
    """Replace the sequences of a model by sequences of 16 bits."""
    module.net.embeddings = EmbeddingCollection(tables=[replace(table, data_type=kind) for table in tables()])
    return module


class HalfBags(BagModel):
    """Has bags of at most one id. TorchRec sums the parts of longer bags in another order."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        del self.weighted
        kept = [config for config in configs(TABLES) if config.name in ("item", "word")]
        self.bags = EmbeddingBagCollection(
            tables=[replace(config, feature_names=config.feature_names[:1], data_type=FP16) for config in kept]
        )
        self.over = nn.Linear(2 * DIM, 1, bias=False)

    def scores(self, batch: Batch) -> Tensor:
        return self.net(batch["features"]) + self.over(self.bags(batch["bags"]).values()).squeeze(1)


EXACT = {"dedup": False}
CASES = {
    "sequences": Case(lambda: _half(CountingModel("sgd")), validation=lambda: fixed_loader(int(os.environ["RANK"]), 2)),
    "bags": Case(
        partial(HalfBags, "adagrad"), lambda: bag_loader(STEPS, longest=1), validation=lambda: bag_loader(2, longest=1)
    ),
}


def test_fits_are_those_of_plain_torchrec() -> None:
    assert compared(2, CASES, PLAIN, EXACT, {**EXACT, "overlap": False}) == []


# -- plain modules


class HalfModel(PlainModel):
    """Has parameters of bfloat16. The result of a lookup has the dtype of the weight."""

    def __init__(self, optimizer: str = "adagrad") -> None:
        super().__init__(optimizer)
        self.encoder.item_emb = nn.Embedding(70_000, DIM, padding_idx=0)  # a separate tensor in a folder
        self.bfloat16()
        self.seen: set[torch.dtype] = set()

    def scores(self, batch: Batch) -> Tensor:
        self.seen.add(self.kind_emb(batch["kind"]).dtype)
        if not torch.is_grad_enabled():
            assert self.kind_emb.weight.float().dtype == torch.float32, "a copy of the whole weight, converted"
        return super().scores(batch)


SHARD = {"shard": SHARDED}
HALF = Case(HalfModel, lambda: plain_loader(STEPS), notice=None)


def _continued(folder: Path) -> dict[str, list[Any]]:
    return {
        kind: continued(HALF, str(folder / f"{kind}.ckpt"), STEPS, {**SHARD, "checkpoint": kind}, SHARD)
        for kind in ("single", "sharded")
    }


def test_checkpoints_keep_the_dtype(tmp_path: Path) -> None:
    assert departures({"single": HALF, "sharded": HALF}, run_distributed(_continued, 2, tmp_path)) == []
    saved = []
    for kind in ("single", "sharded"):
        with open_checkpoint(tmp_path / f"{kind}.ckpt") as file:
            saved.append(torch.load(file)["state_dict"])
    single, sharded = saved
    assert_same(sharded, single)
    assert {single[key].dtype for key in KEYS} == {torch.bfloat16}
    loaded = HalfModel.load_from_checkpoint(tmp_path / "single.ckpt")
    assert_same(loaded.state_dict(), single)


def _evaluated() -> Any:
    torch.manual_seed(0)
    module, loader = HalfModel(), plain_loader(2)
    fitting = trainer(strategy=FreeScaleStrategy(**SHARD), devices=2, max_epochs=1)
    fitting.fit(module, plain_loader(STEPS), loader)
    predicted = fitting.predict(module, loader)
    weights = {key: fitting.strategy.full_weight(key) for key in SHARDED}
    whole = HalfModel()
    whole.load_state_dict({**module.state_dict(), **{f"{key}.weight": value for key, value in weights.items()}}, strict=False)
    with torch.no_grad():
        expected = [whole.scores(batch) for batch in loader]
    return module.seen, {value.dtype for value in weights.values()}, predicted, expected


def test_evaluation_is_that_of_the_unsharded_module() -> None:
    for seen, dtypes, predicted, expected in run_distributed(_evaluated, 2):
        assert seen == dtypes == {torch.bfloat16}
        assert_same(predicted, expected)


class HalfNextItem(NextItem):
    """Has parameters of bfloat16 and a loss over all items."""

    def __init__(self, style: str) -> None:
        super().__init__(style, "sgd")
        self.bfloat16()


def test_losses_over_all_rows() -> None:
    cases = {style: Case(partial(HalfNextItem, style), catalogue_loader, notice=None) for style in ("linear", "ours")}
    rounding = {"losses": (0.01, 0.0), "weights": (0.02, 0.02)}  # torch rounds gradients to bfloat16, too
    assert compared(2, cases, "ddp", {"shard": ["item_emb"]}, **rounding) == []


# -- micro-batches, and wire=


def _divided() -> list[dict[str, Any]]:
    return [run(parts, FreeScaleStrategy(), lambda: _half(Model(), BF16)) for parts in (1, 3)]


def test_micro_batches() -> None:
    for whole, divided in run_distributed(_divided, 2):
        losses = [[mine[2] for mine in each["ended"]] for each in (whole, divided)]
        assert losses[1] == pytest.approx(losses[0], rel=2**-8), "sums in another order are rounded to bfloat16"


CLOSE = {"losses": (0.02, 0.0), "weights": (0.05, 0.02), "states": (0.05, 0.02)}


def test_wire_is_an_option_of_the_strategy() -> None:
    ways: list[Any] = [{}, {"wire": "bfloat16"}, {"wire": {"rows": "float16"}}]
    cases = {"sequences": Case(partial(CountingModel, "sgd"))}
    assert compared(2, cases, *ways, **CLOSE) == []
    assert compared(2, cases, *ways) != [], "the values are rounded"
