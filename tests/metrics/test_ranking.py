"""Ranks of targets among all items, and their metrics, compared with sorting and torchmetrics."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_normalized_dcg, retrieval_reciprocal_rank

from lightning_freescale import metrics as module
from lightning_freescale.metrics import HitRate, RankingMetrics, catalogue_ranks, target_ranks
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import trainer

ITEMS, SAMPLES, DIM = 40, 37, 6


def _given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states and rows of small integers, so that many scores are equal; targets; and seen items, -1 for none."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randint(-2, 3, (rows, DIM), generator=draw).float() for rows in (SAMPLES, ITEMS))
    seen = torch.randint(-3, ITEMS, (SAMPLES, 9), generator=draw).clamp(min=-1)
    return hidden, weight, torch.randint(0, ITEMS, (SAMPLES,), generator=draw), seen


def _by_counting(scores: Tensor, targets: Tensor, seen: Tensor | None) -> list[int]:
    found = []
    for sample, target in enumerate(targets.tolist()):
        known = set() if seen is None else set(seen[sample].tolist())
        others = [item for item in range(scores.shape[1]) if item != target and item not in known]
        found.append(sum(float(scores[sample, item]) >= float(scores[sample, target]) for item in others))
    return found


@pytest.mark.parametrize("with_seen", [False, True])
@pytest.mark.parametrize("chunk", [1, 3 * ITEMS, 10**6])
def test_ranks_count_the_items_before_the_target(with_seen: bool, chunk: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_CHUNK_SCORES", chunk)
    hidden, weight, targets, seen = _given()
    known, bias = seen if with_seen else None, torch.arange(ITEMS) % 2.0
    scores = hidden @ weight.T + bias
    expected = _by_counting(scores, targets, known)
    assert len(set(expected)) > 10
    assert target_ranks(scores, targets, known).tolist() == expected
    assert catalogue_ranks(hidden, weight, targets, known, bias).tolist() == expected
    assert catalogue_ranks(hidden[:0], weight, targets[:0]).tolist() == []


def test_neither_a_constant_nor_a_diverged_model_looks_good() -> None:
    targets = torch.tensor([0, 3])
    for scores in (torch.zeros(2, ITEMS), torch.full((2, ITEMS), float("nan"))):
        assert target_ranks(scores, targets).tolist() == [ITEMS - 1] * 2
        assert HitRate(10)(target_ranks(scores, targets)) == 0


def test_metrics_are_those_of_torchmetrics() -> None:
    draw = torch.Generator().manual_seed(1)
    scores, targets = torch.rand(SAMPLES, ITEMS, generator=draw), torch.randint(0, ITEMS, (SAMPLES,), generator=draw)
    metrics = RankingMetrics(top_k=(1, 5, 20))
    for part in (slice(0, 10), slice(10, SAMPLES)):
        metrics.update(target_ranks(scores[part], targets[part]))
    found = metrics.compute()
    asked = nn.functional.one_hot(targets, ITEMS).bool()
    reciprocal = torch.stack([retrieval_reciprocal_rank(*sample) for sample in zip(scores, asked)])
    for k in (1, 5, 20):
        hits, gains = (
            torch.stack([function(*sample, top_k=k) for sample in zip(scores, asked)])
            for function in (retrieval_hit_rate, retrieval_normalized_dcg)
        )
        expected = {"HR": hits, "NDCG": gains, "MRR": reciprocal * (reciprocal * k > 0.999)}
        for name, each in expected.items():
            torch.testing.assert_close(found[f"{name}@{k}"], each.mean(), rtol=1e-6, atol=1e-7)


def _mine(rank: int, size: int) -> list[Tensor]:
    """Return the samples of a rank in batches of unequal size; the ranks have unequal numbers."""
    return list(torch.arange(SAMPLES).tensor_split([5, 20][: size - 1])[rank].split(4))


def _update(metrics: RankingMetrics, samples: Tensor) -> None:
    hidden, weight, targets, seen = _given()
    metrics.update(catalogue_ranks(hidden[samples], weight, targets[samples], seen[samples]))


def _on_ranks() -> dict[str, float]:
    metrics = RankingMetrics((3, 10))
    for samples in _mine(dist.get_rank(), dist.get_world_size()):
        _update(metrics, samples)
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_unequal_ranks_and_batches_give_the_metrics_of_one(ranks: int) -> None:
    whole = RankingMetrics((3, 10))
    _update(whole, torch.arange(SAMPLES))
    expected = {name: float(value) for name, value in whole.compute().items()}
    assert len(set(expected.values())) > 3
    for found in run_distributed(_on_ranks, ranks):
        assert found == pytest.approx(expected, rel=1e-7)


class _Logging(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = RankingMetrics(3, prefix="val_")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        _update(self.metrics, batch)
        self.log_dict(self.metrics, on_epoch=True)


def _validated() -> list[dict[str, float]]:
    mine = _mine(dist.get_rank(), 2)
    loader = DataLoader(mine, batch_size=None)
    fitted = trainer(devices=2, strategy="ddp")
    module = _Logging()
    return [{name: float(value) for name, value in fitted.validate(module, loader, verbose=False)[0].items()} for _ in range(2)]


def test_lightning_logs_them() -> None:
    """Check that the second validation starts from zero."""
    whole = RankingMetrics(3, prefix="val_")
    _update(whole, torch.arange(SAMPLES))
    expected = {name: float(value) for name, value in whole.compute().items()}
    for first, second in run_distributed(_validated, 2):
        assert first == second == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("top_k", [0, True, 1.5])
def test_a_number_of_items_that_is_none_is_refused(top_k: Any) -> None:
    with pytest.raises(ValueError, match="top_k="):
        HitRate(top_k)


def test_what_does_not_fit_is_refused() -> None:
    scores, targets = torch.rand(3, ITEMS), torch.zeros(3, dtype=torch.int64)
    for wrong in (targets[:2], targets.float()):
        with pytest.raises(ValueError, match="targets of shape"):
            target_ranks(scores, wrong)
    for seen in (targets, torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4)):
        with pytest.raises(ValueError, match="seen of shape"):
            target_ranks(scores, targets, seen)
    with pytest.raises(ValueError, match="hidden of shape"):
        catalogue_ranks(torch.rand(3, 2), torch.rand(ITEMS, 3), targets)
    with pytest.raises(ValueError, match="ranks of shape"):
        HitRate(3).update(scores)
