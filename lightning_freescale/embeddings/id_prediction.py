"""Predict the ids of the next batch: find the path to the ids in a batch, follow it in the next batch, and compare ids.

Lookups have no weights here, see :func:`.without_weights`. Those of a batch are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale._runtime.batch_walk import Steps, walk
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds

_MISSING = object()


@dataclass(frozen=True)
class KJTPath:
    """The path to the ids in a batch."""

    whole: Steps | None  # path of a KeyedJaggedTensor; None if the model builds one from tensors in the batch
    keys: tuple[str, ...] = ()  # features, if the model builds the KeyedJaggedTensor
    tensors: tuple[tuple[str, Steps], ...] = ()  # by the names of KeyedJaggedTensor's arguments, or "ids" for EmbeddingIds
    slices: tuple[slice, ...] = ()  # slices of the tensor "ids"; empty for the whole tensor


def find_path(batch: Any, features: KeyedJaggedTensor) -> KJTPath | None:
    """Return the path in ``batch`` to ``features`` or to the tensors that it was built from; None if there is none.

    The search includes mappings, lists, tuples, dataclasses and plain objects. It prefers the same object, then a
    KeyedJaggedTensor with the same memory, then single tensors. Empty tensors have no memory, so only the same object is found.
    The ids of an ``nn.Embedding`` may be a slice of a tensor, such as ``items[:, :-1]``.
    """
    nodes = list(walk(batch))
    if isinstance(features, EmbeddingIds):
        return _find_ids(nodes, features)
    whole = _first(nodes, lambda node: node is features)
    if whole is None:
        whole = _first(nodes, lambda node: isinstance(node, KeyedJaggedTensor) and _same_tensors(node, features))
    return KJTPath(whole) if whole is not None else _find_tensors(nodes, features)


def follow_path(batch: Any, path: KJTPath) -> KeyedJaggedTensor | None:
    """Return the ids of another batch; None if the path does not exist there or leads to another type."""
    if path.whole is not None:
        found = _at(batch, path.whole)
        return found if isinstance(found, KeyedJaggedTensor) else None
    tensors = {name: _at(batch, steps) for name, steps in path.tensors}
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return None
    if "ids" in tensors:
        ids = tensors["ids"]
        return EmbeddingIds(path.keys[0], ids[path.slices]) if ids.dim() >= len(path.slices) else None
    return KeyedJaggedTensor(keys=list(path.keys), **tensors)


def same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are the same object, the same view of the same memory, or both None."""
    if a is b:
        return True
    if a is None or b is None or a.layout is not torch.strided or b.layout is not torch.strided or a.is_nested or b.is_nested:
        return False
    same_view = (a.device, a.dtype, a.shape, a.stride()) == (b.device, b.dtype, b.shape, b.stride())
    return same_view and a.data_ptr() == b.data_ptr() != 0


def _find_tensors(nodes: list[tuple[Steps, Any]], features: KeyedJaggedTensor) -> KJTPath | None:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return None  # built from more than two tensors
    values = _find_tensor(nodes, features.values())
    # the model passes either lengths or offsets, and TorchRec computes the other, which is in no batch
    for name, tensor in (("lengths", features.lengths_or_none()), ("offsets", features.offsets_or_none())):
        steps = None if tensor is None else _find_tensor(nodes, tensor)
        if values is not None and steps is not None:
            return KJTPath(None, tuple(features.keys()), (("values", values), (name, steps)))
    return None


def _find_ids(nodes: list[tuple[Steps, Any]], features: EmbeddingIds) -> KJTPath | None:
    found, keys = ((steps, node) for steps, node in nodes if isinstance(node, Tensor)), tuple(features.keys())
    tensors = [(steps, node) for steps, node in found if node.layout is torch.strided and not node.is_nested]
    for steps, node in tensors:  # the ids may have any shape, because features contain them as one row
        if same_memory(node, features.ids) or (node.is_contiguous() and same_memory(node.view(-1), features.values())):
            return KJTPath(None, keys, (("ids", steps),))
    for steps, node in tensors:
        slices = _slices_of(node, features.ids)
        if slices is not None:
            return KJTPath(None, keys, (("ids", steps),), slices)
    return None


