"""Read one rank's stream in chunks, hold samples until they are used, and resume from a checkpoint."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_freescale.balance.validation import non_negative

_log = logging.getLogger(__name__)
Place = dict[str, Any]
"""A position in a source, in plain values."""
Chunks = Generator[tuple[list[Any], Place], None, None]
"""Lists of samples, each with the place after it."""


@dataclass(eq=False)
class StreamReader:
    """Reads a source, numbers its samples from 0 in each epoch, and holds samples until they are used.

    The state contains no samples. It contains a place in the source before the oldest held sample, and the numbers of the held
    samples. To resume from a ``state``, call :meth:`reread_held_samples` first. ``read`` is the number of samples read in this
    epoch.
    """

    source: StreamSource | RemainingParts
    cost_fn: Callable[[Any], float]
    weight_fn: Callable[[Any], float] | None
    epoch: int
    seed: int
    state: dict[str, Any] | None

    def __post_init__(self) -> None:
        start = self._start = self.state or {"place": self.source.first_place(), "first": 0, "held": [], "read": 0}
        self._chunks = self.source.read_chunks(start["place"], self.epoch, self.seed)
        self._samples = self._unpack_chunks()
        self._places = deque([(start["first"], start["place"])])
        self._held: dict[int, tuple[Any, float, float]] = {}
        self.read: int = start["first"]

    def reread_held_samples(self) -> None:
        """Read the held samples of the state again, and discard those between them."""
        held = set(self._start["held"])
        for number in range(self.read, self._start["read"]):
            samples = self._next_samples(1)
            if not samples:
                raise ValueError(
                    f"the data set ended before sample {self._start['read'] - 1}, which the checkpoint's run has read. To "
                    "resume inside an epoch, a stream must return the same samples again"
                )
            if number in held:
                self._hold(number, samples)

    def read_samples(self, count: int) -> range:
        """Read and hold the next ``count`` samples, or fewer at the end of the stream; return their numbers."""
        first, samples = self.read, self._next_samples(count)
        self._hold(first, samples)
        return range(first, self.read)

    def costs_and_weights(self, numbers: Iterable[int]) -> NDArray[np.float64]:
        """Return the costs of held samples and their weights in the mean loss, shape ``[2, samples]``."""
        return np.array([self._held[number][1:] for number in numbers]).reshape(-1, 2).T

    def pop_sample(self, number: int) -> Any:
        """Return a sample, and stop holding it."""
        return self._held.pop(number)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, and forget places that no held sample needs."""
        oldest = min(self._held, default=self.read)
        while len(self._places) > 1 and self._places[1][0] <= oldest:
            self._places.popleft()
        first, place = self._places[0]
        return {"place": place, "first": first, "held": sorted(self._held), "read": self.read}

    def stop_workers(self) -> None:
        self._chunks.close()

    def _next_samples(self, count: int) -> list[Any]:
        samples = list(islice(self._samples, count))
        self.read += len(samples)
        return samples

    def _unpack_chunks(self) -> Iterator[Any]:
        for samples, place in self._chunks:
            self._places.append((self._places[-1][0] + len(samples), place))
            yield from samples

    def _hold(self, first: int, samples: Sequence[Any]) -> None:
        """Hold samples that were just read; ``first`` is the number of the first one."""
        costs = non_negative("cost_fn(sample)", [float(self.cost_fn(sample)) for sample in samples], first=first).tolist()
        weights = [1.0 if self.weight_fn is None else float(self.weight_fn(sample)) for sample in samples]
        non_negative("weight_fn(sample)", weights, first=first)
        self._held.update(enumerate(zip(samples, costs, weights), first))


@dataclass(frozen=True)
class _Chunk:
    """Samples of one worker. This is no tuple, because the DataLoader converts the contents of tuples to tensors."""

    samples: list[Any]
    worker: int
    state: Any  # of the data set after the samples; None if it cannot be used
    read: int  # samples of this worker in the epoch so far
    ended: bool


