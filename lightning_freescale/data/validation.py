"""Checks of the arguments of a data module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard, cast, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from lightning_freescale.balance.validation import non_negative

LossReduction = Literal["sample_mean", "target_mean", "sum", "unweighted"]

_LOADER_DEFAULTS = {name: option.default for name, option in inspect.signature(DataLoader.__init__).parameters.items()}
_SET_BY_PACKAGE = ("self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")

# By name, because neither is a dependency. len() counts the samples of one rank, but indices address all samples.
_STREAMING_SIZES: dict[str, Callable[[Any], int]] = {
    "litdata": lambda dataset: sum(end - start for start, end in dataset.region_of_interest),
    "streaming": lambda dataset: dataset.size,  # MosaicML's
}


def is_stream(dataset: Any) -> TypeGuard[IterableDataset[Any]]:
    """Return whether samples can only be read in sequence.

    The ``StreamingDataset`` of litdata and of MosaicML's streaming is an ``IterableDataset`` but not a stream: ``dataset[i]``
    returns the same sample on every rank and in every worker. This does not hold for any other ``IterableDataset``.
    """
    return isinstance(dataset, IterableDataset) and _streaming_size_fn(dataset) is None


def size_of(dataset: Any, argument: str) -> int:
    """Return the number of samples of a map-style data set for all ranks; errors name it ``argument``."""
    if is_stream(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{argument}={type(dataset).__name__} is not map-style. Pass a data set with __len__ and __getitem__")
    size = (_streaming_size_fn(dataset) or len)(dataset)
    if not size:
        raise ValueError(f"{argument}={type(dataset).__name__} is empty. Pass at least one sample per rank")
    return size


def numbers_of_samples(dataset: Any, size: int, **given: Any) -> dict[str, NDArray[np.float64]]:
    """Read the data set once and return the results of those arguments that are functions of a sample, shape ``[size]``."""
    functions: dict[str, Callable[[Any], Any]] = {name: value for name, value in given.items() if callable(value)}
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


def loss_weights(loss_reduction: str, lengths: Any, target_counts: Any, size: int) -> NDArray[np.float64] | None:
    """Return the weight of every sample in the mean loss, shape ``[size]``; None if all weights are equal.

    Weights of 0 disable the weights of losses for ``"unweighted"``.
    """
    if loss_reduction not in get_args(LossReduction):
        raise ValueError(f"loss_reduction={loss_reduction!r}: pass 'sample_mean', 'target_mean', 'sum' or 'unweighted'")
    if loss_reduction != "target_mean":
        if target_counts is not None:
            raise ValueError(
                f"target_counts= has no effect with loss_reduction={loss_reduction!r}. Remove it, or pass 'target_mean'"
            )
        return np.zeros(size) if loss_reduction == "unweighted" else None
    target_counts = lengths if target_counts is None else target_counts
    if target_counts is None:
        raise ValueError(
            "loss_reduction='target_mean' needs the number of targets of every sample. Pass target_counts= or lengths="
        )
    return non_negative("target_counts", target_counts, size)


def loss_weight_fn(loss_reduction: str, lengths: Any, target_counts: Any) -> Callable[[Any], float] | None:
    """Return a function from a sample of a stream to its weight in the mean loss; None if all weights are equal."""
    if loss_weights(loss_reduction, [0.0], None if target_counts is None else [0.0], 1) is None:
        return None
    if loss_reduction == "unweighted":
        return _weigh_nothing
    weight_fn = lengths if target_counts is None else target_counts
    if not callable(weight_fn):
        raise ValueError(
            f"loss_reduction='target_mean' with target_counts={target_counts!r}: for a stream, target_counts= or "
            "lengths= must be a function from a sample to its number of prediction targets"
        )
    return cast("Callable[[Any], float]", weight_fn)


def _weigh_nothing(sample: Any) -> float:
    return 0.0


def refuse_unused(context: str, **given: bool) -> None:
    """Raise a ValueError for the first argument of the data module that is given, because it has no effect with ``context``."""
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"FreeScaleDataModule({name}=...) has no effect with {context}. Remove it")


def refuse_options(context: str, options: Any, *names: str) -> None:
    """Raise a ValueError for the first of the fields ``names`` that is not the default, because ``context`` ignores it."""
    for name in names:
        value, default = getattr(options, name), getattr(type(options), name)
        plain = value is None or isinstance(value, (bool, int, float, str))  # no default is an array
        if not plain or value != default:
            raise ValueError(f"{type(options).__name__}({name}=...) has no effect with {context}. Remove it")


def check_loader_options(loader_options: Mapping[str, Any], streamed: bool) -> None:
    """Raise for options that ``torch.utils.data.DataLoader`` does not have, and for those that have no effect."""
    for name, value in loader_options.items():
        if name not in _LOADER_DEFAULTS:
            raise TypeError(
                f"FreeScaleDataModule({name}=...): neither FreeScaleDataModule nor torch.utils.data.DataLoader has this "
                "argument"
            )
        if name in _SET_BY_PACKAGE:
            raise ValueError(f"FreeScaleDataModule({name}=...): the plan of the steps sets this option. Remove it")
        if streamed and name != "num_workers" and value != _LOADER_DEFAULTS[name]:
            refuse_unused("an IterableDataset, whose loader only supports num_workers=", **{name: True})