def _slices_of(whole: Tensor, part: Tensor) -> tuple[slice, ...] | None:
    """Return the slices of ``whole`` that are ``part``, with the same number of dimensions; None if there are none.

    Starts count from the front and ends count from the back, as in ``[1:]`` and ``[:-1]``, because other batches have other
    sizes.
    """
    same = whole.dtype == part.dtype and whole.stride() == part.stride() and min(whole.stride(), default=0) > 0
    if not same or part.data_ptr() == 0 or whole.untyped_storage().data_ptr() != part.untyped_storage().data_ptr():
        return None
    offset, slices = int(part.storage_offset() - whole.storage_offset()), [slice(None)] * whole.dim()
    for dim in sorted(range(whole.dim()), key=whole.stride, reverse=True):
        start, offset = divmod(offset, whole.stride(dim))
        left = whole.shape[dim] - start - part.shape[dim]
        if start < 0 or left < 0:
            return None
        slices[dim] = slice(start, -left if left else None)
    return tuple(slices)


def _find_tensor(nodes: list[tuple[Steps, Any]], tensor: Tensor) -> Steps | None:
    return _first(nodes, lambda node: isinstance(node, Tensor) and same_memory(node, tensor))


def _first(nodes: list[tuple[Steps, Any]], wanted: Callable[[Any], bool]) -> Steps | None:
    return next((steps for steps, node in nodes if wanted(node)), None)


