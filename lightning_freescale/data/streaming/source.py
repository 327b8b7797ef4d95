"""A stream of samples that can be taken up again where it was left."""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Samples that one worker read.

    Attributes:
        samples: at most as many as the source's chunk size; fewer, also none, when the worker's stream ends.
        worker: who read them.
        state: the data set's state after them, None if it keeps none.
        read: samples that this worker has read in the epoch so far.
        ended: its stream has no more.
    """

    samples: list[Any]
    worker: int
    state: Any
    read: int
    ended: bool


class Source:
    """Reads an iterable data set in chunks, with or without loader workers, always in the same order.

    A place in the stream is a dictionary: what each worker has read, the state of its copy of the data set, and whose turn it
    is. A data set with ``state_dict`` and ``load_state_dict`` is put back to that state: ``state_dict`` must tell the place
    after the sample that its iterator returned last, and ``iter`` start anew unless a state was just loaded. Any other is
    read again from the start of the epoch, and what was read before is discarded. Either way it must give the same samples
    in the same order again.

    Args:
        dataset: the user's; with several workers each reads its own copy, and the data set divides the samples among them by
            ``torch.utils.data.get_worker_info()``. ``set_epoch`` is called if it has one.
        chunk_size: samples that a worker reads at a time.
        num_workers: as in ``torch.utils.data.DataLoader``.
    """

    def __init__(self, dataset: IterableDataset[Any], chunk_size: int, num_workers: int = 0) -> None:
        self.dataset, self.chunk_size, self.num_workers = dataset, chunk_size, num_workers

    @property
    def seekable(self) -> bool:
        """Whether the data set keeps states."""
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def start(self) -> dict[str, Any]:
        """The place at the start of an epoch."""
        workers = max(1, self.num_workers)
        return {"states": [None] * workers, "read": [0] * workers, "ended": [False] * workers, "turn": 0}

    def read(self, place: dict[str, Any] | None = None, epoch: int = 0, seed: int = 0) -> Generator[Chunk, None, None]:
        """The chunks from ``place`` to the end of the epoch.

        Workers start at once, in the calling thread, and end with the generator.

        Args:
            place: what :meth:`start` or :func:`after` gave; the start of the epoch if not given.
            epoch: told to the data set.
            seed: of the workers' random numbers.

        Raises:
            ValueError: the place is one of another number of workers.
        """
        place = place or self.start()
        if len(place["read"]) != max(1, self.num_workers):
            raise ValueError(
                f"num_workers={self.num_workers}, but the state to resume from was made with {len(place['read'])} reader(s): "
                "the samples would come in another order. Use the same num_workers, or resume at the end of an epoch."
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._tell(place)
        chunks = _Chunks(self.dataset, self.chunk_size, place, self.seekable)
        # a generator of its own, because starting the workers would draw from the global state
        generator = torch.Generator().manual_seed(seed % 2**63)
        return _present(iter(DataLoader(chunks, batch_size=None, num_workers=self.num_workers, generator=generator)))

    def _tell(self, place: dict[str, Any]) -> None:
        again = sum(place["read"])
        if again and not self.seekable:
            _log.warning(
                "%s has no state_dict and load_state_dict: to resume, the %d samples that were read before are read again and "
                "discarded. With the two methods it would go on where it was.",
                type(self.dataset).__name__,
                again,
            )


def after(place: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
    """The place after ``chunk``, which was read at ``place``."""
    states, read, ended = list(place["states"]), list(place["read"]), list(place["ended"])
    states[chunk.worker], read[chunk.worker], ended[chunk.worker] = chunk.state, chunk.read, chunk.ended
    return {"states": states, "read": read, "ended": ended, "turn": (chunk.worker + 1) % len(read)}


def _present(chunks: Iterator[Chunk | None]) -> Generator[Chunk, None, None]:
    return (chunk for chunk in chunks if chunk is not None)


class _Chunks(IterableDataset[Any]):
    """What runs in a worker."""

    def __init__(self, dataset: IterableDataset[Any], size: int, place: dict[str, Any], seekable: bool) -> None:
        self.dataset, self.size, self.place, self.seekable = dataset, size, place, seekable

    def __iter__(self) -> Iterator[Chunk | None]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if self.place["ended"][worker]:
            return
        if worker < self.place["turn"]:
            yield None  # the loader asks worker 0 first: let the one go first whose turn it was
        read = self.place["read"][worker]
        samples = self._samples(worker, read)
        ended = False
        while not ended:
            chunk = list(islice(samples, self.size))
            read, ended = read + len(chunk), len(chunk) < self.size
            yield Chunk(chunk, worker, self._state(), read, ended)

    def _samples(self, worker: int, read: int) -> Iterator[Any]:
        if read and self.seekable:
            self.dataset.load_state_dict(copy.deepcopy(self.place["states"][worker]))  # type: ignore[attr-defined]
            return iter(self.dataset)
        samples = iter(self.dataset)
        for _ in islice(samples, read):
            pass
        return samples

    def _state(self) -> Any:
        # a copy: a worker pickles it later, when the data set may be elsewhere already
        return copy.deepcopy(self.dataset.state_dict()) if self.seekable else None  # type: ignore[attr-defined]
