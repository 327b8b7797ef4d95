"""What a data module is given, checked: sizes, costs and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance import CostModel


def size_of(dataset: Any, argument: str = "dataset=") -> int:
    """Samples of a map-style data set; errors call it ``argument``.

    Raises:
        ValueError: it is not map-style, or empty.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{argument}{type(dataset).__name__} is not map-style: it needs __len__ and __getitem__")
    if not len(dataset):
        raise ValueError(f"{argument}{type(dataset).__name__} is empty: pass at least one sample per rank")
    return len(dataset)


def numbers(argument: str, values: Any, size: int) -> NDArray[np.float64]:
    """``values`` as an array of shape ``[size]``; errors call it ``argument``.

    Raises:
        ValueError: the shape is another, or an entry is negative or not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (size,):
        raise ValueError(f"{argument} has shape {array.shape}, the data set {size} samples: pass one number per sample")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise ValueError(
            f"{argument}[{bad[0]}] is {array[bad[0]]}: every entry must be a finite number >= 0 ({bad.size} are not)"
        )
    return array


def costs_of(dataset: Any, lengths: Any, cost: Any, size: int) -> NDArray[np.float64]:
    """Predicted cost of every sample, shape ``[size]``.

    Raises:
        ValueError: there is nothing to tell the costs from, or it does not fit.
    """
    if lengths is None and cost is None:
        raise ValueError(
            "FreeScaleDataModule(lengths=None) cannot balance: pass lengths=, the history length of every sample, or cost=, a "
            "function of a sample or the costs themselves"
        )
    if lengths is not None:
        lengths = numbers("lengths", lengths, size)
    if cost is not None and not callable(cost):
        return numbers("cost", cost, size)
    if lengths is None:
        return numbers("cost(sample)", [cost(dataset[index]) for index in range(size)], size)
    return numbers("cost(lengths)", (cost or CostModel())(lengths), size)


def loss_weights(loss_reduction: str, lengths: Any, targets: Any, size: int) -> NDArray[np.float64] | None:
    """Weight of every sample in the mean loss, shape ``[size]``; None if all weigh the same.

    Raises:
        ValueError: ``targets`` does not go with ``loss_reduction``.
    """
    if loss_reduction != "target_mean":
        if targets is not None:
            raise ValueError(f"targets= is for loss_reduction='target_mean', not {loss_reduction!r}: leave it out")
        return None
    targets = lengths if targets is None else targets
    if targets is None:
        raise ValueError("loss_reduction='target_mean' needs targets=, the prediction targets of every sample, or lengths=")
    return numbers("targets", targets, size)
