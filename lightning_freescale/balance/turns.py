"""Candidates that take turns, so that they can be compared: which of them a step has, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Candidate = TypeVar("Candidate")

TRIAL_BLOCK = 6
"""Steps in a row with the same candidate."""


class Turns(Generic[Candidate]):
    """Which candidate each step has: a pure function of (epoch, step) between changes.

    Args:
        candidates: take turns from the first step on, :data:`TRIAL_BLOCK` steps each; one is had by all steps.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._phases = [((0, 0), tuple(candidates))]

    def change(self, candidates: Sequence[Candidate], epoch: int, step: int) -> None:
        """Let others take turns from a step on; call it with the same arguments on every rank, before anybody asks for it."""
        self._phases.append(((epoch, step), tuple(candidates)))

    def candidate(self, epoch: int, step: int) -> Candidate:
        """Return the candidate of a step."""
        _, candidates = self._phase(epoch, step)
        return candidates[_turn(epoch, step, len(candidates))]

    def measured(self, epoch: int, step: int) -> int | None:
        """Return the place of the candidate that a step is a measurement of.

        None if it is alone, if the step may follow upon another one, and before the last change.
        """
        begin, candidates = self._phases[-1]
        if len(candidates) == 1 or step % TRIAL_BLOCK == 0 or (epoch, step) <= begin:
            return None
        return _turn(epoch, step, len(candidates))

    @property
    def last(self) -> tuple[Candidate, ...]:
        """Those that take turns from the last change on."""
        return self._phases[-1][1]

    def _phase(self, epoch: int, step: int) -> tuple[tuple[int, int], tuple[Candidate, ...]]:
        return next((phase for phase in reversed(self._phases) if phase[0] <= (epoch, step)), self._phases[0])


def _turn(epoch: int, step: int, candidates: int) -> int:
    # the epoch, because short ones would not come to the last candidates
    return (step // TRIAL_BLOCK + epoch) % candidates
