"""Which samples every step of an epoch has: the drawn order, where its steps begin and end, and outliers brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_freescale.balance.assign import equal_counts
from lightning_freescale.balance.solver import Ints
from lightning_freescale.balance.validation import Floats


class StepBoundaries:
    """Cuts ``samples`` into steps of ``batch_size * ranks``.

    Unless ``drop_last``, an incomplete last step is one of its own, or joins the one before if it has fewer samples than
    ranks: every rank always has a sample.

    Attributes:
        full_epoch: where the steps of an epoch that is not resumed begin and end, ``steps + 1`` positions.

    Raises:
        ValueError: there is no step.
    """

    def __init__(self, samples: int, batch_size: int, ranks: int, drop_last: bool) -> None:
        if samples < ranks:
            raise ValueError(
                f"{samples} samples for {ranks} ranks: every rank needs at least one sample per step. Use at most {samples} "
                "devices or add samples."
            )
        self._samples, self._per_step = samples, batch_size * ranks
        self._ranks, self._drop_last = ranks, drop_last
        self.full_epoch = self._cut(0)
        self._resumed: tuple[int, list[int], int] = (0, self.full_epoch, 0)
        if len(self.full_epoch) == 1:
            raise ValueError(
                f"drop_last=True leaves no step: {samples} samples are fewer than batch_size={batch_size} x {ranks} ranks. "
                "Use drop_last=False or a smaller batch_size."
            )

    def for_epoch(self, epoch: int) -> list[int]:
        """Return ``steps + 1`` positions; those before a resume all stand where it went on."""
        return self._resumed[1] if epoch == self._resumed[0] else self.full_epoch

    def first_step(self, epoch: int) -> int:
        """Return the step that an epoch starts with."""
        return self._resumed[2] if epoch == self._resumed[0] else 0

    def resume(self, epoch: int, batches: int, samples: int | None) -> None:
        """Go on in ``epoch`` after ``batches`` steps of ``samples`` samples; ValueError if less than one per rank is left."""
        if samples is None or self.full_epoch[: batches + 1][-1] == samples:
            self._resumed = (epoch, self.full_epoch, batches)
            return
        left = self._samples - samples
        if 0 < left < self._ranks and not self._drop_last:
            raise ValueError(
                f"{left} samples are left of epoch {epoch}, fewer than the {self._ranks} ranks: resume on at most {left} "
                "ranks, or from a checkpoint made at the end of an epoch"
            )
        self._resumed = (epoch, [samples] * batches + self._cut(samples), batches)

    def _cut(self, start: int) -> list[int]:
        edges = list(range(start, self._samples + 1, self._per_step))
        rest = self._samples - edges[-1]
        if not rest or self._drop_last:
            return edges
        if rest < self._ranks and len(edges) > 1:
            edges.pop()  # the left-over samples join the last step: a rank without a sample would leave the others waiting
        return [*edges, self._samples]


def draw_order(samples: int, seed: int, epoch: int) -> Ints:
    """Return the shuffled samples of an epoch, the same on every machine, shape ``[samples]``."""
    # RandomState's stream is frozen for good; Generator's may change between numpy versions
    return np.random.RandomState([seed, epoch]).permutation(samples)


@dataclass(frozen=True, eq=False)
class BlockShuffle:
    """Draws orders that use ``window`` blocks of the data set at a time, such as row groups or chunks on disk.

    Every epoch has the blocks in a new order; the samples of ``window`` blocks that come one after the other are shuffled.

    Args:
        sizes: samples of each block, in the order of the data set, shape ``[blocks]``.
        window: how many blocks are shuffled together.

    Raises:
        ValueError: an argument does not fit; names it, its value and the fix.
    """

    sizes: ArrayLike | Sequence[int]
    window: int = 8

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or not np.issubdtype(sizes.dtype, np.integer) or (sizes < 0).any():
            raise ValueError(f"BlockShuffle(sizes={self.sizes!r}): pass the number of samples of each block, shape [blocks]")
        if self.window < 1:
            raise ValueError(f"BlockShuffle(window={self.window!r}): pass a number of blocks, at least 1")

    @property
    def samples(self) -> int:
        """Samples of all blocks."""
        return int(np.sum(self.sizes))

    def draw_order(self, seed: int, epoch: int) -> Ints:
        """Return the samples of an epoch in their order, the same on every machine, shape ``[samples]``."""
        draw = np.random.RandomState([seed, epoch])
        edges = np.append(0, np.cumsum(self.sizes))
        blocks = draw.permutation(len(edges) - 1)
        parts = [np.arange(edges[block], edges[block + 1]) for block in blocks]
        windows = [np.concatenate(parts[first : first + self.window]) for first in range(0, len(parts), self.window)]
        return np.concatenate([draw.permutation(window) for window in windows])


def pool_outliers(order: Ints, edges: Sequence[int], costs: Floats, ranks: int, outlier_window: int) -> Ints:
    """Exchange samples between the steps of a window so that those costing more than a rank's fair share come together.

    Not gradient-identical: it changes which samples share a step, never which an epoch has. A sample moves by less than
    ``outlier_window`` steps, which is its age bound. After WLB-LLM's outlier delay (arXiv 2503.17924), with a bound.

    Args:
        order: the samples of an epoch in drawn order, shape ``[samples]``.
        edges: where its steps begin and end, ``steps + 1`` positions.
        costs: predicted compute time of every sample of the data set.
        ranks: how many ranks share a step.
        outlier_window: how many consecutive steps exchange samples.

    Returns:
        The new order, with the same edges.
    """
    pooled = order.copy()
    for first in range(0, len(edges) - 1, outlier_window):
        inner = np.asarray(edges[first : first + outlier_window + 1])
        part = order[inner[0] : inner[-1]]
        pooled[inner[0] : inner[-1]] = part[_outliers_together(costs[part], inner - inner[0], ranks)]
    return pooled


def _outliers_together(cost: Floats, edges: Ints, ranks: int) -> Ints:
    """Return the positions of a window's samples in their new order."""
    fair = cost.sum() / (len(edges) - 1) / ranks
    # one per rank and step, the most expensive together, where a contiguous split would begin a rank's run, so that the plan
    # without balancing does not give them all to one rank; the other samples keep their order
    sizes = (np.array(equal_counts(int(after - edge), ranks)) for edge, after in zip(edges, edges[1:]))
    places = np.concatenate([edge + size.cumsum() - size for edge, size in zip(edges, sizes)])
    outliers = np.flatnonzero(cost > fair)
    outliers = outliers[np.argsort(-cost[outliers], kind="stable")][: len(places)]
    return np.insert(np.delete(np.arange(len(cost)), outliers), places[: len(outliers)] - np.arange(len(outliers)), outliers)
