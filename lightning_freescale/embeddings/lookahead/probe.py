"""Which ids will the model look up in the next batch? Learn from one step where in the batch they are."""

from __future__ import annotations

import warnings
from enum import IntEnum
from typing import Any, NamedTuple

from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import KJTPath, find_path, follow_path

_PATIENCE = 3
"""Failures in a row after which a way to know the ids is given up."""


class LookaheadMode(IntEnum):
    """How the next ids are known; the ranks take the highest of any, so that all know them alike."""

    PROBE = 0  # they stand in the batch
    DRY_RUN = 1  # a trial run of training_step tells them
    NONE = 2  # not at all


class ModeProposal(NamedTuple):
    """The mode that a rank proposes to the others, before it has compared the current batch's ids.

    Attributes:
        mode: if they turn out as predicted, or were not predicted.
        if_mispredicted: if they turn out to be others.
    """

    mode: int = 0
    if_mispredicted: int = 0


class Probe:
    """Finds out where in a batch the ids of the collection ``name`` are, and when to stop trying."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode = LookaheadMode.PROBE
        self._path: KJTPath | None = None
        self._failures, self._reasons = 0, ["they do not stand in the batch"]

    @property
    def known(self) -> bool:
        """Whether :meth:`ids_of` has a place to look at."""
        return self._path is not None

    @property
    def proposal(self) -> ModeProposal:
        """The mode after the lookup that comes next, for either outcome."""
        last = self.mode == LookaheadMode.PROBE and self._failures + 1 >= _PATIENCE
        return ModeProposal(self.mode, LookaheadMode.DRY_RUN if last else self.mode)

    def learn(self, batch: Any, features: KeyedJaggedTensor) -> None:
        """Learn where in ``batch`` the ids stand that were looked up in a step on it, if they were not known ahead."""
        if self.mode != LookaheadMode.PROBE:
            return
        path = find_path(batch, features)
        if path is not None:
            self._path = path
        elif self._path is None:
            self._set_mode(LookaheadMode.DRY_RUN)

    def ids_of(self, batch: Any) -> KeyedJaggedTensor | None:
        """Return the ids in another batch; None if they are not known. Ask once per batch: finding none is a failure."""
        if self._path is None:
            return None
        found = follow_path(batch, self._path)
        if found is None:
            self._count_failure("batches differ in where they stand")
        return found

    def report(self, predicted: bool) -> None:
        """Count whether ids that were submitted ahead, in either mode, were those looked up."""
        if predicted:
            self._failures = 0
        else:
            self._count_failure("the model looks up others than those that stand in the batch")

    def give_up(self, reason: str) -> None:
        """Stop trying because a trial run did not tell the ids, and warn with the reason."""
        if self.mode == LookaheadMode.NONE:
            return
        self._set_mode(LookaheadMode.NONE)
        warnings.warn(
            f"collection {self.name!r}: the next batch's ids cannot be known ahead ({'; '.join([*self._reasons, reason])}): "
            "its exchange is not overlapped. Pass the KeyedJaggedTensor as it stands in the batch",
            stacklevel=2,
        )

    def follow_agreed_mode(self, mode: int) -> None:
        """Do what the rank does that knows least: a trial run may contain collectives, so all ranks do it or none."""
        if mode > self.mode:
            self._set_mode(LookaheadMode(mode))

    def _count_failure(self, reason: str) -> None:
        self._failures += 1
        if self._failures < _PATIENCE:
            return
        if self.mode == LookaheadMode.PROBE:
            self._reasons = [reason]
            self._set_mode(LookaheadMode.DRY_RUN)
        else:
            self.give_up("a trial run of training_step looks up others than the step itself")

    def _set_mode(self, mode: LookaheadMode) -> None:
        self.mode, self._path, self._failures = mode, None, 0
