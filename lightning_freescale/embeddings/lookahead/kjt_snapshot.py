"""Whether the ids looked up are those that were submitted ahead."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import same_memory


class KJTSnapshot:
    """Ids as they are now, to be compared later with those that the model passes.

    Its tensors are kept, not copied, one by one: TorchRec adds lengths or offsets to a KeyedJaggedTensor later. Changes in
    place are seen by torch's version counters; those made behind torch's back (``.data``, a numpy view) are not.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        inverse = features.inverse_indices_or_none()
        self.inverse = None if inverse is None else inverse[1]
        strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        self.structure = (tuple(features.keys()), strides, () if inverse is None else tuple(inverse[0]))
        self.values, self.weights = features.values(), features.weights_or_none()
        self.lengths, self.offsets = features.lengths_or_none(), features.offsets_or_none()
        self._versions = self._count_writes()

    def matches(self, passed: KeyedJaggedTensor) -> bool:
        """Return whether ``passed`` holds the features of this snapshot in the same order, with the same lengths, ids, weights.

        Free if they share their memory. Otherwise contents are compared, and on CUDA the host waits for that. False if the
        snapshot's tensors have been changed in place: the ids are gone then.
        """
        other = KJTSnapshot(passed)
        return (
            self._versions is not None
            and self._count_writes() == self._versions
            and self.structure == other.structure
            and _same(self.values, other.values)
            and _same(self.weights, other.weights)
            and self._same_jagged(other)
            and _same(self.inverse, other.inverse)
        )

    def _count_writes(self) -> list[int] | None:
        """Return how often each tensor has been changed in place; None if torch does not count."""
        tensors = [t for t in (self.values, self.weights, self.lengths, self.offsets, self.inverse) if t is not None]
        return None if any(t.is_inference() for t in tensors) else [t._version for t in tensors]

    def _same_jagged(self, other: KJTSnapshot) -> bool:
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
