"""Steps whose samples are assigned over all ranks and sent to the rank that computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.assign import Assignment, contiguous_split
from lightning_freescale.data.streaming.reader import Reader
from lightning_freescale.data.streaming.stream_group import StreamGroup, StreamStep

_COST, _WEIGHT, _OWNER, _ROUND = range(4)


def width(batch_size: int) -> int:
    """Numbers that a rank tells the others in a round: how many samples it read, their costs and weights, and its totals."""
    return 3 + 2 * batch_size


class AssignedSteps:
    """The samples of a step are what the ranks read side by side, assigned as one global batch (arXiv 2604.24073).

    In a round every rank reads ``batch_size`` samples and tells their costs. All ranks keep the same queue of what was told,
    cut the next global batch from it, compute the same assignment, and send each other the samples. The queue holds one
    global batch more than the next, so that left-over samples, fewer than ranks, join the last step. When streams end at
    different times, those that go on fill the steps of all.

    Args:
        reader: the rank's stream.
        ranks: all ranks, with rows of :func:`width`.
        batch_size: samples per rank and step.
        assign: from the costs of a global batch and the number of ranks.
        drop_last: leave out the samples of an incomplete last step.
        state: what an earlier step left, see :class:`StreamStep`.
    """

    def __init__(
        self,
        reader: Reader,
        ranks: StreamGroup,
        batch_size: int,
        assign: Callable[[NDArray[np.float64], int], Assignment],
        drop_last: bool = False,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._reader, self._ranks, self._batch_size, self._assign = reader, ranks, batch_size, assign
        self._drop_last, self._state = drop_last, state
        self._queue = np.empty((4, 0))
        self._mine: deque[int] = deque()  # own numbers in the queue, in its order
        self._read = np.zeros((ranks.size, 2))
        self._rounds = self._step = 0

    def __iter__(self) -> Iterator[tuple[list[Any], StreamStep]]:
        if self._state is not None:
            self._restore(self._state)
        while size := self._next_size():
            batch, self._queue = self._queue[:, :size], self._queue[:, size:]
            plan = self._assign(batch[_COST], self._ranks.size)
            samples = self._exchange(batch[_OWNER], plan.rank_of_sample)
            self._step += 1
            yield samples, self._record(batch, plan)

    def _restore(self, state: dict[str, Any]) -> None:
        """The queue is told anew: nobody's state holds more than the own samples."""
        self._reader.restore()
        held, self._rounds = iter(state["reader"]["held"]), state["first_round"]
        for count in state["rounds"]:
            self._tell([next(held) for _ in range(count)])
        self._step = state["step"]

    def _next_size(self) -> int:
        """Samples of the next global batch, 0 at the end; reads one global batch ahead."""
        whole = self._ranks.size * self._batch_size
        while True:  # at least one round for every step, so that a rank that fails can tell the others in the next
            counts = self._tell(self._reader.next(self._batch_size))
            if (counts < self._batch_size).all() or self._queue.shape[1] >= 2 * whole:
                break
        left = self._queue.shape[1]
        size = self._cut(left, whole)
        if not size and not self._step:
            raise ValueError(
                f"the streams have {left} samples, too few for one step of {self._ranks.size} ranks with "
                f"batch_size={self._batch_size} and drop_last={self._drop_last}: use fewer ranks or add samples"
            )
        return size

    def _cut(self, left: int, whole: int) -> int:
        if self._drop_last:
            return whole if left >= whole else 0
        if left < self._ranks.size:  # only in the first step, or none at all
            return 0
        return whole if left - whole >= self._ranks.size else left

    def _tell(self, numbers: Any) -> NDArray[np.int64]:
        """One round: put what every rank read at the end of the queue; how many each read."""
        row = np.zeros(width(self._batch_size))
        row[:3] = len(numbers), self._reader.cost, self._reader.read
        row[3 : 3 + len(numbers)] = self._reader.costs(numbers)
        row[3 + self._batch_size :][: len(numbers)] = self._reader.weights(numbers)
        table = self._ranks.gather(row)
        counts, self._read = table[:, 0].astype(np.int64), table[:, 1:3]
        cost, weight = table[:, 3 : 3 + self._batch_size], table[:, 3 + self._batch_size :]
        there = np.arange(self._batch_size) < counts[:, None]
        owner = np.repeat(np.arange(self._ranks.size), counts)
        told = np.stack([cost[there], weight[there], owner, np.full(len(owner), self._rounds)])
        self._queue = np.concatenate([self._queue, told], axis=1)
        self._mine.extend(numbers)
        self._rounds += 1
        return counts

    def _exchange(self, owner: NDArray[np.float64], ranks: NDArray[np.int64]) -> list[Any]:
        """Send the own samples of a global batch where they belong; the rank's batch, in the order of the queue."""
        mine = owner == self._ranks.rank
        samples = self._reader.use([self._mine.popleft() for _ in range(int(mine.sum()))])
        parts: list[list[Any]] = [[] for _ in range(self._ranks.size)]
        for sample, rank in zip(samples, ranks[mine]):
            parts[rank].append(sample)
        incoming = [iter(part) for part in self._ranks.exchange(parts)]
        return [next(incoming[int(source)]) for source in owner[ranks == self._ranks.rank]]

    def _record(self, batch: NDArray[np.float64], plan: Assignment) -> StreamStep:
        size, ranks = self._ranks.size, plan.rank_of_sample
        drawn = _sums(contiguous_split(batch.shape[1], size), batch[_COST], size)
        cost, weight = _sums(ranks, batch[_COST], size), _sums(ranks, batch[_WEIGHT], size)
        counts = np.bincount(ranks, minlength=size).tolist()
        bound, dominated = plan.lower_bound, plan.dominated
        return StreamStep(self._step - 1, counts, cost, weight, drawn, self._read, self._place(), bound, dominated)

    def _place(self) -> dict[str, Any]:
        first = int(self._queue[_ROUND, 0]) if self._queue.shape[1] else self._rounds
        own = self._queue[_ROUND, self._queue[_OWNER] == self._ranks.rank].astype(np.int64) - first
        rounds = np.bincount(own, minlength=self._rounds - first).tolist()
        place = {"reader": self._reader.state_dict(), "first_round": first, "rounds": rounds}
        return {**place, "step": self._step}


def _sums(ranks: NDArray[np.int64], values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    return np.bincount(ranks, values, size).astype(np.float64)