@dataclass(eq=False)
class StreamSource(IterableDataset[Any]):
    """Reads an iterable data set in chunks, with or without loader workers, always in the same order.

    A place contains, for each worker, the number of samples read and the state of its copy of the data set, and the number of
    the next worker. To resume, the source has two ways, which both require that the data set returns the same samples again:

    - A data set with ``state_dict`` and ``load_state_dict`` is restored. ``state_dict`` must describe the place after the last
      sample that the iterator returned. ``iter`` must start at the beginning unless a state was just loaded.
    - Any other data set is read again from the start of the epoch.

    Args:
        dataset: the user's data set. With several workers, each reads its own copy, and the data set divides the samples among
            them by ``torch.utils.data.get_worker_info()``. The source calls ``set_epoch`` if the data set has it.
        chunk_size: samples that a worker reads at a time.
        num_workers: as in ``torch.utils.data.DataLoader``.
        place: start of the iteration for all workers; by default the start of the epoch.
    """

    dataset: IterableDataset[Any]
    chunk_size: int
    num_workers: int = 0
    place: Place | None = None

    @property
    def unseekable(self) -> str:
        """The reason why the data set's state cannot be used; "" if it can."""
        if not (hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")):
            return f"{type(self.dataset).__name__} has no state_dict and load_state_dict"
        return unusable_state(self.dataset)

    def first_place(self) -> Place:
        workers = max(1, self.num_workers)
        return {"states": [None] * workers, "read": [0] * workers, "ended": [False] * workers, "turn": 0}

    def read_chunks(self, place: Place | None = None, epoch: int = 0, seed: int = 0) -> Chunks:
        """Yield the chunks of all workers from ``place`` to the end of the epoch.

        The workers start at once, in the calling thread, with random numbers from ``seed``. They end with the generator.
        """
        place = place or self.first_place()
        if len(place["read"]) != max(1, self.num_workers):
            raise ValueError(
                f"num_workers={self.num_workers}, but the checkpoint was written with {len(place['read'])} reader(s), and the "
                "order of the samples depends on it. Pass the same num_workers, or resume from the end of an epoch"
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if any(place["read"]) and self.unseekable:
            _log.warning(
                "%s. To resume, the loader reads the previous %d samples again and discards them. Implement state_dict() and "
                "load_state_dict(state) to avoid this.",
                self.unseekable,
                sum(place["read"]),
            )
        # starting the workers would draw from the global random state, so the loader gets its own generator
        generator = torch.Generator().manual_seed(seed % 2**63)
        source = replace(self, place=place)
        return _with_places(iter(DataLoader(source, batch_size=None, num_workers=self.num_workers, generator=generator)), place)

    def __iter__(self) -> Iterator[_Chunk | None]:
        dataset: Any = self.dataset
        place = self.place or self.first_place()
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if place["ended"][worker]:
            return
        if worker < place["turn"]:
            yield None  # the loader reads from worker 0 first, but another worker is next
        read, ended, seekable = place["read"][worker], False, not self.unseekable
        if read and seekable:
            dataset.load_state_dict(copy.deepcopy(place["states"][worker]))
        samples = islice(dataset, 0 if seekable else read, None)
        while not ended:
            chunk = list(islice(samples, self.chunk_size))
            read, ended = read + len(chunk), len(chunk) < self.chunk_size
            # a copy, because the state may change before a worker pickles it
            yield _Chunk(chunk, worker, copy.deepcopy(dataset.state_dict()) if seekable else None, read, ended)


def _with_places(chunks: Iterable[_Chunk | None], place: Place) -> Chunks:
    for chunk in chunks:
        if chunk is not None:
            states, read, ended = list(place["states"]), list(place["read"]), list(place["ended"])
            states[chunk.worker], read[chunk.worker], ended[chunk.worker] = chunk.state, chunk.read, chunk.ended
            place = {"states": states, "read": read, "ended": ended, "turn": (chunk.worker + 1) % len(read)}
            yield chunk.samples, place


@dataclass(eq=False)
class RemainingParts:
    """Reads the rest of the streams of several ranks of an interrupted run, one after the other.

    Args:
        source: this rank's own stream. Its data set returns those of other ranks by ``for_rank(rank, world_size)``.
        parts: ``rank``, ``world_size`` and ``reader``, the state of the :class:`StreamReader`, of each stream.
    """

    source: StreamSource
    parts: list[dict[str, Any]]

    def first_place(self) -> Place:
        """Return the place before the rest of the first stream."""
        return {"part": 0, "place": None, "number": 0}

    def read_chunks(self, place: Place | None = None, epoch: int = 0, seed: int = 0) -> Chunks:
        """Yield the rest of the streams, as :meth:`StreamSource.read_chunks` does.

        The workers of all parts start at once, in the calling thread. A process that is forked while other threads run
        inherits the locks that they hold at that moment, and may wait for one forever.
        """
        start, dataset, workers = place or self.first_place(), cast(Any, self.source.dataset), self.source.num_workers
        opened = []
        for index, part in list(enumerate(self.parts))[start["part"] :]:
            reader = part["reader"]
            inside = index == start["part"] and start["place"] is not None
            at, number = (start["place"], start["number"]) if inside else (reader["place"], reader["first"])
            readers, of_rank = len(at["read"]), dataset.for_rank(part["rank"], part["world_size"])
            source = StreamSource(of_rank, self.source.chunk_size, workers if max(1, workers) == readers else readers)
            opened.append((index, number, source.read_chunks(at, epoch, seed)))
        return self._chunks_of(opened)

    def _chunks_of(self, opened: list[tuple[int, int, Chunks]]) -> Chunks:
        try:
            for index, number, chunks in opened:
                reader = self.parts[index]["reader"]
                held = set(reader["held"])
                for samples, at in chunks:
                    untrained = [each for n, each in enumerate(samples, number) if n >= reader["read"] or n in held]
                    number += len(samples)
                    yield untrained, {"part": index, "place": at, "number": number}
        finally:
            for *_, chunks in opened:
                chunks.close()


def unusable_state(dataset: IterableDataset[Any]) -> str:
    """Return the reason why the loader cannot call a ``state_dict`` of the data set; "" if it can or there is none."""
    try:
        parameters = inspect.signature(getattr(dataset, "state_dict", dict)).parameters.values()
    except (TypeError, ValueError):  # the method is not written in Python
        return ""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    return f"{type(dataset).__name__}.state_dict needs {', '.join(needed)}, which the loader does not have" if needed else ""
