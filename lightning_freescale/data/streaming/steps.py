"""Assign the samples that the ranks read from their streams to steps, and send each to the rank that computes it."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_freescale.balance.assign import Assignment, assignment_bound, contiguous_split, imbalance, load_imbalance
from lightning_freescale.balance.micro_batches import most_parts
from lightning_freescale.balance.report import StepBalance
from lightning_freescale.comm.collectives.eager_exchange import exchange_bytes
from lightning_freescale.data.streaming.reader import StreamReader

T = TypeVar("T")

_COST, _WEIGHT, _OWNER, _ROUND = range(4)  # rows of the queue
_FAILED = b"!"  # sent instead of samples; no pickle is a single byte of this kind


@dataclass(frozen=True)
class StreamStep:
    """The description of one step that all ranks have.

    Attributes:
        step: number of the step in the epoch.
        counts: samples per rank.
        costs: cost per rank, shape ``[ranks]``.
        weights: weight per rank in the mean loss, shape ``[ranks]``.
        most_parts: the most micro-batches into which each rank's samples can be cut.
        unbalanced_costs: cost of each rank's batch as read, shape ``[ranks]``.
        state: the state of the rank's stream after the step.
        lower_bound: the imbalance that no assignment of the step's samples can beat.
        dominated: a single sample costs more than the mean rank's.
    """

    step: int
    counts: list[int]
    costs: NDArray[np.float64]
    weights: NDArray[np.float64]
    most_parts: list[int]
    unbalanced_costs: NDArray[np.float64]
    state: dict[str, Any]
    lower_bound: float
    dominated: bool

    @property
    def balance(self) -> StepBalance:
        """The imbalance of the step with and without the assignment."""
        return StepBalance(
            unbalanced=load_imbalance(self.unbalanced_costs),
            balanced=load_imbalance(self.costs),
            lower_bound=self.lower_bound,
            dominated=self.dominated,
            tokens_imbalance=None,
            cost=float(self.costs.sum()),
        )


@dataclass(eq=False)
class AssignedSteps:
    """Assign the samples that the ranks read side by side as one global batch (arXiv 2604.24073).

    In a round every rank reads ``batch_size`` samples and sends their costs to all ranks. All ranks keep the same queue of
    these costs, cut the next global batch from it, compute the same assignment, and exchange the samples. When streams end at
    different times, the longer ones fill the steps of all ranks.

    Args:
        reader: the rank's stream.
        group: all ranks, with rows of :meth:`row_width`.
        batch_size: samples per rank and step.
        assign_fn: returns an assignment for the costs of a global batch and the number of ranks.
        drop_last: leave out the samples of an incomplete last step.
        state: the state after an earlier step, see :class:`StreamStep`; None at the start of an epoch.
    """

    reader: StreamReader
    group: StreamGroup
    batch_size: int
    assign_fn: Callable[[NDArray[np.float64], int], Assignment]
    drop_last: bool
    state: dict[str, Any] | None

    def __post_init__(self) -> None:
        self._queue = np.empty((4, 0))
        self._own_numbers: deque[int] = deque()  # of the own samples in the queue, in its order
        self._rounds = self._step = 0

    @staticmethod
    def row_width(batch_size: int) -> int:
        """Return how many numbers a rank sends in a round: how many samples it read, their costs, and their weights."""
        return 1 + 2 * batch_size

    def __iter__(self) -> Iterator[tuple[list[Any], StreamStep]]:
        if self.state is not None:
            # each rank's state holds only its own samples, so the ranks exchange the costs in the queue again
            self.reader.reread_held_samples()
            held = iter(self.state["reader"]["held"])
            self._rounds = self.state["first_round"]
            for count in self.state["rounds"]:
                self._share_round(list(islice(held, count)))
            self._step = self.state["step"]
        while size := self._next_size():
            batch, self._queue = self._queue[:, :size], self._queue[:, size:]
            assignment = self.assign_fn(batch[_COST], self.group.size)
            samples = self._exchange_samples(batch[_OWNER], assignment.rank_of_sample)
            self._step += 1
            yield samples, self._describe_step(batch, assignment)

    def _next_size(self) -> int:
        """Read on; return the samples of the next global batch, 0 at the end."""
        whole = self.group.size * self.batch_size
        while True:  # at least one round for every step, so that a rank that fails can report it in the next one
            counts = self._share_round(self.reader.read_samples(self.batch_size))
            left = self._queue.shape[1]
            # one global batch more than the next must be known, to see whether it is the last
            if (counts < self.batch_size).all() or left >= 2 * whole:
                break
        if left >= (whole if self.drop_last else self.group.size):
            # Left-over samples, fewer than ranks, join the last step: as a step of their own they would leave a rank without
            # a sample, and its collectives would hang.
            return whole if self.drop_last or left - whole >= self.group.size else left
        if not self._step:
            raise ValueError(
                f"the streams have {left} samples, too few for one step of {self.group.size} ranks with "
                f"batch_size={self.batch_size} and drop_last={self.drop_last}: use fewer ranks or add samples"
            )
        return 0

    def _share_round(self, numbers: Any) -> NDArray[np.int64]:
        """Append the samples that every rank read in this round to the queue; return the number of each rank."""
        size = self.batch_size
        row = np.zeros(self.group.width)
        row[0] = len(numbers)
        row[1 : 1 + len(numbers)] = self.reader.costs(numbers)
        row[1 + size :][: len(numbers)] = self.reader.weights(numbers)
        table = self.group.gather_rows(row)
        counts = table[:, 0].astype(np.int64)
        costs, weights = table[:, 1 : 1 + size], table[:, 1 + size :]
        was_read = np.arange(size) < counts[:, None]
        owner = was_read.nonzero()[0]
        added = np.stack([costs[was_read], weights[was_read], owner, np.full(len(owner), self._rounds)])
        self._queue = np.concatenate([self._queue, added], axis=1)
        self._own_numbers.extend(numbers)
        self._rounds += 1
        return counts

    def _exchange_samples(self, owner: NDArray[np.float64], rank_of_sample: NDArray[np.int64]) -> list[Any]:
        """Send the own samples of a global batch to their ranks; return this rank's batch, in the order of the queue."""
        outgoing: list[list[Any]] = [[] for _ in range(self.group.size)]
        for rank in rank_of_sample[owner == self.group.rank]:
            outgoing[rank] += self.reader.pop_samples([self._own_numbers.popleft()])
        incoming = [iter(samples) for samples in self.group.exchange_samples(outgoing)]
        return [next(incoming[int(source)]) for source in owner[rank_of_sample == self.group.rank]]

    def _describe_step(self, batch: NDArray[np.float64], assignment: Assignment) -> StreamStep:
        size, rank_of_sample = self.group.size, assignment.rank_of_sample
        return StreamStep(
            step=self._step - 1,
            counts=np.bincount(rank_of_sample, minlength=size).tolist(),
            costs=_sum_per_rank(rank_of_sample, batch[_COST], size),
            weights=_sum_per_rank(rank_of_sample, batch[_WEIGHT], size),
            most_parts=[most_parts(batch[_WEIGHT, rank_of_sample == rank]) for rank in range(size)],
            unbalanced_costs=_sum_per_rank(contiguous_split(batch.shape[1], size), batch[_COST], size),
            state=self._state_dict(),
            lower_bound=assignment.lower_bound,
            dominated=assignment.dominated,
        )

    def _state_dict(self) -> dict[str, Any]:
        first = int(self._queue[_ROUND, 0]) if self._queue.shape[1] else self._rounds
        own_rounds = self._queue[_ROUND, self._queue[_OWNER] == self.group.rank].astype(np.int64) - first
        rounds = np.bincount(own_rounds, minlength=self._rounds - first).tolist()
        return {"reader": self.reader.state_dict(), "first_round": first, "rounds": rounds, "step": self._step}


