"""Ranking metrics over a whole catalogue of items, as torchmetrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

__all__ = ["MRR", "NDCG", "HitRate", "RankingMetrics", "catalogue_ranks", "target_ranks"]

_CHUNK_SCORES = 2**24
"""The number of scores in memory at one time: 64 MiB in float32."""


@torch.no_grad()
def target_ranks(scores: Tensor, targets: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return the rank of each target: the number of items that are ranked before it.

    Items with the same score as the target and items with a NaN score are ranked before it. So a constant model and a
    diverged model get bad ranks.

    Args:
        scores: shape ``[samples, items]``.
        targets: the relevant item of each sample, int64 of shape ``[samples]``.
        seen: items to exclude, int64 of shape ``[samples, any]``; negative values are padding. A target is never excluded.

    Returns:
        int64 of shape ``[samples]``; 0 is the best rank.

    Raises:
        ValueError: a shape or dtype is wrong.

    Examples:
        >>> target_ranks(torch.tensor([[0.1, 0.5, 0.3], [0.2, 0.2, 0.1]]), torch.tensor([2, 0]))
        tensor([1, 1])
    """
    _check(scores.shape, targets, seen)
    return _ranks(scores, targets, seen)


@torch.no_grad()
def catalogue_ranks(
    hidden: Tensor, table: Tensor | nn.Module, targets: Tensor, seen: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the :func:`target_ranks` of the scores ``hidden @ weight.T + bias``, computed in chunks of samples.

    A table that strategy ``"freescale"`` shards is not gathered outside of training steps and without ``bias``: each rank
    scores the samples of all ranks against its own rows, in float64. The ranks may make different numbers of calls. With
    ``bias``, or in a training step, the whole table is gathered on the rank.

    Args:
        hidden: the hidden state of each sample, shape ``[samples, dim]``.
        table: the weight of shape ``[items, dim]``, or a module with this ``weight``.
        targets: see :func:`target_ranks`.
        seen: see :func:`target_ranks`.
        bias: shape ``[items]``.

    Returns:
        int64 of shape ``[samples]``; 0 is the best rank.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    weight: Any = table.weight if isinstance(table, nn.Module) else table
    # the weight of a sharded table has these attributes
    whole, over_shards = (getattr(weight, f"freescale_{name}", None) for name in ("catalogue", "ranks"))
    if hidden.dim() != 2 or (whole is None and (weight.dim() != 2 or hidden.shape[1] != weight.shape[1])):
        raise ValueError(
            f"catalogue_ranks got hidden of shape {list(hidden.shape)} and a table of shape {list(weight.shape)}. Pass "
            "[samples, dim] and [items, dim]."
        )
    _check(torch.Size((len(hidden), len(weight))), targets, seen)
    ranks: Tensor | None = None if over_shards is None or bias is not None else over_shards(hidden, targets, seen)
    if ranks is not None:
        return ranks
    weight = weight if whole is None else whole()
    found, size = torch.empty_like(targets), max(1, _CHUNK_SCORES // max(1, len(weight)))
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        scores = torch.nn.functional.linear(hidden[part], weight, bias)
        found[part] = _ranks(scores, targets[part], None if seen is None else seen[part])
    return found


def _check(shape: torch.Size, targets: Tensor, seen: Tensor | None) -> None:
    if len(shape) != 2 or targets.shape != shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets of shape {list(targets.shape)} and dtype {targets.dtype} have no ranks in scores of shape {list(shape)}. "
            "Pass scores of shape [samples, items] and one int64 target per sample."
        )
    if seen is not None and (seen.dim() != 2 or len(seen) != shape[0] or seen.dtype != torch.int64):
        raise ValueError(
            f"got seen of shape {list(seen.shape)} and dtype {seen.dtype} for {shape[0]} samples. Pass int64 of shape "
            "[samples, any]. Pad samples that have seen fewer items with negative values."
        )


def _ranks(scores: Tensor, targets: Tensor, seen: Tensor | None) -> Tensor:
    before = ~(scores < scores.gather(1, targets[:, None]))  # True for NaN
    if seen is not None:
        rows, places = (seen >= 0).nonzero(as_tuple=True)
        before[rows, seen[rows, places]] = False
    return before.scatter_(1, targets[:, None], False).sum(dim=1)


class _MeanGain(Metric):
    """The mean gain of all samples; ranks of ``top_k`` or more have no gain.

    Gains and samples are summed over the ranks of a run in float64. So the mean is exact for unequal numbers of samples.
    """

    full_state_update = False
    higher_is_better = True

    def __init__(self, top_k: int = 10, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise ValueError(f"{type(self).__name__} got top_k={top_k!r}. Pass the number of recommended items, at least 1.")
        self.top_k = top_k
        self.gain: Tensor
        self.samples: Tensor
        self.add_state("gain", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, ranks: Tensor) -> None:
        """Add samples by the ranks of their targets, a result of :func:`target_ranks`. Other shapes are a ValueError."""
        if ranks.dim() != 1 or ranks.is_floating_point():
            raise ValueError(
                f"{type(self).__name__}.update got ranks of shape {list(ranks.shape)} and dtype {ranks.dtype}. Pass the result "
                "of target_ranks, one integer per sample."
            )
        self.gain += torch.where(ranks < self.top_k, self._gain(ranks.double()), 0.0).sum()
        self.samples += len(ranks)

    @override
    def compute(self) -> Tensor:
        """Return the mean; NaN if there are no samples."""
        return (self.gain / self.samples).float()

    def _gain(self, ranks: Tensor) -> Tensor:
        raise NotImplementedError


class HitRate(_MeanGain):
    """The share of samples whose target is among the first ``top_k`` items."""

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
    """Hit rate, NDCG and MRR for one or several ``top_k``, named ``HR@10``, ``NDCG@10`` and ``MRR@10``.

    Args:
        top_k: the number of recommended items; an integer or a sequence of integers.
        **options: options of ``torchmetrics.MetricCollection``, such as ``prefix``.

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
