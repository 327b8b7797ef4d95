"""Which ids will the model look up in the next batch? Learn from one step where in the batch they are."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import KJTPath, find_path, follow
from lightning_freescale.embeddings.lookahead.kjt_snapshot import KJTSnapshot, same_features

__all__ = ["MODES", "KJTPath", "KJTSnapshot", "Probe", "find_path", "follow", "same_features"]

Mode = Literal["probe", "ghost", "none"]
MODES: tuple[Mode, ...] = ("probe", "ghost", "none")
_PATIENCE = 3
"""Failures in a row after which a way to know the ids is given up."""


class Probe:
    """Finds out where in a batch one collection's ids are, and when to stop trying.

    Args:
        name: of the collection, for the warning.

    Attributes:
        mode: how the next ids are known: ``"probe"``, they stand in the batch; ``"ghost"``, a trial run of the step tells;
            ``"none"``, not at all.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode: Mode = "probe"
        self._path: KJTPath | None = None
        self._failures, self._reasons = 0, ["they do not stand in the batch"]

    @property
    def known(self) -> bool:
        """Whether :meth:`ids_of` has a place to look at."""
        return self.mode == "probe" and self._path is not None

    def learn(self, batch: Any, features: KeyedJaggedTensor) -> None:
        """``features`` were looked up in a step on ``batch`` and had not been announced."""
        if self.mode != "probe":
            return
        path = find_path(batch, features)
        if path is not None:
            self._path = path
        elif self._path is None:
            self._next_mode()

    def ids_of(self, batch: Any) -> KeyedJaggedTensor | None:
        """The ids in another batch; None if they are not known. Ask once per batch: finding nothing counts as a failure."""
        if self.mode != "probe" or self._path is None:
            return None
        found = follow(batch, self._path)
        if found is None:
            self._failed("batches differ in where they stand")
        return found

    def report(self, matched: bool) -> None:
        """Whether ids that were announced, in either mode, were those looked up."""
        if matched:
            self._failures = 0
        else:
            self._failed("the model looks up others than those that stand in the batch")

    def give_up(self, reason: str) -> None:
        """A trial run did not tell the ids: stop trying, and say why."""
        if self.mode == "none":
            return
        self.mode, self._path = "none", None
        warnings.warn(
            f"collection {self.name!r}: the next batch's ids cannot be known ahead ({'; '.join([*self._reasons, reason])}): "
            "its exchange is not overlapped. Pass the KeyedJaggedTensor as it stands in the batch",
            stacklevel=2,
        )

    def join(self, mode: int) -> None:
        """Some rank is at this place in :data:`MODES`: a trial run may contain collectives, so all ranks do it or none."""
        if mode > MODES.index(self.mode):
            self.mode, self._path, self._failures = MODES[mode], None, 0

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures < _PATIENCE:
            return
        if self.mode == "probe":
            self._reasons = [reason]
            self._next_mode()
        else:
            self.give_up("a trial run of training_step looks up others than the step itself")

    def _next_mode(self) -> None:
        self.mode, self._path, self._failures = "ghost", None, 0