def _same_tensors(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    lengths, offsets = (a.lengths_or_none(), b.lengths_or_none()), (a.offsets_or_none(), b.offsets_or_none())
    jagged = any(x is not None and same_memory(x, y) for x, y in (lengths, offsets))
    return jagged and a.keys() == b.keys() and same_memory(a.values(), b.values())


def _at(batch: Any, steps: Steps) -> Any:
    node = batch
    for kind, key in steps:
        if kind == "attribute":
            node = getattr(node, key, _MISSING)
        elif isinstance(node, Mapping):
            node = node[key] if key in node else _MISSING  # noqa: SIM401 (get() of a defaultdict is not it)
        elif isinstance(node, (list, tuple)) and isinstance(key, int):
            node = node[key] if key < len(node) else _MISSING
        else:
            return _MISSING
    return node


class KJTSnapshot:
    """A copy of predicted ids, ``features``, to submit now and to compare later with the ids that the model looks up.

    On the CPU the comparison uses the copy, because torch does not count writes through a NumPy view. On CUDA, where there are
    no such views, it uses the original tensors and detects writes by torch's version counters. Writes through ``.data`` are not
    detected. Inference tensors have no counters, so the copy is compared. The tensors are kept one by one, because TorchRec
    adds lengths or offsets to a KeyedJaggedTensor later.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        kept = _FeatureTensors(features)
        self.features = _copy(features)
        self._copied = features.values().device.type == "cpu" or any(tensor.is_inference() for tensor in kept.tensors())
        self._parts = _FeatureTensors(self.features) if self._copied else kept
        self._writes = self._count_writes()

    def matches(self, passed: KeyedJaggedTensor) -> bool:
        """Return whether ``passed`` has the same features, lengths and ids in the same order.

        On CUDA, tensors with the same memory need no comparison. The result is False if the originals were changed in place.
        Otherwise the host waits for the comparison.
        """
        return self._count_writes() == self._writes and self._parts.same(_FeatureTensors(passed))

    def _count_writes(self) -> list[int]:
        return [] if self._copied else [tensor._version for tensor in self._parts.tensors()]


class _FeatureTensors:
    def __init__(self, features: KeyedJaggedTensor) -> None:
        inverse = features.inverse_indices_or_none()
        self.inverse = None if inverse is None else inverse[1]
        strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        self.structure = (tuple(features.keys()), strides, () if inverse is None else tuple(inverse[0]))
        self.values, self.lengths, self.offsets = features.values(), features.lengths_or_none(), features.offsets_or_none()

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.values, self.lengths, self.offsets, self.inverse) if t is not None]

    def same(self, other: _FeatureTensors) -> bool:
        return (
            self.structure == other.structure
            and _same(self.values, other.values)
            and self._same_jagged(other)
            and _same(self.inverse, other.inverse)
        )

    def _same_jagged(self, other: _FeatureTensors) -> bool:
        # lengths determine offsets. If both exist, one of them may share its memory
        both = ((self.lengths, other.lengths), (self.offsets, other.offsets))
        if any(a is not None and same_memory(a, b) for a, b in both):
            return True
        return _same(self._lengths(), other._lengths())

    def _lengths(self) -> Tensor | None:
        return torch.diff(self.offsets) if self.lengths is None and self.offsets is not None else self.lengths


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if same_memory(a, b):
        return True
    if a is None or b is None or (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
        return False
    return torch.equal(a, b)  # on CUDA the host waits


def _copy(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths, offsets, inverse = features.lengths_or_none(), features.offsets_or_none(), features.inverse_indices_or_none()
    return KeyedJaggedTensor(
        features.keys(),
        features.values().clone(),
        lengths=None if lengths is None else lengths.clone(),
        offsets=None if offsets is None else offsets.clone(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
        inverse_indices=None if inverse is None else (inverse[0], inverse[1].clone()),
    )


_PATIENCE = 3
"""The number of successive failures after which a probe gives up."""


GivesUp: TypeAlias = tuple[bool, bool]
"""Whether a rank gives up the prediction of ids if the prediction for the current batch is right, and if it is wrong."""


class Probe:
    """The prediction of the ids of one collection, from paths in the batch or from a function of the user.

    A model may look up the collection several times in a step, and steps may have different numbers of lookups. The probe
    follows all paths at which the ids of any step were found.
    """

    def __init__(self) -> None:
        self.gave_up, self.reason = False, ""
        self._paths: list[KJTPath] = []
        self._function: str | None = None  # the name of the function that has returned the current ids
        self._failures = 0

    @property
    def known(self) -> bool:
        """Whether a function returns the ids or :meth:`ids_of` has paths to follow."""
        return bool(self._paths) or self._function is not None

    @property
    def gives_up(self) -> GivesUp:
        """The value of ``gave_up`` after the next lookup, for either outcome."""
        return self.gave_up, self.gave_up or self._failures + 1 >= _PATIENCE

    def learn(self, batch: Any, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Learn the paths in ``batch`` to the ids of ``lookups`` that were not predicted."""
        if not self.gave_up and not self._find_new(batch, lookups) and not self._paths:
            self.give_up("they are not in the batch")

    def ids_of(self, batch: Any) -> list[KeyedJaggedTensor] | None:
        """Return the ids of each lookup of another batch; None if they are not known. Call it once, as it counts failures."""
        self._function = None
        if not self._paths:
            return None
        found = [features for path in self._paths if (features := follow_path(batch, path)) is not None]
        if not found:
            self._count_failure("they are at different places in different batches")
        return found or None

    def accept(self, lookups: Sequence[KeyedJaggedTensor], function: str) -> list[KeyedJaggedTensor] | None:
        """Return the ids that the user's function has returned; None if they were wrong too often."""
        if self.gave_up:
            return None
        self._function = function
        return list(lookups)

    def report(self, predicted: bool, batch: Any, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Record whether the prediction for the step on ``batch`` was right."""
        if predicted:
            self._failures = 0
        elif self.gave_up:
            return  # the ids were submitted before the probe gave up
        elif self._function is not None:
            self._count_failure(f"{self._function} returns other ids than the model looks up")
        elif not self._find_new(batch, lookups):
            self._count_failure("the model looks up other ids than those in the batch")

    def give_up(self, reason: str) -> None:
        """Stop the prediction."""
        if not self.gave_up:
            self.gave_up, self.reason, self._paths, self._function = True, reason, [], None

    def give_up_with_others(self) -> None:
        """Give up because another rank has given up: an exchange is overlapped on all ranks or on none."""
        if self._function is None:
            self.give_up("another rank cannot predict them")
        else:
            self.give_up(f"on another rank {self._function} returns other ids than the model looks up")

    def _find_new(self, batch: Any, lookups: Sequence[KeyedJaggedTensor]) -> bool:
        """Add the paths of lookups; return whether all lookups have a path and one is new."""
        new = [path for features in lookups if (path := find_path(batch, features)) is not None]
        all_found = len(new) == len(lookups)
        for path in self._paths:
            if path in new:  # the same ids may be looked up twice
                new.remove(path)
        if not all_found or not new:
            return False
        self._paths += new
        return True

    def _count_failure(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= _PATIENCE:
            self.give_up(reason)
