"""A DataLoader whose sampler yields whole index lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_freescale.balance import BalancedSampler, MicroBatches


class _BulkDataset(Dataset[Any]):
    """Takes a list of indices at once, so that the sampler decides the batches and their micro-batches."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: Sequence[int] | MicroBatches) -> Any:
        return indices.map(self._samples) if isinstance(indices, MicroBatches) else self._samples(indices)

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]


def collated(collate: Callable[[list[Any]], Any], samples: list[Any] | MicroBatches) -> Any:
    """Return the batch of a list of samples, or a batch of each micro-batch."""
    return samples.map(collate) if isinstance(samples, MicroBatches) else collate(samples)


class BalancedDataLoader(DataLoader[Any]):
    """Loads the batches that a :class:`BalancedSampler` plans. Build it with :meth:`from_sampler`."""

    @classmethod
    def from_sampler(
        cls,
        dataset: Dataset[Any],
        sampler: BalancedSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        for_gpu: bool = False,
        **loader_options: Any,
    ) -> BalancedDataLoader:
        """Return the loader of one rank.

        Args:
            dataset: map-style.
            sampler: yields the indices of each step.
            collate_fn: turns the list of samples of a step into a batch; torch's default if not given.
            for_gpu: whether batches go to a GPU; they are then in pinned memory unless ``pin_memory`` is given.
            **loader_options: further options of ``torch.utils.data.DataLoader``.
        """
        loader_options.setdefault("pin_memory", for_gpu)
        return cls(
            _BulkDataset(dataset),
            # batch_size=None with a DistributedSampler is the one shape that Lightning neither refuses nor rebuilds
            batch_size=None,
            sampler=sampler,
            collate_fn=partial(collated, collate_fn or default_collate),
            # spelled out, so that LightningCLI does not offer them
            shuffle=None,
            batch_sampler=None,
            drop_last=False,
            generator=None,
            **loader_options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that workers start at the first batch: Lightning calls iter() before it sets the epoch.
        # Making a loader's iterator draws the workers' seed from the global random state. A run that resumes inside an epoch
        # would draw once more, and its dropout would differ. So the seed comes from the epoch and the rank.
        sampler = cast(BalancedSampler, self.sampler)
        seed = torch.initial_seed() + 1_000_003 * sampler.epoch + sampler.rank
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, because the data module keeps the progress; by the method Lightning knows that the loader resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, see :meth:`state_dict`."""
