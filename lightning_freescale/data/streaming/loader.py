"""Balanced batches from a data set that can only be iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from lightning_freescale.balance.assign import Assignment, assign
from lightning_freescale.balance.pool import LocalPool
from lightning_freescale.balance.report import StepBalance
from lightning_freescale.balance.sampler import rank_loss_weight
from lightning_freescale.data.streaming.assigned_steps import AssignedSteps, width
from lightning_freescale.data.streaming.pooled_steps import WIDTH, PooledSteps
from lightning_freescale.data.streaming.prefetch import PrefetchThread
from lightning_freescale.data.streaming.reader import Reader
from lightning_freescale.data.streaming.source import Source
from lightning_freescale.data.streaming.stream_group import StreamGroup, StreamStep

_WINDOW = 100
"""Steps that can still be asked about; the loop may be that far behind the loader."""


class BalancedStreamLoader:
    """Yields the collated batches of one rank, all ranks' batches of a step costing nearly the same.

    Every rank reads its own stream, in a thread that works behind the running step. What a sample costs is known when it
    arrives; there is no pass over the data before. The ranks perform the same number of steps.

    Iterate it once per epoch, on all ranks, at the same time. The data set is read in that thread (or in loader workers), so
    it must not draw from the global random state.

    Args:
        dataset: the rank's stream; see :class:`~lightning_freescale.data.streaming.source.Source` on workers and on what
            resuming needs.
        batch_size: samples per rank and step.
        cost: predicted compute time of a sample, in any unit.
        weight: weight of a sample in the mean loss; every sample weighs 1 if not given.
        summed: the loss of a rank is a sum over its samples, not a mean.
        exchange: ``"none"``: each rank picks its batches from a pool of its own samples. ``"samples"``: the samples that the
            ranks read side by side are assigned as one global batch and sent to the rank that computes them.
        rank: the own rank.
        world_size: number of ranks.
        group: of all ranks, of backend freescale or gloo, used by nobody else; needed for more than one rank. The loader does
            not close it.
        collate_fn: turns the list of samples of a step into a batch; torch's default if not given.
        num_workers: as in ``torch.utils.data.DataLoader``.
        pool_batches: for ``"none"``: batches that the pool holds.
        max_age: for ``"none"``: batches that a sample waits in the pool at most; ``None``: as long as it takes.
        drop_last: leave out the samples of an incomplete last step.
        ahead: batches made ahead of the running step, at least 1.
        assign: for ``"samples"``: gives the ranks from the costs of a global batch and the number of ranks.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        cost: Callable[[Any], float],
        weight: Callable[[Any], float] | None = None,
        summed: bool = False,
        exchange: Literal["none", "samples"] = "none",
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pool_batches: int = 8,
        max_age: int | None = 32,
        drop_last: bool = False,
        ahead: int = 2,
        assign: Callable[[NDArray[np.float64], int], Assignment] = assign,
    ) -> None:
        _check(dataset, batch_size, exchange, world_size, group, ahead)
        LocalPool(batch_size, pool_batches, max_age)  # tells what does not fit
        self.dataset, self.batch_size, self.exchange, self.num_workers = dataset, batch_size, exchange, num_workers
        self.rank, self.num_replicas, self.drop_last, self.epoch = rank, world_size, drop_last, 0
        self._cost, self._weight, self._summed, self._assign = cost, weight, summed, assign
        self._pool_size, self._ahead, self._collate = (pool_batches, max_age), ahead, collate_fn or default_collate
        self._group = group if world_size > 1 else None
        self._source = Source(dataset, batch_size, num_workers)
        self._steps: dict[int, StreamStep] = {}
        self._resume: dict[str, Any] | None = None

    @property
    def sampler(self) -> BalancedStreamLoader:
        """What the strategy asks for the weights of a step: the loader itself."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Told to the data set at the start of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        resume = self._resume if self._resume is not None and self._resume["epoch"] == self.epoch else None
        self._steps = {}
        producer = PrefetchThread(self._batches(None if resume is None else resume["stream"]), self._ahead)
        try:
            for batch, step in producer:
                self._steps[step.step] = step
                self._steps.pop(step.step - _WINDOW - self._ahead, None)
                yield batch
        finally:
            producer.close()

    # -- what the steps are

    def counts(self, step: int) -> list[int]:
        """Samples of every rank in a step of this epoch."""
        return self._step(step).counts

    def costs(self, step: int) -> NDArray[np.float64]:
        """Cost of every rank's batch in a step, shape ``[ranks]``."""
        return self._step(step).costs

    def drawn(self, step: int) -> NDArray[np.float64]:
        """What every rank's batch of a step would have cost as read, shape ``[ranks]``."""
        return self._step(step).drawn

    def loss_weight(self, step: int) -> float:
        """Factor for this rank's loss that makes the average over ranks the mean (or sum) over the step's global batch."""
        weights = self._step(step).weights
        if self._summed:
            return float(self.num_replicas)
        return rank_loss_weight(weights.tolist(), self.rank)

    def balance(self, step: int) -> StepBalance:
        """What balancing a step is worth."""
        return self._step(step).balance

    def stream_bound(self) -> float:
        """Max over ranks / mean over ranks of the mean cost of the samples that each has read so far; 1.0 before the first.

        In the long run no pool of a rank's own samples gets below it: a stream of costlier samples needs another rank's help.
        """
        if not self._steps:
            return 1.0
        cost, samples = self._steps[max(self._steps)].read.T
        means = cost / np.maximum(samples, 1)
        return float(means.max() / means.mean()) if means.any() else 1.0

    def _step(self, step: int) -> StreamStep:
        if step not in self._steps:
            known = f"{min(self._steps)} to {max(self._steps)}" if self._steps else "none"
            raise ValueError(f"step={step} of this epoch is not known: only those just loaded are ({known})")
        return self._steps[step]

    # -- resume

    def state_after(self, batches: int) -> dict[str, Any]:
        """Where this rank's stream goes on after that many batches of the epoch; holds no samples, only plain values.

        Raises:
            ValueError: it is too long ago, or those batches were not loaded yet.
        """
        if self._resume is not None and self._resume["epoch"] == self.epoch and self._resume["batches"] == batches:
            return self._resume
        stream = self._step(batches - 1).state if batches else None
        return {"epoch": self.epoch, "batches": batches, "stream": stream, **self._kind()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Iterating ``state``'s epoch starts after its batches; any other epoch starts at its beginning.

        Raises:
            ValueError: the state is one of another rank, or of a loader whose steps would be others.
        """
        for name, value in self._kind().items():
            if state["stream"] is not None and state[name] != value:
                raise ValueError(
                    f"the checkpoint stopped inside an epoch with {name}={state[name]!r}, this loader has {name}={value!r}: "
                    "samples would be lost or repeated. Keep it as it was, or resume from the end of an epoch."
                )
        self._resume = state

    def _kind(self) -> dict[str, Any]:
        """What the steps of an epoch depend on, beside the stream."""
        kind: dict[str, Any] = {name: getattr(self, name) for name in ("rank", "batch_size", "exchange", "drop_last")}
        kind |= {"world_size": self.num_replicas, "num_workers": self.num_workers}
        return (
            kind if self.exchange == "samples" else kind | {"pool_batches": self._pool_size[0], "max_age": self._pool_size[1]}
        )

    # -- the thread

    def _batches(self, state: dict[str, Any] | None) -> Iterator[tuple[Any, StreamStep]]:
        """Workers start here; everything else happens where the result is iterated."""
        seed = torch.initial_seed() + 1_000_003 * self.epoch + self.rank
        reader_state = None if state is None else state["reader"]
        reader = Reader(self._source, self._cost, self._weight, epoch=self.epoch, seed=seed, state=reader_state)
        ranks = StreamGroup(
            self.rank, self.num_replicas, self._group, WIDTH if self.exchange == "none" else width(self.batch_size)
        )
        steps: PooledSteps | AssignedSteps
        if self.exchange == "none":
            steps = PooledSteps(reader, ranks, LocalPool(self.batch_size, *self._pool_size), self.drop_last, state)
        else:
            steps = AssignedSteps(reader, ranks, self.batch_size, self._assign, self.drop_last, state)
        return ranks.guard(self._collated(reader, steps))

    def _collated(self, reader: Reader, steps: Iterable[tuple[list[Any], StreamStep]]) -> Iterator[tuple[Any, StreamStep]]:
        try:
            for samples, step in steps:
                yield self._collate(samples), step
        finally:
            reader.close()


def _check(dataset: Any, batch_size: int, exchange: str, world_size: int, group: Any, ahead: int) -> None:
    if not isinstance(dataset, IterableDataset):
        raise ValueError(f"StreamLoader(dataset={type(dataset).__name__}): pass a torch.utils.data.IterableDataset")
    if batch_size < 1 or ahead < 1:
        raise ValueError(f"StreamLoader(batch_size={batch_size!r}, ahead={ahead!r}): both must be at least 1")
    if exchange not in ("none", "samples"):
        raise ValueError(f"StreamLoader(exchange={exchange!r}): choose 'none' or 'samples'")
    if world_size > 1 and group is None:
        raise ValueError(f"StreamLoader(world_size={world_size}, group=None): pass a gloo group of all ranks")
