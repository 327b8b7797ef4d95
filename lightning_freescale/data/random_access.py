"""Data sets that give any sample by its number, how many they have, and what functions tell of every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from lightning_freescale.balance.validation import non_negative

# By name, because neither is a dependency. Their len() is the number of one rank's samples, their numbers reach all.
_STREAMING_SIZES: dict[str, Callable[[Any], int]] = {
    "litdata": lambda dataset: sum(end - start for start, end in dataset.region_of_interest),
    "streaming": lambda dataset: dataset.size,  # MosaicML's
}


def is_stream(dataset: Any) -> TypeGuard[IterableDataset[Any]]:
    """Return whether samples can only be had one after the other.

    The ``StreamingDataset`` of litdata and of MosaicML's streaming is an ``IterableDataset`` and no stream: ``dataset[i]``
    gives the sample of number ``i``, the same on every rank and in every worker. Of any other ``IterableDataset`` nobody
    knows what its numbers mean on another rank.
    """
    return isinstance(dataset, IterableDataset) and _streaming_size_fn(dataset) is None


def size_of(dataset: Any, argument: str) -> int:
    """Return the number of samples of a map-style data set, of all ranks together; errors call it ``argument``.

    Raises:
        ValueError: it is not map-style, or empty.
    """
    if is_stream(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{argument}={type(dataset).__name__} is not map-style: it needs __len__ and __getitem__")
    size = (_streaming_size_fn(dataset) or len)(dataset)
    if not size:
        raise ValueError(f"{argument}={type(dataset).__name__} is empty: pass at least one sample per rank")
    return size


def numbers_of_samples(dataset: Any, size: int, **functions: Callable[[Any], Any]) -> dict[str, NDArray[np.float64]]:
    """Return what functions of one sample give for each, shape ``[size]``, by their names; reads the data set once.

    Raises:
        ValueError: a number is negative or not finite.
    """
    numbers: dict[str, list[Any]] = {name: [] for name in functions}
    for index in range(size if functions else 0):
        sample = dataset[index]
        for name, function in functions.items():
            numbers[name].append(function(sample))
    return {name: non_negative(f"{name}(sample)", values, size) for name, values in numbers.items()}


def _streaming_size_fn(dataset: Any) -> Callable[[Any], int] | None:
    for base in type(dataset).__mro__:
        library = base.__module__.partition(".")[0]
        if base.__qualname__ == "StreamingDataset" and library in _STREAMING_SIZES:
            return _STREAMING_SIZES[library]
    return None
