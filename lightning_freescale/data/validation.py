"""What a data module is given, checked: sizes and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

LOADING = ("collate_fn", "num_workers", "pin_memory", "persistent_workers")
"""Arguments of the data module that go to torch's loader."""
LossReduction = Literal["sample_mean", "target_mean", "sum", "unweighted"]


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


def loss_weights(loss_reduction: str, lengths: Any, targets: Any, size: int) -> NDArray[np.float64] | None:
    """Weight of every sample in the mean loss, shape ``[size]``; None if all weigh the same.

    If nothing weighs anything, no loss is scaled: that is ``"unweighted"``.

    Raises:
        ValueError: there is no such ``loss_reduction``, or ``targets`` does not go with it.
    """
    if loss_reduction not in get_args(LossReduction):
        raise ValueError(f"loss_reduction={loss_reduction!r}: choose 'sample_mean', 'target_mean', 'sum' or 'unweighted'")
    if loss_reduction != "target_mean":
        if targets is not None:
            raise ValueError(f"targets= is for loss_reduction='target_mean', not {loss_reduction!r}: leave it out")
        return np.zeros(size) if loss_reduction == "unweighted" else None
    targets = lengths if targets is None else targets
    if targets is None:
        raise ValueError("loss_reduction='target_mean' needs targets=, the prediction targets of every sample, or lengths=")
    return numbers("targets", targets, size)


def stream_weight(loss_reduction: str, lengths: Any, targets: Any) -> Callable[[Any], float] | None:
    """The same for a stream: a function of one sample; None if all weigh the same.

    Raises:
        ValueError: as above, or ``targets`` is no function.
    """
    if loss_weights(loss_reduction, [0.0], None if targets is None else [0.0], 1) is None:
        return None
    if loss_reduction == "unweighted":
        return _nothing
    weight = lengths if targets is None else targets
    if not callable(weight):
        raise ValueError(
            f"loss_reduction='target_mean' with targets={targets!r}: for a stream pass targets= or lengths=, a function from a "
            "sample to its number of prediction targets"
        )
    return cast("Callable[[Any], float]", weight)


def _nothing(sample: Any) -> float:
    return 0.0


def refuse_unused(what: str, given: Mapping[str, Any], **defaults: Any) -> None:
    """Arguments that would have no effect with ``what``, by their names and defaults.

    Raises:
        ValueError: one is not its default.
    """
    for name, default in defaults.items():
        value = given[name]
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not plain or value != default:
            raise ValueError(f"FreeScaleDataModule({name}=...) has no meaning for {what}: leave it out")
