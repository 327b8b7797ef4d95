"""Ranking metrics over a whole catalogue of items, as torchmetrics."""

from lightning_freescale.metrics.ranking import MRR, NDCG, HitRate, RankingMetrics
from lightning_freescale.metrics.ranks import catalogue_ranks, target_ranks

__all__ = ["MRR", "NDCG", "HitRate", "RankingMetrics", "catalogue_ranks", "target_ranks"]
