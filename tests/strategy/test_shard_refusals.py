"""FreeScaleStrategy(shard=...): which embeddings it takes, what it says of others, and what it refuses."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embeddings.embedding_choice import LARGE_EMBEDDING
from lightning_freescale.testing import run_distributed
from tests.helpers.plain_embeddings import SHARDED, PlainModel, plain_loader
from tests.helpers.recommender import trainer


def _fit(module: PlainModel, shard: Any) -> None:
    trainer(strategy=FreeScaleStrategy(shard=shard), devices=int(os.environ["WORLD_SIZE"])).fit(module, plain_loader(2))


class Large(PlainModel):
    """With tables as ``shard="auto"`` takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(LARGE_EMBEDDING // 8, 8, device="meta")
        self.renorm_emb = nn.Embedding(LARGE_EMBEDDING // 4, 4, max_norm=1.0).requires_grad_(False)

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return super().scores(batch) + self.word_emb(batch["kind"]).sum(dim=1)


def _told(make: Any, shard: Any) -> tuple[list[str], list[str]]:
    """What is said, the error with it, and which embeddings stand there afterwards."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    torch.manual_seed(0)
    module = make()
    try:
        _fit(module, shard)
    except (ValueError, TypeError) as error:
        told.append(f"{type(error).__name__}: {error}")
    finally:
        logger.removeHandler(handler)
    return told, [type(each).__name__ for each in module.modules() if "Embedding" in type(each).__name__]


def test_large_embeddings_are_told_or_taken() -> None:
    told, _ = run_distributed(_told, 1, Large, ["word_emb"])[0]
    assert not any("is whole on every rank" in text or "shard='auto'" in text for text in told)
    told, kinds = run_distributed(_told, 1, Large, "auto")[0]
    assert "strategy 'freescale': shard='auto' shards 'word_emb' (125000 x 8)" in told
    assert any("leaves an nn.Embedding whole: 'renorm_emb' has max_norm=1.0" in text for text in told)
    assert sorted(kinds) == [*["Embedding"] * 4, "ShardedEmbedding"]
    told, _ = run_distributed(_told, 1, PlainModel, "auto")[0]
    assert f"strategy 'freescale': shard='auto' finds no nn.Embedding of {LARGE_EMBEDDING} numbers to shard" in told


class LargeOnCPU(Large):
    def __init__(self) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(LARGE_EMBEDDING // 8, 8)


def test_without_shard_it_is_said_that_it_is_there() -> None:
    told, kinds = run_distributed(_told, 1, LargeOnCPU, None)[0]
    assert len([text for text in told if "nn.Embedding 'word_emb' (125000 x 8) is whole on every rank" in text]) == 1
    assert any("FreeScaleStrategy(shard=['word_emb'])" in text for text in told)
    assert set(kinds) == {"Embedding"}


class WithMomentum(PlainModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Tied(PlainModel):
    """Scores against all kinds, by their embeddings."""

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.encoder(batch["items"]) @ self.kind_emb.weight.T).logsumexp(dim=1)


@pytest.mark.parametrize(
    ("make", "shard", "told"),
    [
        (WithMomentum, SHARDED, "SGD(momentum=0.9) holds the embedding table 'encoder.item_emb.weight'"),
        (
            PlainModel,
            ["kind_embs"],
            "FreeScaleStrategy(shard=['kind_embs']): the module has no 'kind_embs', did you mean 'kind_emb'?",
        ),
        (PlainModel, "kind_emb", "FreeScaleStrategy(shard='kind_emb'): pass a list of paths, such as ['kind_emb'], or 'auto'"),
    ],
)
def test_a_refused_module_is_as_it_was(make: Any, shard: Any, told: str) -> None:
    (texts, kinds), _ = run_distributed(_told, 2, make, shard)
    assert told in texts[-1]
    assert kinds == ["Embedding"] * 3


def _tied() -> str:
    try:
        _fit(Tied(), SHARDED)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_computing_with_the_weight_is_refused() -> None:
    for told in run_distributed(_tied, 2):
        assert "kind_emb.weight is sharded" in told and "full_weight('kind_emb')" in told
