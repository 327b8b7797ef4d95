"""Detect whether a model's batches are jagged, padded to their longest sample, or padded to a fixed length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale._runtime.batch_walk import Steps, walk

OFFSETS = range(-2, 3)
"""The number of positions that a model adds to every sample, such as a class token, or drops, such as the last item."""
_MOST_FIELDS = 32
"""Up to this length, a list with one entry per sample may also be a list of the batch's fields."""
Padding = Literal["none", "batch", "fixed"]
Place = list[tuple[str, tuple[int, ...]]]

_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_FEATURES = 8
_FEW, _SOME, _MANY = 2, 3, 6
"""The numbers of batches or different lengths that an explanation needs; more if it has more fitted numbers."""


@dataclass(frozen=True)
class BatchShapes:
    """Lengths of the samples of a batch and shapes of its tensors.

    Ranks can exchange ``dataclasses.astuple(shapes)``, which ``BatchShapes(*values)`` restores.
    """

    lengths: tuple[int, ...]  # given length of each sample
    # Place in the batch, kind and shape of each tensor. The kinds are "jagged", "padded", "integer" and "float". The rows of
    # shorter samples in a "padded" tensor end or begin with a constant value.
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """The length of the longest sample; 0 for an empty batch."""
        return max(self.lengths, default=0)


