"""The samples of every step, and which rank takes which of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data.distributed import DistributedSampler

from lightning_freescale.balance.assign import assign, deal


class BalancedSampler(DistributedSampler[list[int]]):
    """Yields the index list of each step for one rank.

    The plan is a pure function of (costs, seed, epoch, step, world size): every rank computes the whole of it and takes its
    own column, without communication. Balancing changes which rank computes a sample, never which samples a step has.

    Args:
        costs: predicted compute time per sample, shape ``[samples]``.
        batch_size: samples per rank and step.
        num_replicas: world size.
        rank: the rank to yield for.
        seed: seeds the shuffle, together with the epoch.
        shuffle: draw a new order every epoch; else keep the order of the data set.
        balance: assign by cost; else deal contiguous runs.
        drop_last: leave out the samples of an incomplete last step. Otherwise the last step is uneven (counts differ by
            at most one), and fewer left-over samples than ranks join the step before, so every rank always has a sample.
        weights: weight of a sample in the mean loss, shape ``[samples]``; all one if not given.
        summed: the loss of a rank is a sum over its samples, not a mean.
    """

    def __init__(
        self,
        costs: ArrayLike,
        batch_size: int,
        *,
        num_replicas: int,
        rank: int,
        seed: int = 0,
        shuffle: bool = True,
        balance: bool = True,
        drop_last: bool = False,
        weights: ArrayLike | None = None,
        summed: bool = False,
    ) -> None:
        # DistributedSampler's own constructor insists on a data set; being one is what makes Lightning leave us alone.
        self.costs = np.asarray(costs, dtype=np.float64)
        self.weights = np.ones(len(self.costs)) if weights is None else np.asarray(weights, dtype=np.float64)
        if len(self.costs) < num_replicas:
            raise ValueError(
                f"{len(self.costs)} samples for {num_replicas} ranks: every rank needs at least one sample per step. "
                f"Use at most {len(self.costs)} devices or add samples."
            )
        self.batch_size, self.num_replicas, self.rank = batch_size, num_replicas, rank
        self.seed, self.shuffle, self.balance, self.drop_last = seed, shuffle, balance, drop_last
        self.summed, self.epoch = summed, 0
        self._resume = (0, 0)
        self._edges = self._cut()
        self._drawn: tuple[int, NDArray[np.int64]] | None = None
        self._planned: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
        if not len(self):
            raise ValueError(
                f"drop_last=True leaves no step: {len(self.costs)} samples are fewer than batch_size={batch_size} x "
                f"{num_replicas} ranks. Use drop_last=False or a smaller batch_size."
            )

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch

    def resume(self, epoch: int, batches: int) -> None:
        """Start ``epoch`` after its first ``batches`` steps; every other epoch starts at its beginning."""
        self._resume = (epoch, batches)

    def __len__(self) -> int:
        """Steps of a whole epoch, also after :meth:`resume`."""
        return len(self._edges) - 1

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        first = self._resume[1] if self._resume[0] == epoch else 0
        for step in range(first, len(self)):
            yield self.plan(epoch, step)[self.rank].tolist()

    def plan(self, epoch: int, step: int) -> list[NDArray[np.int64]]:
        """Samples of every rank in a step: ``ranks`` int arrays."""
        if (epoch, step) not in self._planned:
            if len(self._planned) > 1000:  # far more than any loader prefetches
                self._planned.clear()
            samples = self.global_batch(epoch, step)
            ranks = self._ranks(samples)
            self._planned[epoch, step] = [samples[ranks == rank] for rank in range(self.num_replicas)]
        return self._planned[epoch, step]

    def global_batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The samples of a step in drawn order, the same with and without balancing."""
        return self._order(epoch)[self._edges[step] : self._edges[step + 1]]

    def counts(self, step: int) -> list[int]:
        """Samples of every rank in a step of the current epoch."""
        return [len(part) for part in self.plan(self.epoch, step)]

    def loss_weight(self, step: int) -> float:
        """Factor for this rank's loss that makes the average over ranks the mean (or sum) over the step's global batch."""
        if self.summed:
            return float(self.num_replicas)
        parts = [self.weights[part].sum() for part in self.plan(self.epoch, step)]
        total = sum(parts)
        return float(parts[self.rank] * self.num_replicas / total) if total else 1.0

    def _ranks(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.balance:
            return assign(self.costs[samples], self.num_replicas).rank_of_sample
        return deal(len(samples), self.num_replicas)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._draw(epoch))
        return self._drawn[1]

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.costs))
        # RandomState's stream is frozen for good; Generator's may change between numpy versions
        return np.random.RandomState([self.seed, epoch]).permutation(len(self.costs))

    def _cut(self) -> list[int]:
        """Where the steps of an epoch begin and end in its order."""
        samples, per_step = len(self.costs), self.batch_size * self.num_replicas
        edges = list(range(0, samples + 1, per_step))
        rest = samples - edges[-1]
        if not rest or self.drop_last:
            return edges
        if rest < self.num_replicas:
            edges.pop()
        return [*edges, samples]