def assign_as_read(costs: NDArray[np.float64], ranks: int) -> Assignment:
    """Return the assignment in which the ranks keep their own samples, and share what is left at the end."""
    rank_of_sample = contiguous_split(len(costs), ranks)
    bound, dominated = assignment_bound(costs, ranks)
    return Assignment(rank_of_sample, imbalance(costs, rank_of_sample, ranks), bound, None, dominated)


def _sum_per_rank(rank_of_sample: NDArray[np.int64], values: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    return np.bincount(rank_of_sample, values, ranks).astype(np.float64)


class PeerFailed(RuntimeError):  # noqa: N818 (says what happened)
    """Another rank's stream failed, or that rank is gone."""


@dataclass(eq=False)
class StreamGroup:
    """The ranks of a group that read streams side by side.

    Args:
        rank: the own rank.
        size: number of ranks.
        group: a process group for CPU tensors that has no other use; needed for more than one rank.
        width: numbers that a rank sends to the others at a time.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    width: int
    _others_know: bool = field(default=False, init=False)  # that this rank has failed

    def gather_rows(self, row: ArrayLike) -> NDArray[np.float64]:
        """Return every rank's row, shape ``[ranks, width]``. Collective.

        Raises:
            PeerFailed: another rank failed or ended.
        """
        table = self._all_gather(np.append(row, 0.0))
        failed = np.flatnonzero(table[:, -1])
        if failed.size:
            raise PeerFailed(f"rank {failed[0]} failed to read its stream: see its own traceback")
        return table[:, :-1]

    def exchange_samples(self, outgoing: list[list[Any]]) -> list[list[Any]]:
        """Send the samples ``outgoing[r]`` to rank ``r``; return the samples from each rank. Collective.

        Raises:
            PeerFailed: another rank could not pickle its samples, or ended.
        """
        if self.group is None:
            return outgoing
        try:
            pickled = [b"" if rank == self.rank or not sent else pickle.dumps(sent, 5) for rank, sent in enumerate(outgoing)]
        except Exception:
            self._others_know = True
            self._exchange_bytes([_FAILED] * self.size)
            raise
        incoming = [self._unpickle(rank, content) for rank, content in enumerate(self._exchange_bytes(pickled))]
        incoming[self.rank] = outgoing[self.rank]
        return incoming

    def report_failure(self, items: Iterator[T]) -> Generator[T, None, None]:
        """Yield the items. If making one fails, report it to the other ranks, so that they do not wait for this one."""
        try:
            yield from items
        except Exception as error:
            if not self._others_know and not isinstance(error, PeerFailed):
                with contextlib.suppress(PeerFailed):  # the first error matters more than that a report fails
                    self._all_gather(np.append(np.zeros(self.width), 1.0))
            raise

    def _exchange_bytes(self, outgoing: list[bytes]) -> list[Tensor]:
        assert self.group is not None
        try:
            return exchange_bytes(outgoing, self.group)
        except RuntimeError as error:
            raise PeerFailed(f"rank {self.rank} could not exchange samples with the other ranks: {error}") from error

    def _unpickle(self, rank: int, received: Tensor) -> list[Any]:
        content = received.numpy().tobytes()
        if content == _FAILED:
            raise PeerFailed(f"rank {rank} could not pickle its samples: see its own traceback")
        return pickle.loads(content) if len(content) else []  # noqa: S301 (from a rank of this very run)

    def _all_gather(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.group is None:
            return row[None]
        own_row = torch.from_numpy(row)
        rows = [torch.empty_like(own_row) for _ in range(self.size)]
        try:
            dist.all_gather(rows, own_row, group=self.group)
        except RuntimeError as error:
            raise PeerFailed(f"rank {self.rank} lost another rank while reading the streams: {error}") from error
        return torch.stack(rows).numpy()
