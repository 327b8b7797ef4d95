"""Hit rate and NDCG over the full catalogue, as torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class _AtK(Metric):
    """Mean of a gain of the target's rank, 0 from rank ``k`` on; exact over all ranks and uneven batches."""

    full_state_update = False

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.add_state("gain", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rated: Tensor, target: Tensor) -> None:
        """``rated`` has shape ``[samples, items]``, ``target`` ``[samples]``; ties count against the target."""
        mine = rated.gather(1, target[:, None])
        rank = (rated >= mine).sum(dim=1) - 1
        self.gain += torch.where(rank < self.k, self._gain(rank), 0.0).double().sum()
        self.samples += len(target)

    def compute(self) -> Tensor:
        """Return the mean gain so far."""
        return (self.gain / self.samples).float()

    def _gain(self, rank: Tensor) -> Tensor:
        raise NotImplementedError


class HitRate(_AtK):
    """Share of samples whose target is among the first ``k``."""

    def _gain(self, rank: Tensor) -> Tensor:
        return torch.ones_like(rank, dtype=torch.float32)


class NDCG(_AtK):
    """Normalized discounted cumulative gain with one relevant item: ``1 / log2(rank + 2)``."""

    def _gain(self, rank: Tensor) -> Tensor:
        return 1.0 / torch.log2(rank + 2.0)


class FullRank(torch.nn.Module):
    """Both metrics, updated together."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.hit_rate, self.ndcg = k, HitRate(k), NDCG(k)

    def update(self, rated: Tensor, target: Tensor) -> None:
        """See :meth:`_AtK.update`."""
        self.hit_rate.update(rated, target)
        self.ndcg.update(rated, target)

    def by_name(self) -> dict[str, Metric]:
        """Return the metrics by name, for ``log_dict``."""
        return {f"HR@{self.k}": self.hit_rate, f"NDCG@{self.k}": self.ndcg}
