"""A loader that fetches one batch ahead of the training loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_freescale._lightning.loops import LoaderWrapper, rank_zero_warn
from lightning_freescale._runtime.batch_walk import walk

_MOST_WAITING = 4
"""The largest number of batches between loader and step. With more, training does not report the start of its batches."""
_CHECKED_FETCHES = 3
"""The number of fetches to check. A loader that reuses memory does so from the start."""


ENDED, UNKNOWN = object(), object()
"""Stand for the next batch if none follows in this iteration, and if it is not yet known whether one does."""


class LookaheadLoader(LoaderWrapper):
    """Wraps any iterable of batches, and fetches each batch before it returns the one before.

    Batches and their order are unchanged. Two things happen earlier than without the wrapper: the fetches, and the draws of a
    dataset from the global random state in the main process (``num_workers=0``). If a loader creates every batch in the same
    memory, batches are copied after a warning. No batch beyond ``limit()`` is fetched.

    Checkpoints resume as without the wrapper: if the loader has ``state_dict`` and ``load_state_dict``, a copy of its state is
    kept with every batch until training on it begins.
    """

    def __init__(self, loader: Any, limit: Callable[[], float] | None = None) -> None:
        resumable = _ResumableLoader(loader)
        super().__init__(loader, resumable, _limit=limit, _resumable=resumable, _memory=BatchMemory())

    def __iter__(self) -> Iterator[Any]:
        # not a generator: the loader draws its workers' seed from the global state now, as without the wrapper
        self._resumable.queue = queue = PrefetchQueue()
        stateful = self._loader if "state_dict" in vars(self) else None
        return _Batches(iter(self._loader), queue, self._limit, stateful, self._memory)

    def start_batch(self) -> Any:
        """Record that training on a batch begins, and return :attr:`next_batch`. Call it for every batch except None."""
        self._resumable.queue.start_batch()
        return self.next_batch

    @property
    def next_batch(self) -> Any:
        """The batch that training begins with next, as returned to the loop, or :data:`ENDED`, or :data:`UNKNOWN`."""
        return self._resumable.queue.next_batch


@dataclass
class PrefetchedBatch:
    """A fetched batch, or the error of its fetch, which is a StopIteration at the end."""

    batch: Any = None
    error: Exception | None = None
    state: Any = None  # the loader's state before the fetch
    handed_out: bool = False  # whether the training loop has it


class PrefetchQueue:
    """The fetched batches of one iteration that training has not begun on, in order. The loop may not have the last one yet."""

    def __init__(self) -> None:
        self.waiting: deque[PrefetchedBatch] = deque()
        self.ended = False
        self._started = self._lost_track = False

    @property
    def ahead(self) -> PrefetchedBatch | None:
        """The batch to return next; None if it has to be fetched."""
        return self.waiting[-1] if self.waiting and not self.waiting[-1].handed_out else None

    def push(self, fetched: PrefetchedBatch) -> None:
        self.waiting.append(fetched)
        self.ended = isinstance(fetched.error, StopIteration)
        self._lost_track |= len(self.waiting) > _MOST_WAITING
        while self._lost_track and self.waiting[0].handed_out:
            self.waiting.popleft()

    def hand_out(self, fetched: PrefetchedBatch) -> Any:
        """Return the last batch, or raise its error. The batch stays queued until training on it begins."""
        fetched.handed_out = True
        if fetched.error is not None:
            self.waiting.pop()
            raise fetched.error
        return fetched.batch

    def start_batch(self) -> None:
        self._started = True
        while not self._lost_track and self.waiting and self.waiting[0].handed_out:
            if self.waiting.popleft().batch is not None:
                return  # Lightning skips batches that are None

    @property
    def next_batch(self) -> Any:
        if self._lost_track:
            return UNKNOWN
        otherwise = ENDED if self.ended else UNKNOWN
        return next((fetched.batch for fetched in self.waiting if fetched.batch is not None), otherwise)

    @property
    def resume_at(self) -> PrefetchedBatch | None:
        """The first batch that training has not begun on. Without reports from training, the first that it does not have."""
        follows = self._started and not self._lost_track
        return next((fetched for fetched in self.waiting if follows or not fetched.handed_out), None)


@dataclass(eq=False)
class _Batches(Iterator[Any]):
    """One iteration. Deleting it deletes the loader's iterator and with it the workers."""

    batches: Iterator[Any]
    queue: PrefetchQueue
    limit: Callable[[], float] | None
    stateful: Any
    memory: BatchMemory
    handed_out: int = 0

    def __next__(self) -> Any:
        fetched = self.queue.ahead or self._fetch()
        if fetched.error is None:
            if self.limit is None or self.handed_out + 1 < self.limit():
                self._fetch()
            else:
                self.queue.ended = True
            self.handed_out += 1
        return self.queue.hand_out(fetched)

    def _fetch(self) -> PrefetchedBatch:
        # a copy, because a loader may return the object that it counts in
        fetched = PrefetchedBatch(state=None if self.stateful is None else copy.deepcopy(self.stateful.state_dict()))
        waiting = list(self.queue.waiting)
        before = self.memory.copies_of(each.batch for each in waiting)
        try:
            fetched.batch = next(self.batches)
        except StopIteration:
            fetched.error = StopIteration()  # a new one: the loader's holds its frames
        except Exception as error:  # it belongs to this batch; training on the batch before can go on
            fetched.error = error
        for each, copied in zip(waiting, before):
            restored = self.memory.restored(each.batch, copied)
            if each.handed_out and restored is not each.batch:
                raise RuntimeError(
                    "The training loader has overwritten a batch before training on it. Strategy 'freescale' and Lightning "
                    "each fetch one batch ahead. Create every batch in new memory, or use FreeScaleStrategy(overlap=False)."
                )
            each.batch = restored
        fetched.batch = self.memory.own(fetched.batch)
        self.queue.push(fetched)
        return fetched


