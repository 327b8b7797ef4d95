"""Assign the samples of all ranks' streams to steps and ranks, and send each sample to its rank."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

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

_COST, _WEIGHT, _OWNER, _ROUND = range(4)  # rows of the queue
_FAILED = b"!"  # sent instead of samples; it is no valid pickle


@dataclass(frozen=True)
class StreamStep:
    """The description of one step, the same on all ranks except for ``state``."""

    step: int  # number of the step in the epoch
    counts: list[int]  # samples per rank
    costs: NDArray[np.float64]  # cost per rank, shape [ranks]
    weights: NDArray[np.float64]  # weight per rank in the mean loss, shape [ranks]
    most_parts: list[int]  # the largest possible number of micro-batches of each rank
    balance: StepBalance  # imbalance of the step with and without the assignment
    state: dict[str, Any]  # of the rank's stream after the step


@dataclass(eq=False)
class AssignedSteps:
    """Assigns the samples that the ranks read at the same time as one global batch (arXiv 2604.24073).

    In a round, every rank reads ``batch_size`` samples and sends their costs to all ranks. All ranks keep the same queue of
    these costs. They cut the next global batch from it, compute the same assignment, and exchange the samples. If streams end
    at different times, the longer ones fill the steps of all ranks.

    ``state`` is the state after an earlier step, see :class:`StreamStep`; None at the start of an epoch. Other arguments are
    those of :class:`BalancedStreamLoader`.
    """

    reader: StreamReader
    group: StreamGroup
    batch_size: int
    assign_fn: Callable[[NDArray[np.float64], int], Assignment]
    drop_last: bool
    state: dict[str, Any] | None

    def __post_init__(self) -> None:
        self._queue = np.empty((4, 0))
        self._own_numbers: deque[int] = deque()  # the numbers of this rank's samples in the queue, in its order
        self._rounds = self._step = 0

    def __iter__(self) -> Iterator[tuple[list[Any], NDArray[np.float64], StreamStep]]:
        """Yield this rank's samples of a step, their costs and weights, shape ``[2, samples]``, and the step."""
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
            costs_and_weights = batch[: _WEIGHT + 1, assignment.rank_of_sample == self.group.rank]
            self._step += 1
            yield samples, costs_and_weights, self._describe_step(batch, assignment)

    def _next_size(self) -> int:
        """Read until the next global batch is complete; return its size, 0 at the end."""
        whole = self.group.size * self.batch_size
        while True:  # at least one round per step, in which a rank can report a failure
            counts = self._share_round(self.reader.read_samples(self.batch_size))
            left = self._queue.shape[1]
            # another complete batch shows that the next one is not the last
            if (counts < self.batch_size).all() or left >= 2 * whole:
                break
        if left >= (whole if self.drop_last else self.group.size):
            # If fewer samples than ranks remain, they join the last step. In a separate step, a rank without a sample would
            # not take part in the collectives.
            return whole if self.drop_last or left - whole >= self.group.size else left
        if not self._step:
            raise ValueError(
                f"the streams have {left} samples, which is too few for one step of {self.group.size} ranks with "
                f"batch_size={self.batch_size} and drop_last={self.drop_last}. Use fewer ranks, or add samples"
            )
        return 0

    def _share_round(self, numbers: Any) -> NDArray[np.int64]:
        """Append the samples of all ranks in this round to the queue; return their number on each rank."""
        size = self.batch_size
        row = np.zeros(self.group.width)  # the number of samples, their costs, and their weights
        row[0] = len(numbers)
        row[1:].reshape(2, size)[:, : len(numbers)] = self.reader.costs_and_weights(numbers)
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
        """Send this rank's samples to their ranks; return the samples of this rank's batch, in the order of the queue."""
        outgoing: list[list[Any]] = [[] for _ in range(self.group.size)]
        for rank in rank_of_sample[owner == self.group.rank]:
            outgoing[rank].append(self.reader.pop_sample(self._own_numbers.popleft()))
        incoming = [iter(samples) for samples in self.group.exchange_samples(outgoing)]
        return [next(incoming[int(source)]) for source in owner[rank_of_sample == self.group.rank]]

    def _describe_step(self, batch: NDArray[np.float64], assignment: Assignment) -> StreamStep:
        size, rank_of_sample = self.group.size, assignment.rank_of_sample
        costs = _sum_per_rank(rank_of_sample, batch[_COST], size)
        return StreamStep(
            step=self._step - 1,
            counts=np.bincount(rank_of_sample, minlength=size).tolist(),
            costs=costs,
            weights=_sum_per_rank(rank_of_sample, batch[_WEIGHT], size),
            most_parts=[most_parts(batch[_WEIGHT, rank_of_sample == rank]) for rank in range(size)],
            balance=StepBalance(
                unbalanced=load_imbalance(_sum_per_rank(contiguous_split(batch.shape[1], size), batch[_COST], size)),
                balanced=load_imbalance(costs),
                lower_bound=assignment.lower_bound,
                dominated=assignment.dominated,
                tokens_imbalance=None,
                cost=float(costs.sum()),
            ),
            state=self._state_dict(),
        )

    def _state_dict(self) -> dict[str, Any]:
        first = int(self._queue[_ROUND, 0]) if self._queue.shape[1] else self._rounds
        own_rounds = self._queue[_ROUND, self._queue[_OWNER] == self.group.rank].astype(np.int64) - first
        rounds = np.bincount(own_rounds, minlength=self._rounds - first).tolist()
        return {"reader": self.reader.state_dict(), "first_round": first, "rounds": rounds, "step": self._step}


