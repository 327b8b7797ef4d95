"""A DataLoader for samplers that yield whole batches of indices, and the sampler of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_freescale.balance import BalancedSampler, MicroBatches
from lightning_freescale.balance.solver.bounds import Ints
from lightning_freescale.data.validation import size_of

_WINDOW_STEPS = 64
"""The number of steps that exchange samples: enough for little padding, and few enough to read files nearly in order."""


class _BulkDataset(Dataset[Any]):
    """A data set whose indices are lists, so that the sampler determines batches and their micro-batches."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: Sequence[int] | MicroBatches) -> Any:
        return indices.map(self._samples) if isinstance(indices, MicroBatches) else self._samples(indices)

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]


def collated(collate: Callable[[list[Any]], Any], samples: list[Any] | MicroBatches) -> Any:
    """Return the batch of a list of samples, or the batches of micro-batches."""
    return samples.map(collate) if isinstance(samples, MicroBatches) else collate(samples)


class BalancedDataLoader(DataLoader[Any]):
    """Loads the batches that a :class:`BalancedSampler` plans. Create it with :meth:`from_sampler`."""

    @classmethod
    def from_sampler(
        cls,
        dataset: Dataset[Any],
        sampler: BalancedSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        for_gpu: bool = False,
        **loader_options: Any,
    ) -> BalancedDataLoader:
        """Return the loader of one rank. Other options are those of ``torch.utils.data.DataLoader``.

        ``collate_fn`` is by default torch's ``default_collate``. Batches ``for_gpu`` are in pinned memory unless ``pin_memory``
        is given.
        """
        loader_options.setdefault("pin_memory", for_gpu)
        return cls(
            _BulkDataset(dataset),
            # Lightning neither refuses nor replaces a loader with batch_size=None and a DistributedSampler
            batch_size=None,
            sampler=sampler,
            collate_fn=partial(collated, collate_fn or default_collate),
            # explicit, so that LightningCLI does not offer these options
            shuffle=None,
            batch_sampler=None,
            drop_last=False,
            generator=None,
            **loader_options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that workers start at the first batch: Lightning calls iter() before it sets the epoch.
        # torch draws the workers' seed from the global random state. A run that resumes inside an epoch would draw once more,
        # and its dropout would differ. Therefore the seed is computed from the epoch and the rank.
        sampler = cast(BalancedSampler, self.sampler)
        seed = torch.initial_seed() + 1_000_003 * sampler.epoch + sampler.rank
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary. The data module keeps the progress, but Lightning requires the method to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, see :meth:`state_dict`."""


class EvaluationSampler(BalancedSampler):
    """Yields every sample once, in order, or grouped by length once batches are known to be padded.

    Grouping changes neither the number nor the sizes of batches. No batch has more padded tokens than the largest one in order.

    Args:
        name: argument of the data module, for errors.
        dataset: map-style data set. Grouping needs its ``lengths``, shape ``[samples]``. Its optional ``samples_in_memory`` is
            the number of consecutive samples that it reads quickly.
        is_padded: function that returns whether batches are padded to their longest sample. Ranks must agree at the start of
            an epoch.
        limit: number of evaluated steps, or their share as a float. These steps keep their samples.
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
                f"FreeScaleDataModule({name}=...) has {samples} sample{'s'[: samples != 1]} for {world_size} ranks, but every "
                "rank needs at least one. Use fewer ranks or add samples"
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
    """Return the ``lengths`` of a data set; None if it has no valid ones."""
    try:
        lengths = np.asarray(getattr(dataset, "lengths", None), dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):  # a method, a ragged list, a tensor on a GPU or with a gradient
        return None
    return lengths if lengths.shape == (samples,) and np.isfinite(lengths).all() else None
