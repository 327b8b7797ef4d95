"""Order the samples of validation and test for models that pad their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance import BalancedSampler, MicroBatches
from lightning_freescale.balance.solver import Ints
from lightning_freescale.data.validation import size_of

_WINDOW_STEPS = 64
"""Steps that exchange samples: enough for little padding, and few enough to read files nearly in order."""


class EvaluationSampler(BalancedSampler):
    """Yields every sample once, in order; or grouped by length, once batches are known to be padded.

    Batches keep their number and sizes. No batch has more padded tokens than the largest one in order.

    Args:
        name: argument of the data module, for errors.
        dataset: map-style. Its ``lengths``, shape ``[samples]``, are read when samples are grouped. Its
            ``samples_in_memory``, if it has that, says how many samples that follow each other it reads quickly.
        batch_size: samples per rank and step.
        rank, world_size: the own rank, and the number of ranks.
        is_padded: returns whether batches are padded to their longest sample. Ranks must agree at the start of an epoch.
        limit: how many steps are evaluated, or as a float, which share of them. These keep their samples.

    Raises:
        ValueError: a rank would have no sample.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        batch_size: int,
        rank: int,
        world_size: int,
        *,
        is_padded: Callable[[], bool],
        limit: int | float,
    ) -> None:
        if (samples := size_of(dataset, name)) < world_size:
            raise ValueError(
                f"FreeScaleDataModule({name}=...): {samples} samples for {world_size} ranks, and every rank needs at least "
                f"one. Use at most {samples} devices, or add samples"
            )
        self._dataset, self._is_padded, self._limit = dataset, is_padded, limit
        self._grouped: Ints | None = None
        super().__init__(np.zeros(samples), batch_size, num_replicas=world_size, rank=rank, shuffle=False, balance=False)

    def __iter__(self) -> Iterator[list[int] | MicroBatches]:
        if self._grouped is None and self._is_padded():
            lengths = _lengths_of(self._dataset, len(self.costs))
            self._grouped = None if lengths is None else self._group(lengths)
            self._plans.forget()
        return super().__iter__()

    def global_batch(self, epoch: int, step: int) -> Ints:
        """Return the samples of a step, rank by rank."""
        samples = super().global_batch(epoch, step)
        return samples if self._grouped is None else self._grouped[samples]

    def _group(self, lengths: NDArray[np.float64]) -> Ints:
        """Return the sample for each place of the data set's order."""
        steps, order, load = len(self), np.arange(len(lengths)), np.zeros(self.num_replicas)
        evaluated = min(self._limit, steps) if isinstance(self._limit, int) else int(self._limit * steps)
        in_memory = getattr(self._dataset, "samples_in_memory", len(lengths))
        window = max(1, min(_WINDOW_STEPS, in_memory * steps // len(lengths)))
        of_steps = [self.global_batch(0, step) for step in range(evaluated)]
        for first in range(0, evaluated, window):
            drawn = of_steps[first : first + window]
            samples = np.concatenate(drawn)
            left = samples[np.argsort(lengths[samples], kind="stable")]
            for places in sorted(drawn, key=len):  # the smallest batches get the longest samples
                of_ranks = np.array_split(places, self.num_replicas)
                for rank in np.lexsort((load, np.array([len(each) for each in of_ranks]))):
                    left, longest = np.split(left, [-len(of_ranks[rank])])
                    load[rank] += len(longest) * lengths[longest[-1]]
                    order[of_ranks[rank]] = np.sort(longest)
        return order


def _lengths_of(dataset: Any, samples: int) -> NDArray[np.float64] | None:
    """Return the ``lengths`` of a data set, None if it has no valid ones."""
    try:
        lengths = np.asarray(getattr(dataset, "lengths", None), dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):  # a method, a ragged list, a tensor on a GPU or with a gradient
        return None
    return lengths if lengths.shape == (samples,) and np.isfinite(lengths).all() else None