class _ResumableLoader:
    """The loader's state without the batches that were only fetched. It does not hold the wrapper, to avoid a cycle."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.queue = loader, PrefetchQueue()

    def state_dict(self) -> Any:
        """Return the loader's state before the prefetched batch, or its current state if there is none."""
        fetched = self.queue.resume_at
        return self._loader.state_dict() if fetched is None else fetched.state

    def load_state_dict(self, state: Any) -> None:
        self.queue = PrefetchQueue()
        self._loader.load_state_dict(state)


class BatchMemory:
    """Detects fetches that overwrite tensors and arrays of waiting batches, and copies batches from then on."""

    def __init__(self) -> None:
        self._copies, self._unchecked = False, _CHECKED_FETCHES

    def copies_of(self, waiting: Iterable[Any]) -> list[Any]:
        """Return copies of the waiting batches before a fetch; an empty list after enough fetches were checked."""
        copied = [_copy(batch) for batch in waiting] if self._unchecked and not self._copies else []
        self._unchecked -= bool(copied)
        return copied

    def restored(self, batch: Any, before: Any) -> Any:
        """Return a batch that waited during a fetch, or its copy ``before`` if the fetch has changed it."""
        if before is None or _same_contents(before, batch):
            return batch
        if not self._copies:
            self._copies = True
            rank_zero_warn(
                "The training loader creates every batch in the same memory, but strategy 'freescale' fetches the next batch "
                "before training on the current one. Batches are copied from now on. Create every batch in new memory, or use "
                "FreeScaleStrategy(overlap=False)."
            )
        return before

    def own(self, batch: Any) -> Any:
        """Return a fetched batch, in memory that the loader does not overwrite."""
        return copy.deepcopy(batch) if self._copies else batch


def _copy(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # a batch that cannot be copied is not checked
        return None


def _same_contents(a: Any, b: Any) -> bool:
    tensors = ([node for node in walk(batch) if isinstance(node[1], (Tensor, np.ndarray))] for batch in (a, b))
    pairs = zip_longest(*tensors, fillvalue=((), None))
    return all(path == other_path and _equal(node, other) for (path, node), (other_path, other) in pairs)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype.hasobject or np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if a.layout != torch.strided or torch.equal(a, b):
        return True
    return a.is_floating_point() and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
