"""Shapes of the tensors in a batch, beside the lengths of its samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_freescale._walk import Steps, walk

OFFSETS = range(-2, 3)
"""Positions that a model adds to every sample, such as a class token, or drops, such as the last item of the inputs."""
_MOST_FIELDS = 32
"""A longer list with one entry for each sample is a list of samples. A shorter one may hold the fields of the batch."""


@dataclass(frozen=True)
class BatchShapes:
    """Lengths of the samples of a batch and shapes of its tensors.

    Ranks can exchange ``dataclasses.astuple(shapes)``: it has only numbers, text and tuples. ``BatchShapes(*values)`` restores
    the object.

    Attributes:
        lengths: length of each sample, as the user gave it.
        tensors: place in the batch, kind and shape of each tensor. The kinds are ``"jagged"``, ``"padded"``, ``"integer"`` and
            ``"float"``. The rows of a ``"padded"`` tensor end or begin with a constant value where the samples are shorter.
    """

    lengths: tuple[int, ...]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Length of the longest sample, 0 in an empty batch."""
        return max(self.lengths, default=0)

    @property
    def total(self) -> int:
        """Sum of the lengths."""
        return sum(self.lengths)


def shapes_of(batch: Any, lengths: ArrayLike) -> BatchShapes:
    """Return the shapes of the tensors in a batch, beside the lengths of its samples.

    The function looks into mappings, lists, tuples, data classes and plain objects. It collects dense torch tensors, numpy
    arrays, nested tensors and TorchRec's jagged tensors. A list with one tensor for each sample counts as one jagged tensor.
    The batch does not change.

    Args:
        batch: batch that the collate function returned.
        lengths: number of interactions of each sample, of shape ``(samples,)``. The order is that of the batch.

    Raises:
        ValueError: ``lengths`` is not one-dimensional, holds other values than integers, or holds a negative number.
    """
    counts = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
    if counts.ndim != 1 or (counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        raise ValueError(f"lengths must be integers of at least 0 in one dimension, got {lengths!r}: pass one for each sample")
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
    """Yield the shape of the values, also of each key. Nothing is computed that TorchRec would keep in the batch."""
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
            # samples may come behind one other dimension, such as that of items, targets and negatives
            if axis < 2 and tensor.shape[axis] == len(lengths) and lengths.min() + max(OFFSETS) < tensor.shape[other]:
                array = tensor if isinstance(tensor, np.ndarray) else (tensor.float() if kind == "f" else tensor).detach().cpu()
                if _has_padding(np.moveaxis(np.asarray(array), (axis, other), (0, 1)), lengths):
                    return "padded"
    return "integer" if kind in "biu" else "float"


def _has_padding(rows: NDArray[Any], lengths: NDArray[np.int64]) -> bool:
    """Return whether each of the rows ends or begins with one value where its sample is shorter."""
    rows = rows.reshape(*rows.shape[:2], -1)
    for inwards in (rows, rows[:, ::-1]):
        constant = (inwards == inwards[lengths.argmin(), -1]).all(-1)
        filled = rows.shape[1] - np.logical_and.accumulate(constant[:, ::-1], axis=1).sum(1)
        expected = [np.clip(lengths + offset, 0, filled.max()) for offset in OFFSETS]
        # the value itself fills one position
        seen = filled.min() < min(filled.max(), rows.shape[1] - 1)
        if seen and any(np.array_equal(filled, each) for each in expected):
            return True
    return False
