"""Hit rate, NDCG and MRR, from the rank of each target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override


class _MeanGain(Metric):
    """The mean over all samples of a gain, which a rank of ``top_k`` or more does not have.

    Gains and samples are summed over the ranks of a run in float64, so the mean is exact for unequal numbers of samples.
    """

    full_state_update = False
    higher_is_better = True

    def __init__(self, top_k: int = 10, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise ValueError(f"{type(self).__name__}(top_k={top_k!r}): pass how many items are recommended, at least 1")
        self.top_k = top_k
        self.gain: Tensor
        self.samples: Tensor
        self.add_state("gain", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, ranks: Tensor) -> None:
        """Add samples, by the rank of their target: int64 of shape ``[samples]``, 0 for the best."""
        if ranks.dim() != 1 or ranks.is_floating_point():
            raise ValueError(
                f"{type(self).__name__}.update(ranks of shape {list(ranks.shape)} and dtype {ranks.dtype}): pass what "
                "target_ranks returns, one whole number for each sample"
            )
        self.gain += torch.where(ranks < self.top_k, self._gain(ranks.double()), 0.0).sum()
        self.samples += len(ranks)

    @override
    def compute(self) -> Tensor:
        """Return the mean; NaN without a sample."""
        return (self.gain / self.samples).float()

    def _gain(self, ranks: Tensor) -> Tensor:
        raise NotImplementedError


class HitRate(_MeanGain):
    """Share of the samples whose target is among the first ``top_k`` items."""

    def _gain(self, ranks: Tensor) -> Tensor:
        return torch.ones_like(ranks)


class NDCG(_MeanGain):
    """Normalized discounted cumulative gain with one relevant item: ``1 / log2(rank + 2)``.

    Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques (2002).
    """

    def _gain(self, ranks: Tensor) -> Tensor:
        return 1.0 / torch.log2(ranks + 2.0)


class MRR(_MeanGain):
    """Mean reciprocal rank: ``1 / (rank + 1)``."""

    def _gain(self, ranks: Tensor) -> Tensor:
        return 1.0 / (ranks + 1.0)


class RankingMetrics(MetricCollection):
    """Hit rate, NDCG and MRR at several numbers of recommended items, as ``HR@10``, ``NDCG@10`` and ``MRR@10``.

    Args:
        top_k: how many items are recommended, one number or several.
        **options: of ``torchmetrics.MetricCollection``, such as ``prefix``.

    Examples:
        >>> from lightning_freescale.metrics import target_ranks
        >>> metrics = RankingMetrics(top_k=(1, 2))
        >>> metrics.update(target_ranks(torch.tensor([[0.1, 0.5, 0.3]]), torch.tensor([2])))
        >>> {name: round(float(value), 3) for name, value in metrics.compute().items()}
        {'HR@1': 0.0, 'HR@2': 1.0, 'MRR@1': 0.0, 'MRR@2': 0.5, 'NDCG@1': 0.0, 'NDCG@2': 0.631}
    """

    def __init__(self, top_k: int | Sequence[int] = 10, **options: Any) -> None:
        several = [top_k] if isinstance(top_k, int) else list(top_k)
        kinds: dict[str, type[_MeanGain]] = {"HR": HitRate, "NDCG": NDCG, "MRR": MRR}
        metrics: dict[str, Any] = {f"{name}@{k}": kind(k) for name, kind in kinds.items() for k in several}
        super().__init__(metrics, **{"compute_groups": False, **options})
