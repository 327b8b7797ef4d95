"""Two ways in which the ranks share the samples of their streams out over the steps of an epoch."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import Assignment, assignment_bound, contiguous_split, imbalance
from lightning_freescale.balance.micro_batches import most_parts
from lightning_freescale.balance.pool import LocalPool
from lightning_freescale.data.streaming.reader import StreamReader
from lightning_freescale.data.streaming.stream_group import StreamGroup, StreamStep

_log = logging.getLogger(__name__)

_COST, _WEIGHT, _OWNER, _ROUND = range(4)  # rows of the queue


@dataclass(eq=False)
class AssignedSteps:
    """The samples of a step are what the ranks read side by side, assigned as one global batch (arXiv 2604.24073).

    In a round every rank reads ``batch_size`` samples and tells their costs. All ranks keep the same queue of what was told,
    cut the next global batch from it, compute the same assignment, and send each other the samples. When streams end at
    different times, those that go on fill the steps of all.

    Args:
        reader: the rank's stream.
        group: all ranks, with rows of :meth:`row_width`.
        batch_size: samples per rank and step.
        assign_fn: gives an assignment from the costs of a global batch and the number of ranks.
        drop_last: leave out the samples of an incomplete last step.
        state: what an earlier step left, see :class:`StreamStep`.
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
        self._read = np.zeros((self.group.size, 2))
        self._rounds = self._step = 0

    @staticmethod
    def row_width(batch_size: int) -> int:
        """Return how many numbers a rank tells in a round: how many samples it read, its totals, their costs and weights."""
        return 3 + 2 * batch_size

    def __iter__(self) -> Iterator[tuple[list[Any], StreamStep]]:
        if self.state is not None:
            # the queue is told anew, because nobody's state holds more than the own samples
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
        while True:  # at least one round for every step, so that a rank that fails can tell the others in the next
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
        """Put what every rank read in this round at the end of the queue; return how many samples each read."""
        size = self.batch_size
        row = np.zeros(self.group.width)
        row[:3] = len(numbers), self.reader.cost, self.reader.read
        row[3 : 3 + len(numbers)] = self.reader.costs(numbers)
        row[3 + size :][: len(numbers)] = self.reader.weights(numbers)
        table = self.group.gather_rows(row)
        counts, self._read = table[:, 0].astype(np.int64), table[:, 1:3]
        costs, weights = table[:, 3 : 3 + size], table[:, 3 + size :]
        was_read = np.arange(size) < counts[:, None]
        owner = was_read.nonzero()[0]
        added = np.stack([costs[was_read], weights[was_read], owner, np.full(len(owner), self._rounds)])
        self._queue = np.concatenate([self._queue, added], axis=1)
        self._own_numbers.extend(numbers)
        self._rounds += 1
        return counts

    def _exchange_samples(self, owner: NDArray[np.float64], rank_of_sample: NDArray[np.int64]) -> list[Any]:
        """Send the own samples of a global batch where they belong; return the rank's batch, in the order of the queue."""
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
            read=self._read,
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


# columns of the table that the ranks share in each step
POOLED_ROW_WIDTH = 9
_BATCH_COST, _BATCH_COUNT, _BATCH_WEIGHT, _UNBALANCED_COST = range(4)
_READ_COST, _READ_COUNT, _LEFT, _ENDED, _MOST_PARTS = range(4, POOLED_ROW_WIDTH)


