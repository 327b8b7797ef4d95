"""Whether the ids looked up are those that were submitted ahead."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import same_memory


class KJTSnapshot:
    """Ids as they are now, to be submitted, and to be compared later with those that the model passes.

    They are copied: whoever reads them later must not see what has become of them since. On the CPU they are compared with the
    copy, because torch does not count what a numpy view changes. On CUDA, where there is no such view, the tensors themselves
    are kept as well, one by one (TorchRec adds lengths or offsets to a KeyedJaggedTensor later), and changes in place are seen
    by torch's version counters; those through ``.data`` are not. Inference tensors have none.

    Attributes:
        features: the copy, to submit.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        kept = _FeatureTensors(features)
        self.features = _copy(features)
        self._copied = features.values().device.type == "cpu" or any(tensor.is_inference() for tensor in kept.tensors())
        self._parts = _FeatureTensors(self.features) if self._copied else kept
        self._writes = self._count_writes()

    def matches(self, passed: KeyedJaggedTensor) -> bool:
        """Return whether ``passed`` holds the features of this snapshot in the same order, with the same lengths, ids, weights.

        On CUDA it is free if they share their memory; otherwise contents are compared, and the host waits for that. False if
        the snapshot's tensors have been changed in place: the ids are gone then.
        """
        return self._count_writes() == self._writes and self._parts.same(_FeatureTensors(passed))

    def _count_writes(self) -> list[int]:
        """Return how often each tensor has been changed in place; nobody else has copies."""
        return [] if self._copied else [tensor._version for tensor in self._parts.tensors()]


class _FeatureTensors:
    def __init__(self, features: KeyedJaggedTensor) -> None:
        inverse = features.inverse_indices_or_none()
        self.inverse = None if inverse is None else inverse[1]
        strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        self.structure = (tuple(features.keys()), strides, () if inverse is None else tuple(inverse[0]))
        self.values, self.weights = features.values(), features.weights_or_none()
        self.lengths, self.offsets = features.lengths_or_none(), features.offsets_or_none()

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.values, self.weights, self.lengths, self.offsets, self.inverse) if t is not None]

    def same(self, other: _FeatureTensors) -> bool:
        return (
            self.structure == other.structure
            and _same(self.values, other.values)
            and _same(self.weights, other.weights)
            and self._same_jagged(other)
            and _same(self.inverse, other.inverse)
        )

    def _same_jagged(self, other: _FeatureTensors) -> bool:
        """One of the two tells the other, and both may be there: look for shared memory before comparing."""
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
    return torch.equal(a, b)  # on CUDA the host waits here


def _copy(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights, lengths, offsets = features.weights_or_none(), features.lengths_or_none(), features.offsets_or_none()
    inverse = features.inverse_indices_or_none()
    return KeyedJaggedTensor(
        features.keys(),
        features.values().clone(),
        None if weights is None else weights.clone(),
        None if lengths is None else lengths.clone(),
        None if offsets is None else offsets.clone(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
        inverse_indices=None if inverse is None else (inverse[0], inverse[1].clone()),
    )
