"""Micro-batches: a rank's samples of a step, cut into parts of about equal cost that are computed one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_freescale.balance.assign import assign
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats

TRIAL_BLOCK = 6
"""Steps in a row with the same number of micro-batches, while the best one is looked for."""
MOST_TRIED = 8
"""More micro-batches are not tried: each costs host work, and few exchanges are left to hide."""


class MicroBatches(NamedTuple):
    """The batch of a step, cut.

    Attributes:
        batches: the micro-batches, in the order in which they are computed.
        shares: of each in the loss of the rank's batch: they sum to 1, or are all 1 where that loss is a sum.
    """

    batches: tuple[Any, ...]
    shares: tuple[float, ...]

    def map(self, fn: Callable[[Any], Any]) -> MicroBatches:
        """Return the same with a function applied to every micro-batch."""
        return MicroBatches(tuple(fn(batch) for batch in self.batches), tuple(self.shares))


def cut(
    samples: Any, parts: int, costs: Floats, weights: Floats, *, loss_is_sum: bool = False, groups: Ints | None = None
) -> MicroBatches:
    """Return a rank's samples of a step as micro-batches of samples, at equal cost as far as that can be; dearest first.

    Every rank begins with its dearest, so that those which are computed at the same time cost about the same.

    Args:
        samples: anything that numpy can index, such as a list.
        parts: how many micro-batches, at most as many as samples (or groups).
        costs: shape ``[samples]``.
        weights: of each sample in the loss, shape ``[samples]``; where all are 0, each counts the same.
        loss_is_sum: the loss is a sum over samples, not a mean.
        groups: of each sample, shape ``[samples]``; samples of a group stay in one micro-batch.
    """
    part_of_sample = assign(costs, parts, assignment_mode="free", keep_together=groups).rank_of_sample
    dearest = np.argsort(-np.bincount(part_of_sample, costs, parts), kind="stable")
    places = [np.flatnonzero(part_of_sample == part) for part in dearest]
    weighed = weights if weights.any() else np.ones(len(costs))
    shares = np.ones(parts) if loss_is_sum else np.array([weighed[each].sum() for each in places]) / weighed.sum()
    return MicroBatches(tuple([samples[place] for place in each] for each in places), tuple(shares.tolist()))


class MicroBatchSchedule:
    """How many micro-batches each step has: the same on every rank, a pure function of (epoch, step) between decisions.

    Args:
        micro_batches: a number, or ``"auto"``: candidates take turns, :data:`TRIAL_BLOCK` steps each, until :meth:`decide`.
        batch_size: samples per rank and step; its divisors are the candidates.

    Attributes:
        auto: whether they were to be chosen by measurement.
        candidates: the numbers that may be chosen.
        handed_out: the last (epoch, step) that anybody has asked for.
    """

    def __init__(self, micro_batches: int | Literal["auto"], batch_size: int) -> None:
        self.auto = micro_batches == "auto"
        self.candidates = [n for n in range(1, MOST_TRIED + 1) if batch_size % n == 0] if self.auto else [int(micro_batches)]
        self.handed_out = (0, -1)
        self._decided: tuple[tuple[int, int], int] | None = None if len(self.candidates) > 1 else ((0, 0), self.candidates[0])

    def count(self, epoch: int, step: int) -> int:
        """Return the micro-batches of a step."""
        self.handed_out = max(self.handed_out, (epoch, step))
        return self._count(epoch, step)

    def is_measured(self, epoch: int, step: int) -> int | None:
        """Return the candidate that a step is a measurement of; None if all is decided, or it may follow upon another one."""
        if self.decided or step % TRIAL_BLOCK == 0:
            return None
        return self._count(epoch, step)

    @property
    def decided(self) -> bool:
        """Whether the number is known for all steps to come."""
        return self._decided is not None

    @property
    def chosen(self) -> int | None:
        """The number that was decided for; None before."""
        return None if self._decided is None else self._decided[1]

    @property
    def may_divide(self) -> bool:
        """Whether a step may still have several."""
        return max(self.candidates) > 1 and self.chosen != 1

    def decide(self, micro_batches: int, epoch: int = 0, step: int = 0) -> None:
        """Choose for all steps from one on; call it with the same arguments on every rank.

        Raises:
            RuntimeError: that step was handed out already, so that the ranks might differ in it.
        """
        if self.handed_out >= (epoch, step):
            raise RuntimeError(
                f"micro_batches={micro_batches} from step {step} of epoch {epoch} on: the loader has already read up to step "
                f"{self.handed_out[1]} of epoch {self.handed_out[0]}. Give FreeScaleDataModule a number of micro_batches, or "
                "less to prefetch"
            )
        self._decided = (epoch, step), micro_batches

    def _count(self, epoch: int, step: int) -> int:
        if self._decided is not None and (epoch, step) >= self._decided[0]:
            return self._decided[1]
        # the epoch, because short ones would not come to the last candidates
        return self.candidates[(step // TRIAL_BLOCK + epoch) % len(self.candidates)]