def assign_as_read(costs: NDArray[np.float64], ranks: int) -> Assignment:
    """Return the assignment in which the ranks keep their own samples, and share those of an incomplete last step."""
    rank_of_sample = contiguous_split(len(costs), ranks)
    bound, dominated = assignment_bound(costs, ranks)
    return Assignment(rank_of_sample, imbalance(costs, rank_of_sample, ranks), bound, None, dominated)


def _sum_per_rank(rank_of_sample: NDArray[np.int64], values: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    return np.bincount(rank_of_sample, values, ranks).astype(np.float64)


class PeerFailed(RuntimeError):  # noqa: N818 (the name states the event)
    """Another rank failed to read its stream, or terminated."""


@dataclass(eq=False)
class StreamGroup:
    """The ranks that read streams together; ``width`` is the length of the rows of :meth:`gather_rows`."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    width: int
    _reported: bool = field(default=False, init=False)  # whether the other ranks know of this rank's failure

    def gather_rows(self, row: ArrayLike) -> NDArray[np.float64]:
        """Return every rank's row, shape ``[ranks, width]``. Collective."""
        table = self._all_gather(np.append(row, 0.0))
        failed = np.flatnonzero(table[:, -1])
        if failed.size:
            raise PeerFailed(f"rank {failed[0]} failed to read its stream. See its traceback")
        return table[:, :-1]

    def exchange_samples(self, outgoing: list[list[Any]]) -> list[list[Any]]:
        """Send the samples ``outgoing[r]`` to rank ``r``; return the samples from each rank. Collective."""
        if self.group is None:
            return outgoing
        try:
            pickled = [b"" if rank == self.rank or not sent else pickle.dumps(sent, 5) for rank, sent in enumerate(outgoing)]
        except Exception:
            self._reported = True
            self._exchange_bytes([_FAILED] * self.size)
            raise
        incoming = [self._unpickle(rank, content) for rank, content in enumerate(self._exchange_bytes(pickled))]
        incoming[self.rank] = outgoing[self.rank]
        return incoming

    def report_failure(self, items: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield the items. Report a failure to the other ranks, so that they do not wait for this rank."""
        try:
            yield from items
        except Exception as error:
            if not self._reported and not isinstance(error, PeerFailed):
                with contextlib.suppress(PeerFailed):  # the first error is more informative
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
            raise PeerFailed(f"rank {rank} could not pickle its samples. See its traceback")
        return pickle.loads(content) if len(content) else []  # noqa: S301 (from a rank of this run)

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
