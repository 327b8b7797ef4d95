"""Are the next batch's ids known, and from where? Learn from one step where in the batch they are."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import KJTPath, find_path, follow_path

_PATIENCE = 3
"""Failures in a row after which a probe gives up."""


class LookaheadMode(IntEnum):
    """How the next ids are known; the ranks take the highest of any, so that all know them alike."""

    PROBE = 0  # they stand in the batch, or a function of the user tells them
    NONE = 1  # not at all


class ModeProposal(NamedTuple):
    """The mode that a rank proposes to the others, before it has compared the current batch's ids.

    Attributes:
        mode: if they turn out as predicted, or were not predicted.
        if_mispredicted: if they turn out to be others.
    """

    mode: int = 0
    if_mispredicted: int = 0


class Probe:
    """How the ids of one collection are known: where in a batch they are, who else tells them, and when to stop trying.

    A model may look the collection up several times in a step, now more often, now less: all places are asked that any step's
    lookups were found at.

    Attributes:
        mode: how they are known now.
        reason: why they are not known, once :meth:`give_up` was called.
    """

    def __init__(self) -> None:
        self.mode, self.reason = LookaheadMode.PROBE, ""
        self._paths: list[KJTPath] = []
        self._told_by: str | None = None
        self._failures = 0

    @property
    def known(self) -> bool:
        """Whether somebody tells the ids, or :meth:`ids_of` has places to look at."""
        return bool(self._paths) or self._told_by is not None

    @property
    def proposal(self) -> ModeProposal:
        """The mode after the lookup that comes next, for either outcome."""
        last = self._failures + 1 >= _PATIENCE
        return ModeProposal(self.mode, LookaheadMode.NONE if last else self.mode)

    def learn(self, batch: Any, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Learn where in ``batch`` the ids stand that were looked up in a step on it, if they were not known ahead."""
        if self.mode == LookaheadMode.PROBE and not self._find_new(batch, lookups) and not self._paths:
            self.give_up("they do not stand in the batch")

    def ids_of(self, batch: Any) -> list[KeyedJaggedTensor] | None:
        """Return the ids in another batch, by lookup; None if they are not known. Ask once per batch: it may be a failure."""
        self._told_by = None
        if not self._paths:
            return None
        found = [features for path in self._paths if (features := follow_path(batch, path)) is not None]
        if not found:
            self._count_failure("batches differ in where they stand")
        return found or None

    def told(self, lookups: Sequence[KeyedJaggedTensor], by: str) -> list[KeyedJaggedTensor] | None:
        """Return the ids that somebody has told of another batch; None if they were wrong too often."""
        if self.mode != LookaheadMode.PROBE:
            return None
        self._told_by = by
        return list(lookups)

    def report(self, predicted: bool, batch: Any, lookups: Sequence[KeyedJaggedTensor]) -> None:
        """Take note of whether ids submitted ahead were those looked up in the step on ``batch``."""
        if predicted:
            self._failures = 0
        elif self.mode == LookaheadMode.NONE:
            return  # they had been submitted before it gave up
        elif self._told_by is not None:
            self._count_failure(f"{self._told_by} tells others than the model looks up")
        elif not self._find_new(batch, lookups):
            self._count_failure("the model looks up others than those that stand in the batch")

    def give_up(self, reason: str) -> None:
        """Stop trying: nobody tells the ids."""
        if self.mode != LookaheadMode.NONE:
            self.mode, self.reason, self._paths, self._told_by = LookaheadMode.NONE, reason, [], None

    def follow_agreed_mode(self, mode: int) -> None:
        """Do what the rank does that knows least: an exchange is overlapped on all ranks or on none."""
        if mode > self.mode:
            elsewhere = "another rank does not know them"
            if self._told_by is not None:
                elsewhere = f"on another rank {self._told_by} does not tell what the model looks up"
            self.give_up(elsewhere)

    def _find_new(self, batch: Any, lookups: Sequence[KeyedJaggedTensor]) -> bool:
        """Add the places of lookups to those known; return whether all have one and any is new."""
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
