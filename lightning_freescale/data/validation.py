"""Check the arguments of a data module: data sets, numbers of samples, weights, and options that would have no effect."""

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

# By name, because neither is a dependency. Their len() is the number of one rank's samples, their numbers reach all.
_STREAMING_SIZES: dict[str, Callable[[Any], int]] = {
    "litdata": lambda dataset: sum(end - start for start, end in dataset.region_of_interest),
    "streaming": lambda dataset: dataset.size,  # MosaicML's
}


def is_stream(dataset: Any) -> TypeGuard[IterableDataset[Any]]:
    """Return whether samples can only be read one after the other.

    The ``StreamingDataset`` of litdata and of MosaicML's streaming is an ``IterableDataset`` and no stream: ``dataset[i]``
    returns the sample of number ``i``, the same on every rank and in every worker. In any other ``IterableDataset`` a number
    may mean another sample on another rank.
    """
    return isinstance(dataset, IterableDataset) and _streaming_size_fn(dataset) is None


def size_of(dataset: Any, argument: str) -> int:
    """Return the number of samples of a map-style data set, for all ranks together; errors name it ``argument``.

    Raises:
        ValueError: it is not map-style, or empty.
    """
    if is_stream(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{argument}={type(dataset).__name__} is not map-style: it needs __len__ and __getitem__")
    size = (_streaming_size_fn(dataset) or len)(dataset)
    if not size:
        raise ValueError(f"{argument}={type(dataset).__name__} is empty: pass at least one sample per rank")
    return size


def numbers_of_samples(dataset: Any, size: int, **given: Any) -> dict[str, NDArray[np.float64]]:
    """Return the results of those arguments that are functions of one sample, shape ``[size]``; reads the data set once.

    Raises:
        ValueError: a number is negative or not finite.
    """
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

    Weights of 0 leave the losses as they are, for ``"unweighted"``.

    Raises:
        ValueError: there is no such ``loss_reduction``, or it has no use for ``target_counts``.
    """
    if loss_reduction not in get_args(LossReduction):
        raise ValueError(f"loss_reduction={loss_reduction!r}: choose 'sample_mean', 'target_mean', 'sum' or 'unweighted'")
    if loss_reduction != "target_mean":
        if target_counts is not None:
            raise ValueError(f"target_counts= is for loss_reduction='target_mean', not {loss_reduction!r}: leave it out")
        return np.zeros(size) if loss_reduction == "unweighted" else None
    target_counts = lengths if target_counts is None else target_counts
    if target_counts is None:
        raise ValueError(
            "loss_reduction='target_mean' needs target_counts=, the prediction targets of every sample, or lengths="
        )
    return non_negative("target_counts", target_counts, size)


def loss_weight_fn(loss_reduction: str, lengths: Any, target_counts: Any) -> Callable[[Any], float] | None:
    """Return a function from a sample of a stream to its weight in the mean loss; None if all weights are equal.

    Raises:
        ValueError: as in :func:`loss_weights`, or ``target_counts`` is no function.
    """
    if loss_weights(loss_reduction, [0.0], None if target_counts is None else [0.0], 1) is None:
        return None
    if loss_reduction == "unweighted":
        return _weigh_nothing
    weight_fn = lengths if target_counts is None else target_counts
    if not callable(weight_fn):
        raise ValueError(
            f"loss_reduction='target_mean' with target_counts={target_counts!r}: for a stream pass target_counts= or lengths=, "
            "a function from a sample to its number of prediction targets"
        )
    return cast("Callable[[Any], float]", weight_fn)


def _weigh_nothing(sample: Any) -> float:
    return 0.0


def refuse_unused(context: str, **given: bool) -> None:
    """Refuse arguments of the data module that are given (true) although they have no effect with ``context``.

    Raises:
        ValueError: names the first.
    """
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"FreeScaleDataModule({name}=...) has no meaning for {context}: leave it out")


def refuse_options(context: str, options: Any, *names: str) -> None:
    """Refuse those fields ``names`` of a dataclass that are not their defaults although ``context`` makes no use of them.

    Raises:
        ValueError: names the first.
    """
    for name in names:
        value, default = getattr(options, name), getattr(type(options), name)
        plain = value is None or isinstance(value, (bool, int, float, str))  # others, such as arrays, are no defaults
        if not plain or value != default:
            raise ValueError(f"{type(options).__name__}({name}=...) has no meaning for {context}: leave it out")


def check_loader_options(loader_options: Mapping[str, Any], streamed: bool) -> None:
    """Check the options for ``torch.utils.data.DataLoader``; streams accept only ``num_workers``.

    Raises:
        TypeError: torch's loader has no such option.
        ValueError: the package sets the option itself, or has no use for it.
    """
    for name, value in loader_options.items():
        if name not in _LOADER_DEFAULTS:
            raise TypeError(
                f"FreeScaleDataModule({name}=...): there is no such argument, neither here nor in torch.utils.data.DataLoader"
            )
        if name in _SET_BY_PACKAGE:
            raise ValueError(f"FreeScaleDataModule({name}=...) is not yours to set: the plan of the steps does. Leave it out")
        if streamed and name != "num_workers" and value != _LOADER_DEFAULTS[name]:
            refuse_unused("an IterableDataset, of whose loader only num_workers= can be set", **{name: True})
