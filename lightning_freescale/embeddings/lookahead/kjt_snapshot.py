"""Are these the ids that were announced?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import same_memory


def same_features(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    """Whether two have the same features in the same order, with the same lengths, ids and weights.

    Free if they share their memory. Otherwise contents are compared, and on CUDA the host waits for that.
    """
    return _Parts.of(a).same(_Parts.of(b))


class KJTSnapshot:
    """Ids as they are now, to be compared later with those that the model passes.

    Changes in place are seen by torch's version counters; those made behind torch's back (``.data``, a numpy view) are not.

    Args:
        features: the ids; kept, not copied.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self.features, self._parts = features, _Parts.of(features)
        self._versions = self._parts.versions()

    def matches(self, passed: KeyedJaggedTensor) -> bool:
        """Whether ``passed`` holds the captured ids; see :func:`same_features` for what that costs.

        False if the captured tensors have been changed in place: what was captured is gone then.
        """
        unchanged = self._versions is not None and self._parts.versions() == self._versions
        return unchanged and self._parts.same(_Parts.of(passed))


@dataclass(frozen=True)
class _Parts:
    """The tensors of a KeyedJaggedTensor as it is now; TorchRec adds lengths or offsets to it later."""

    keys: tuple[str, ...]
    values: Tensor
    weights: Tensor | None
    lengths: Tensor | None
    offsets: Tensor | None
    strides: Any
    inverse: tuple[tuple[str, ...], Tensor] | None

    @classmethod
    def of(cls, features: KeyedJaggedTensor) -> _Parts:
        strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        inverse = features.inverse_indices_or_none()
        return cls(
            tuple(features.keys()),
            features.values(),
            features.weights_or_none(),
            features.lengths_or_none(),
            features.offsets_or_none(),
            strides,
            None if inverse is None else (tuple(inverse[0]), inverse[1]),
        )

    def versions(self) -> list[int] | None:
        """How often each tensor has been changed in place; None if torch does not count."""
        inverse = None if self.inverse is None else self.inverse[1]
        tensors = [t for t in (self.values, self.weights, self.lengths, self.offsets, inverse) if t is not None]
        return None if any(t.is_inference() for t in tensors) else [t._version for t in tensors]

    def same(self, other: _Parts) -> bool:
        mine, theirs = self.inverse or ((), None), other.inverse or ((), None)
        return (
            self.keys == other.keys
            and self.strides == other.strides
            and mine[0] == theirs[0]
            and _same(self.values, other.values)
            and _same(self.weights, other.weights)
            and self._same_jagged(other)
            and _same(mine[1], theirs[1])
        )

    def _same_jagged(self, other: _Parts) -> bool:
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