@dataclass(eq=False)
class PooledSteps:
    """Each rank picks its batches from its pool so that they cost what the mean rank's do; no sample changes its rank.

    The ranks agree on that mean with one small exchange per step, which also tells them when to stop: a rank without samples
    would leave the others waiting. Once all streams have ended, what is left is divided evenly over the remaining steps.

    Args:
        reader: the rank's stream.
        group: all ranks, with rows of ``POOLED_ROW_WIDTH`` numbers.
        pool: holds the costs of the samples that the reader holds.
        drop_last: stop before a step in which a rank has less than a whole batch.
        state: what an earlier step left, see :class:`StreamStep`.
    """

    reader: StreamReader
    group: StreamGroup
    pool: LocalPool
    drop_last: bool
    state: dict[str, Any] | None

    def __post_init__(self) -> None:
        self._costs_as_read: list[float] = []  # of the coming batches if they were not balanced
        self._step = 0

    def __iter__(self) -> Iterator[tuple[list[Any], StreamStep]]:
        table = self._first_table()
        while count := self._next_count(table):
            numbers = self.pool.next_batch(self._target_cost(table, count), count)
            costs, weights = self.reader.costs(numbers), self.reader.weights(numbers)
            samples = self.reader.pop_samples(numbers)
            unbalanced_cost = self._costs_as_read.pop(0) if self._costs_as_read else 0.0
            self._step += 1
            table = self._share_step([sum(costs), len(samples), sum(weights), unbalanced_cost], most_parts(np.array(weights)))
            yield samples, self._describe_step(table)
        self._warn_of_untrained(table)

    def _first_table(self) -> NDArray[np.float64]:
        if self.state is None:
            table = self._share_step([0.0, 0, 0.0, 0.0], 0)
            empty = np.flatnonzero(table[:, _LEFT] < (self.pool.batch_size if self.drop_last else 1))
            if empty.size:
                raise ValueError(
                    f"the stream of rank {empty[0]} has {table[empty[0], _LEFT]:.0f} samples, too few for one step: give "
                    "every rank a part of the samples, or use stream_balancing='global'"
                )
            return table
        self.reader.reread_held_samples()
        self.pool.load_state_dict(self.state["pool"], self.reader.costs(self.state["pool"]["numbers"]))
        self._costs_as_read, self._step = list(self.state["as_read"]), self.state["step"]
        return np.array(self.state["table"])

    def _share_step(self, batch: list[float], parts: int) -> NDArray[np.float64]:
        """Fill the pool again; return the table of every rank's batch, what it has read, and what it has left."""
        numbers = self.reader.read_samples(self.pool.room)
        costs = self.reader.costs(numbers)
        self.pool.add_samples(costs)
        for number, cost in zip(numbers, costs):
            index = number // self.pool.batch_size - self._step
            self._costs_as_read += [0.0] * (index + 1 - len(self._costs_as_read))
            self._costs_as_read[index] += cost
        ended = float(self.pool.room > 0)
        return self.group.gather_rows([*batch, self.reader.cost, self.reader.read, len(self.pool), ended, parts])

    def _next_count(self, table: NDArray[np.float64]) -> int:
        """Return the samples of this rank's next batch; 0 when a rank has none for it."""
        left, size = table[:, _LEFT].astype(int), self.pool.batch_size
        if left.min() < (size if self.drop_last else 1):
            return 0
        own_left = int(left[self.group.rank])
        if self.drop_last or not table[:, _ENDED].all():
            return min(size, own_left)
        return min(size, math.ceil(own_left / min(left.min(), math.ceil(left.max() / size))))

    def _target_cost(self, table: NDArray[np.float64], count: int) -> float:
        if table[:, _ENDED].all():  # every rank must use up what it has: evenly
            return float(self.pool.costs.sum() * count / len(self.pool))
        return float(table[:, _READ_COST].sum() / table[:, _READ_COUNT].sum() * count)

    def _describe_step(self, table: NDArray[np.float64]) -> StreamStep:
        state = {"reader": self.reader.state_dict(), "pool": self.pool.state_dict(), "step": self._step}
        return StreamStep(
            step=self._step - 1,
            counts=table[:, _BATCH_COUNT].astype(int).tolist(),
            costs=table[:, _BATCH_COST],
            weights=table[:, _BATCH_WEIGHT],
            most_parts=table[:, _MOST_PARTS].astype(int).tolist(),
            unbalanced_costs=table[:, _UNBALANCED_COST],
            read=table[:, [_READ_COST, _READ_COUNT]],
            state={**state, "as_read": list(self._costs_as_read), "table": table.tolist()},
        )

    def _warn_of_untrained(self, table: NDArray[np.float64]) -> None:
        """Name the samples that no step could have."""
        asked_for = self.pool.batch_size if self.drop_last else 1  # fewer than these were to be dropped
        rest = [
            f"{'' if ended else 'at least '}{left:.0f} on rank {rank}"
            for rank, (left, ended) in enumerate(table[:, [_LEFT, _ENDED]])
            if left >= asked_for or not ended
        ]
        if rest and self.group.rank == 0:
            _log.warning(
                "the epoch ends after %d steps because a rank has no more samples; not trained are %s%s. Streams of equal "
                "length avoid it, and so does stream_balancing='global'.",
                self._step,
                ", ".join(rest[:8]),
                f" and those on {len(rest) - 8} more ranks" if len(rest) > 8 else "",
            )
