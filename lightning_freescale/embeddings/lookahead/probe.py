"""Are the next batch's ids known, and from where? Learn from one step where in the batch they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale.embeddings.lookahead.kjt_path import KJTPath, find_path, follow_path
from lightning_freescale.embeddings.plain_embedding import EmbeddingIds


class IdsFunction:
    """Calls the user's function and checks what it returns.

    Args:
        function: of a batch; returns a KeyedJaggedTensor, a list with one of each lookup, or one or the other for each path of
            a collection, in a mapping. The ids of an ``nn.Embedding`` are a tensor instead.
        name: of the function, for errors and warnings.
        overlapped: paths of the collections whose ids are asked for.
        plain: paths of the module's other collections; ids returned for them are ignored.
        embeddings: paths of those that are an ``nn.Embedding``.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        name: str,
        overlapped: Collection[str],
        plain: Collection[str] = (),
        embeddings: Collection[str] = (),
    ) -> None:
        self.function, self.name = function, name
        self.overlapped, self.plain, self.embeddings = list(overlapped), list(plain), frozenset(embeddings)

    def __call__(self, batch: Any) -> dict[str, list[KeyedJaggedTensor]]:
        """Return the ids in ``batch`` by the path of their collection, by lookup; the function may leave collections out.

        Raises:
            Exception: what the function raises, with a note that says who had called it.
            TypeError: it returns something else, or a tensor for a collection, or none for an ``nn.Embedding``.
            ValueError: it names no collection of the module, or returns none of their paths for several collections.
        """
        try:
            told = self.function(batch)
        except Exception as error:
            # what add_note() does, which Python 3.10 has not
            note = f"raised by {self.name}, which strategy 'freescale' had asked for the ids of the next batch"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise
        if isinstance(told, (KeyedJaggedTensor, Tensor, list, tuple)):
            told = {self._only_path(): told}
        if not isinstance(told, Mapping):
            raise TypeError(
                f"{self.name} returned a {type(told).__name__}: return the KeyedJaggedTensor that the model will look up (of "
                "an nn.Embedding the tensor), a list of them if it makes several lookups, or a mapping from the paths of "
                f"collections to that; the paths are {self.overlapped}"
            )
        lookups = {path: self._checked(path, ids) for path, ids in told.items()}
        return {path: each for path, each in lookups.items() if path in self.overlapped}

    def _only_path(self) -> str:
        if len(self.overlapped) != 1:
            raise ValueError(
                f"{self.name} returned ids without a path, but {len(self.overlapped)} collections are overlapped: return a "
                f"mapping from the paths {self.overlapped}"
            )
        return self.overlapped[0]

    def _checked(self, path: Any, told: Any) -> list[KeyedJaggedTensor]:
        if path not in self.overlapped and path not in self.plain:
            raise ValueError(
                f"{self.name} returned ids for {path!r}, which is no embedding collection of the module: use the paths "
                f"{self.overlapped}"
            )
        return [self._as_features(path, ids) for ids in (told if isinstance(told, (list, tuple)) else [told])]

    def _as_features(self, path: str, ids: Any) -> KeyedJaggedTensor:
        if path in self.embeddings and type(ids) is Tensor:
            return EmbeddingIds(path, ids)
        if path in self.embeddings or not isinstance(ids, KeyedJaggedTensor):
            wanted = "the tensor of ids" if path in self.embeddings else "a KeyedJaggedTensor"
            raise TypeError(f"{self.name} returned a {type(ids).__name__} for {path!r}: return {wanted}")
        return ids


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
        """Whether a function returns the ids, or :meth:`ids_of` has paths to follow."""
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
        """Return the ids that a function has returned for another batch; None if they were wrong too often."""
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
        """Stop trying, because the ids cannot be known."""
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
