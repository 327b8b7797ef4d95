"""Look one batch ahead of the training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from lightning_freescale._lightning.loader_wrapper import LoaderWrapper
from lightning_freescale.data.fetched import ENDED, UNKNOWN, PrefetchedBatch, PrefetchQueue

__all__ = ["ENDED", "UNKNOWN", "LookaheadLoader"]


class LookaheadLoader(LoaderWrapper):
    """Any iterable of batches, each fetched before the one in front of it is handed out.

    Batches and their order are those of the loader. Two things come earlier than without: the time that a fetch takes, and
    random numbers that a data set draws from the global state in the main process (``num_workers=0``).

    A checkpoint resumes as if nothing had been fetched ahead: where the loader has ``state_dict`` and ``load_state_dict``, a
    copy of its state is kept with every batch that has not been trained on.

    Args:
        loader: the loader.
        limit: tells how many batches of an iteration will be asked for, so that none is fetched that nobody wants.
    """

    def __init__(self, loader: Any, limit: Callable[[], float] | None = None) -> None:
        current = _Current(loader)
        super().__init__(loader, current, _limit=limit, _current=current)

    def __iter__(self) -> Iterator[Any]:
        # not a generator: the loader draws its workers' seed from the global state now, as it would without this one
        self._current.line = line = PrefetchQueue()
        return _Batches(iter(self._loader), line, self._limit, self._loader if "state_dict" in vars(self) else None)

    def begin(self, batch: Any) -> None:
        """Training on ``batch``, handed out earlier, begins. Call it for every batch but None, in order."""
        self._current.line.begin()

    @property
    def upcoming(self) -> Any:
        """The batch that training begins with next, as it was handed out, or :data:`ENDED`, or :data:`UNKNOWN`."""
        return self._current.line.upcoming


class _Batches(Iterator[Any]):
    """One iteration. Dropping it drops the loader's iterator, and with it the workers."""

    def __init__(self, batches: Iterator[Any], line: PrefetchQueue, limit: Callable[[], float] | None, stateful: Any) -> None:
        self._batches, self._line, self._limit, self._stateful = batches, line, limit, stateful
        self._given = 0

    def __next__(self) -> Any:
        fetched = self._line.ahead or self._fetch()
        if not fetched.end and fetched.error is None:
            if self._limit is None or self._given + 1 < self._limit():
                self._fetch()
            else:
                self._line.ended = True
            self._given += 1
        return self._line.take(fetched)

    def _fetch(self) -> PrefetchedBatch:
        # a copy, because a loader may hand out the very object that it counts in
        fetched = PrefetchedBatch(state=None if self._stateful is None else copy.deepcopy(self._stateful.state_dict()))
        try:
            fetched.batch = next(self._batches)
        except StopIteration:
            fetched.end = True
        except Exception as error:  # it belongs to this batch, and the one before it can still be trained on
            fetched.error = error
        self._line.add(fetched)
        return fetched


class _Current:
    """The iteration that runs, and a state that counts no batch that was only fetched. Does not hold the wrapper."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.line = loader, PrefetchQueue()

    def state_dict(self) -> Any:
        """Where to resume: the loader's state as it was, or as it is if nothing waits."""
        fetched = self.line.resume_at
        return self._loader.state_dict() if fetched is None else fetched.state

    def load_state_dict(self, state: Any) -> None:
        """Hand it to the loader. What was fetched before counts no more."""
        self.line = PrefetchQueue()
        self._loader.load_state_dict(state)
