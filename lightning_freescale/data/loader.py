"""A DataLoader whose sampler yields whole index lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_freescale.balance import BalancedSampler


class _Bulk(Dataset[list[Any]]):
    """Takes a list of indices at once, so that the sampler decides the batches."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]


class BalancedDataLoader(DataLoader[Any]):
    """Loads the batches that a :class:`BalancedSampler` plans. Build it with :meth:`of`."""

    @classmethod
    def of(
        cls,
        dataset: Dataset[Any],
        sampler: BalancedSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> BalancedDataLoader:
        """``options`` go to ``DataLoader``; ``collate_fn`` gets the list of samples of one step."""
        # batch_size=None with a DistributedSampler is the one shape that Lightning neither refuses nor rebuilds
        return cls(_Bulk(dataset), batch_size=None, sampler=sampler, collate_fn=collate_fn or default_collate, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that workers start at the first batch: Lightning calls iter() before it sets the epoch. The workers'
        # seed comes from the epoch and not from the global state, or a run that resumes inside an epoch would draw once more.
        sampler = cast(BalancedSampler, self.sampler)
        seed = torch.initial_seed() + 1_000_003 * sampler.epoch + sampler.rank
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the data module keeps the progress, and having the method tells Lightning that this loader resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore, see :meth:`state_dict`."""