def shapes_of(batch: Any, lengths: ArrayLike) -> BatchShapes:
    """Return the shapes of the tensors in a batch, with the length of each sample in the order of the batch.

    The function searches mappings, lists, tuples, data classes and plain objects for dense tensors, numpy arrays, nested
    tensors and TorchRec's jagged tensors. A list with one tensor per sample counts as one jagged tensor.
    """
    counts = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
    if counts.ndim != 1 or (counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        raise ValueError(f"lengths={lengths!r}: pass one integer of at least 0 per sample")
    counts = counts.astype(np.int64)
    found: list[tuple[str, str, tuple[int, ...]]] = []
    jagged: set[Steps] = set()
    lists: set[Steps] = set()
    parts: defaultdict[str, list[int]] = defaultdict(list)
    for steps, node in walk(batch):
        if any(steps[:depth] in jagged for depth in range(len(steps))):
            continue
        if isinstance(node, (list, tuple)) and len(node) == len(counts):
            lists.add(steps)
        elif isinstance(node, (JaggedTensor, KeyedJaggedTensor)) or (isinstance(node, Tensor) and node.is_nested):
            jagged.add(steps)
            found += [(_name(steps) + key, "jagged", shape) for key, shape in _jagged_shapes(node)]
        elif (isinstance(node, Tensor) and node.layout is torch.strided) or isinstance(node, np.ndarray):
            shape = tuple(map(int, node.shape))
            depths = [depth for depth in range(len(steps)) if steps[:depth] in lists]
            for depth in depths if shape else ():
                parts[f"{_name(steps[:depth])}[*]{_name(steps[depth + 1 :])}"].append(shape[0])
            if not depths or len(counts) <= _MOST_FIELDS:
                found.append((_name(steps), _kind(node, counts), shape))
    found += [(name, "jagged", (sum(sizes),)) for name, sizes in parts.items() if len(sizes) == len(counts)]
    return BatchShapes(tuple(counts.tolist()), tuple(found))


def _name(steps: Steps) -> str:
    return "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in steps)


def _jagged_shapes(node: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shape of the values, in total and of each key, without computing values that TorchRec caches in the batch."""
    if isinstance(node, Tensor):
        yield "", (sum(len(part) for part in node.unbind()),)
        return
    yield "", tuple(node.values().shape)
    if isinstance(node, KeyedJaggedTensor) and len(node.keys()) > 1 and not node.variable_stride_per_key():
        offsets, lengths = node.offsets_or_none(), node.lengths_or_none()
        sums = (offsets.diff() if lengths is None and offsets is not None else lengths).view(len(node.keys()), -1).sum(1)
        yield from ((f"[{key!r}]", (size,)) for key, size in zip(node.keys(), sums.tolist()))


def _kind(tensor: Any, lengths: NDArray[np.int64]) -> str:
    kind = tensor.dtype.kind if isinstance(tensor, np.ndarray) else "f" if tensor.is_floating_point() else "i"
    if len(lengths) and type(tensor) in (Tensor, np.ndarray) and kind in "biuf" and tensor.ndim >= 2:
        for axis, other in permutations(range(min(tensor.ndim, 3)), 2):
            # the dimension of samples may be the second one, for example after that of items, targets and negatives
            if axis < 2 and tensor.shape[axis] == len(lengths) and lengths.min() + max(OFFSETS) < tensor.shape[other]:
                array = tensor if isinstance(tensor, np.ndarray) else (tensor.float() if kind == "f" else tensor).detach().cpu()
                if _has_padding(np.moveaxis(np.asarray(array), (axis, other), (0, 1)), lengths):
                    return "padded"
    return "integer" if kind in "biu" else "float"


def _has_padding(rows: NDArray[Any], lengths: NDArray[np.int64]) -> bool:
    """Return whether the rows of shorter samples end or begin with a constant value."""
    rows = rows.reshape(*rows.shape[:2], -1)
    for inwards in (rows, rows[:, ::-1]):
        constant = (inwards == inwards[lengths.argmin(), -1]).all(-1)
        filled = rows.shape[1] - np.logical_and.accumulate(constant[:, ::-1], axis=1).sum(1)
        expected = [np.clip(lengths + offset, 0, filled.max()) for offset in OFFSETS]
        # more than one position is padded, because the shortest row itself provides the value
        seen = filled.min() < min(filled.max(), rows.shape[1] - 1)
        if seen and any(np.array_equal(filled, each) for each in expected):
            return True
    return False


def sees_padding(batches: list[BatchShapes]) -> bool:
    """Return whether any batch has padded samples."""
    return any(kind == "padded" for shapes in batches for _, kind, _ in shapes.tensors)


def detect_padding(batches: list[BatchShapes]) -> tuple[Padding | None, int | None]:
    """Return how the model pads histories, from the first batches of all ranks, and the common length of all batches.

    The function looks for a tensor whose shape is explained by the lengths in every batch. For equal lengths, coincidences in a
    single batch and shapes that are independent of the lengths, the kind is None. Empty batches are ignored.

    - ``"none"``: The values of all samples are concatenated.
    - ``"batch"``: Samples are padded to the longest sample of the batch, or to the next multiple of a power of two.
    - ``"fixed"``: Samples are padded to the same length in all batches, or truncated to this length in every batch. Only then
      the length is not None.
    """
    batches = [shapes for shapes in batches if shapes.samples]
    if not batches:
        return None, None
    by_place = [{place: (kind, shape) for place, kind, shape in shapes.tensors} for shapes in batches]
    shared = [place for place in by_place[0] if all(place in tensors for tensors in by_place)]
    places = [[tensors[place] for tensors in by_place] for place in shared]
    places = [place for place in places if len({len(shape) for _, shape in place}) == 1]
    dense = [place for place in places if place[0][0] != "jagged"]
    # equally long samples do not distinguish jagged from padded batches
    differ = any(sum(shapes.lengths) < shapes.samples * shapes.longest for shapes in batches)
    if differ and any(_follows_longest(place, batches) for place in dense):
        return "batch", None
    padded = [[shapes.samples for (kind, _), shapes in zip(place, batches) if kind == "padded"] for place in dense]
    if not any(padded) and differ and any(_follows_total(place, batches) for place in places):
        return "none", None
    longest = [shapes.longest for shapes in batches]
    length = _fixed_length(dense, padded, batches)
    # unless no multiple explains padding so far beyond the longest sample, the longest ones must differ
    beyond = any(padded) and length is not None and length > max(longest) + _MULTIPLES[-1] + max(OFFSETS)
    if len(set(longest)) < _SOME and not beyond:
        length = None
    # if all batches reach the length or the multiple below it, later ones may still be shorter
    multiple = max(each for each in _MULTIPLES if (length or 1) % each == 0)
    if length is None or (min(longest) + max(OFFSETS) > length - multiple and len(batches) < _MANY):
        return None, None
    return "fixed", length


def _fixed_length(dense: list[Place], padded: list[list[int]], batches: list[BatchShapes]) -> int | None:
    """Return the length of the tensors with visible padding, or without such tensors, of integer tensors."""
    if any(padded):  # a few rows may appear padded by coincidence
        candidates = [place for place, samples in zip(dense, padded) if len(samples) >= _FEW and sum(samples) >= _MANY]
        least = 0
    else:  # a size below the longest length is probably a number of features
        candidates = [place for place in dense if len(place[0][1]) == 2 and all(kind == "integer" for kind, _ in place)]
        least = max(shapes.longest for shapes in batches) + min(OFFSETS)
    lengths = {length for place in candidates for length in _constant_lengths(place, batches)}
    alike = lengths and max(lengths) - min(lengths) <= max(OFFSETS) - min(OFFSETS)
    return max(lengths) if alike and max(lengths) >= least else None


def _axes(place: Place, batches: list[BatchShapes], most: int) -> Iterator[list[int]]:
    """Yield the sizes of each other dimension if the first or second one is that of samples in every batch."""
    dims = len(place[0][1])
    for axis in range(min(dims, 2)):
        if all(shape[axis] == shapes.samples for (_, shape), shapes in zip(place, batches)):
            yield from ([shape[other] for _, shape in place] for other in range(min(dims, most)) if other != axis)


def _constant_lengths(place: Place, batches: list[BatchShapes]) -> set[int]:
    padded = all(kind == "padded" for kind, _ in place)
    found = {sizes[0] for sizes in _axes(place, batches, 3 if padded else 2) if len(set(sizes)) == 1}
    return {max(found)} if padded and found else found


def _follows_longest(place: Place, batches: list[BatchShapes]) -> bool:
    """Return whether a dimension is the longest length of each batch, shifted, rounded up, and truncated."""
    longest = np.array([shapes.longest for shapes in batches])
    for sizes in (np.array(sizes) for sizes in _axes(place, batches, 3)):
        for multiple in _MULTIPLES if len(set(sizes.tolist())) >= _FEW else ():
            for offset in OFFSETS:
                expected = -(-(longest + offset) // multiple) * multiple
                plain = multiple == 1 and expected.max() <= sizes.max()
                enough = len(set(longest.tolist())) >= (_FEW if plain else _SOME)
                if enough and np.array_equal(sizes, np.minimum(expected, sizes.max())):
                    return True
    return False


def _follows_total(place: Place, batches: list[BatchShapes]) -> bool:
    """Return whether the first or second dimension is the sum of the shifted and truncated lengths, times some features."""
    first = max(range(len(batches)), key=lambda index: batches[index].longest)
    for axis in range(min(len(place[0][1]), 2)):
        sizes = [shape[axis] for _, shape in place]
        if len({size / shapes.samples for size, shapes in zip(sizes, batches)}) < _SOME:
            continue
        for offset in OFFSETS:
            sums = [_sums_of_cut(np.maximum(np.array(shapes.lengths) + offset, 0)) for shapes in batches]
            for features in range(1, _MOST_FEATURES + 1):
                cut = int(np.searchsorted(sums[first], sizes[first] / features))
                # truncation that is fitted to one batch agrees with others only by coincidence
                enough = cut >= len(sums[first]) - 1 or len(batches) >= _MANY
                if enough and all(features * each[min(cut, len(each) - 1)] == size for each, size in zip(sums, sizes)):
                    return True
    return False


def _sums_of_cut(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of the lengths truncated at 0, 1, 2 and so on, up to the longest."""
    longer = len(lengths) - np.cumsum(np.bincount(lengths))
    return np.concatenate([[0], np.cumsum(longer[:-1])])
