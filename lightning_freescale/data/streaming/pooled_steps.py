"""Steps of nearly equal cost out of a pool per rank; no sample changes its rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.pool import LocalPool
from lightning_freescale.data.streaming.reader import Reader
from lightning_freescale.data.streaming.stream_group import StreamGroup, StreamStep

_log = logging.getLogger(__name__)

_COST, _COUNT, _WEIGHT, _DRAWN, _READ_COST, _READ, _LEFT, _ENDED = range(8)
WIDTH = 8


class PooledSteps:
    """Each rank picks its batches from its pool so that they cost what the mean rank's do.

    The ranks agree on that mean with one small exchange per step, which also tells them when to stop: a rank without samples
    would leave the others waiting. Once all streams have ended, what is left is divided evenly over the remaining steps.

    Args:
        reader: the rank's stream.
        ranks: all ranks, with rows of :data:`WIDTH`.
        pool: holds the costs of the samples that the reader holds.
        drop_last: stop before a step in which a rank has less than a whole batch.
        state: what an earlier step left, see :class:`StreamStep`.
    """

    def __init__(
        self, reader: Reader, ranks: StreamGroup, pool: LocalPool, drop_last: bool = False, state: dict[str, Any] | None = None
    ) -> None:
        self._reader, self._ranks, self._pool, self._drop_last, self._state = reader, ranks, pool, drop_last, state
        self._as_read: list[float] = []  # cost of the coming batches if they were not balanced
        self._step = 0

    def __iter__(self) -> Iterator[tuple[list[Any], StreamStep]]:
        table = self._start()
        while count := self._count(table):
            numbers = self._pool.next_batch(self._target(table, count), count)
            costs, weights = self._reader.costs(numbers), self._reader.weights(numbers)
            samples = self._reader.use(numbers)
            drawn = self._as_read.pop(0) if self._as_read else 0.0
            self._step += 1
            table = self._tell(sum(costs), len(samples), sum(weights), drawn)
            yield samples, self._record(table)
        self._report_rest(table)

    def _start(self) -> NDArray[np.float64]:
        if self._state is None:
            table = self._tell(0.0, 0, 0.0, 0.0)
            empty = np.flatnonzero(table[:, _LEFT] < (self._pool.batch_size if self._drop_last else 1))
            if empty.size:
                raise ValueError(
                    f"the stream of rank {empty[0]} has {table[empty[0], _LEFT]:.0f} samples, too few for one step: give "
                    "every rank a part of the samples, or use exchange='samples'"
                )
            return table
        self._reader.restore()
        self._pool.load_state_dict(self._state["pool"], self._reader.costs(self._state["pool"]["numbers"]))
        self._as_read, self._step = list(self._state["as_read"]), self._state["step"]
        return np.array(self._state["table"])

    def _tell(self, *batch: float) -> NDArray[np.float64]:
        """Fill the pool again; then everybody's batch, and what they have left."""
        numbers = self._reader.next(self._pool.room)
        costs = self._reader.costs(numbers)
        self._pool.add_samples(costs)
        for number, cost in zip(numbers, costs):
            index = number // self._pool.batch_size - self._step
            self._as_read += [0.0] * (index + 1 - len(self._as_read))
            self._as_read[index] += cost
        ended = float(self._pool.room > 0)
        return self._ranks.gather([*batch, self._reader.cost, self._reader.read, len(self._pool), ended])

    def _count(self, table: NDArray[np.float64]) -> int:
        """Samples of the next batch of this rank; 0 when a rank has none for it."""
        left, size = table[:, _LEFT].astype(int), self._pool.batch_size
        if left.min() < (size if self._drop_last else 1):
            return 0
        mine = int(left[self._ranks.rank])
        if self._drop_last or not table[:, _ENDED].all():
            return min(size, mine)
        return min(size, math.ceil(mine / min(left.min(), math.ceil(left.max() / size))))

    def _target(self, table: NDArray[np.float64], count: int) -> float:
        if table[:, _ENDED].all():  # every rank must use up what it has: evenly
            return float(self._pool.costs.sum() * count / len(self._pool))
        return float(table[:, _READ_COST].sum() / table[:, _READ].sum() * count)

    def _record(self, table: NDArray[np.float64]) -> StreamStep:
        state = {"reader": self._reader.state_dict(), "pool": self._pool.state_dict(), "step": self._step}
        state |= {"as_read": list(self._as_read), "table": table.tolist()}
        counts = table[:, _COUNT].astype(int).tolist()
        read = table[:, [_READ_COST, _READ]]
        return StreamStep(self._step - 1, counts, table[:, _COST], table[:, _WEIGHT], table[:, _DRAWN], read, state)

    def _report_rest(self, table: NDArray[np.float64]) -> None:
        """Never silent: name the samples that no step could have."""
        asked_for = self._pool.batch_size if self._drop_last else 1  # fewer than these were to be dropped
        rest = [
            f"{'' if ended else 'at least '}{left:.0f} on rank {rank}"
            for rank, (left, ended) in enumerate(table[:, [_LEFT, _ENDED]])
            if left >= asked_for or not ended
        ]
        if rest and self._ranks.rank == 0:
            _log.warning(
                "the epoch ends after %d steps because a rank has no more samples; not trained are %s%s. Streams of equal "
                "length avoid it, and so does exchange='samples'.",
                self._step,
                ", ".join(rest[:8]),
                f" and those on {len(rest) - 8} more ranks" if len(rest) > 8 else "",
            )
