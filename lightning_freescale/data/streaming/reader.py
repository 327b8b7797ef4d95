"""Read one rank's stream in chunks, hold samples until they are used, and resume from a checkpoint."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_freescale.balance.validation import non_negative

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class StreamReader:
    """Read a source, number its samples from 0 in each epoch, and hold samples that were read and not yet used.

    The state has no samples. It has a place in the source before the oldest sample held, and the numbers of the samples held.
    To resume, the reader reads them again from that place.

    Args:
        source: what to read.
        cost_fn: predicted compute time of a sample.
        weight_fn: weight of a sample in the mean loss; one if not given.
        epoch, seed: as in :meth:`StreamSource.read_chunks`.
        state: where to resume, see :meth:`state_dict`; then call :meth:`reread_held_samples` first.

    Attributes:
        read: number of samples read in this epoch.
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
        """Read the samples that the state holds again; discard those between them.

        Raises:
            ValueError: the data set ends before.
        """
        held = set(self._start["held"])
        for number in range(self.read, self._start["read"]):
            samples = self._next_samples(1)
            if not samples:
                raise ValueError(
                    f"the data set ended before sample {self._start['read'] - 1}, which the checkpoint's run had read: to "
                    "resume inside an epoch a stream must give the same samples again"
                )
            if number in held:
                self._hold(number, samples)

    def read_samples(self, count: int) -> range:
        """Read and hold the next ``count`` samples, fewer if the stream ends; return their numbers.

        Raises:
            ValueError: a cost or weight is negative or not finite.
        """
        first, samples = self.read, self._next_samples(count)
        self._hold(first, samples)
        return range(first, self.read)

    def costs(self, numbers: Any) -> list[float]:
        """Return the costs of samples."""
        return [self._held[int(number)][1] for number in numbers]

    def weights(self, numbers: Any) -> list[float]:
        """Return the weights of samples in the mean loss."""
        return [self._held[int(number)][2] for number in numbers]

    def pop_samples(self, numbers: Any) -> list[Any]:
        """Return samples in this order, and stop holding them."""
        return [self._held.pop(int(number))[0] for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        """Return where to resume. Places that no held sample needs are removed."""
        oldest = min(self._held, default=self.read)
        while len(self._places) > 1 and self._places[1][0] <= oldest:
            self._places.popleft()
        first, place = self._places[0]
        return {"place": place, "first": first, "held": sorted(self._held), "read": self.read}

    def stop_workers(self) -> None:
        """End the source's workers."""
        self._chunks.close()

    def _next_samples(self, count: int) -> list[Any]:
        samples = list(islice(self._samples, count))
        self.read += len(samples)
        return samples

    def _unpack_chunks(self) -> Iterator[Any]:
        for chunk in self._chunks:
            first, place = self._places[-1]
            self._places.append((first + len(chunk.samples), self.source.place_after(place, chunk)))
            yield from chunk.samples

    def _hold(self, first: int, samples: Sequence[Any]) -> None:
        """Hold samples that were just read; ``first`` is the number of the first one."""
        costs = non_negative("cost_fn(sample)", [float(self.cost_fn(sample)) for sample in samples], first=first).tolist()
        weights = [1.0 if self.weight_fn is None else float(self.weight_fn(sample)) for sample in samples]
        non_negative("weight_fn(sample)", weights, first=first)
        self._held.update(enumerate(zip(samples, costs, weights), first))


@dataclass(frozen=True)
class Chunk:
    """Samples that one worker read.

    Attributes:
        samples: as many as the source's chunk size; fewer, also none, at the end of the worker's stream.
        worker: number of the worker.
        state: the data set's state after the samples, None if it keeps none.
        read: samples that this worker has read in the epoch so far.
        ended: whether its stream has ended.
    """

    samples: list[Any]
    worker: int
    state: Any
    read: int
    ended: bool


@dataclass(eq=False)
class StreamSource(IterableDataset[Any]):
    """Reads an iterable data set in chunks, with or without loader workers, always in the same order.

    A place in the stream is a dictionary: the number of samples that each worker has read, the state of its copy of the data
    set, and the worker that is next. A data set with ``state_dict`` and ``load_state_dict`` is restored to that state:
    ``state_dict`` must describe the place after the sample that its iterator returned last, and ``iter`` must start at the
    beginning unless a state was just loaded. Any other data set is read again from the start of the epoch. Both must return
    the same samples in the same order again.

    Args:
        dataset: the user's; with several workers each reads its own copy, and the data set divides the samples among them by
            ``torch.utils.data.get_worker_info()``. ``set_epoch`` is called if it has one.
        chunk_size: samples that a worker reads at a time.
        num_workers: as in ``torch.utils.data.DataLoader``.
        place: where iteration starts, in each worker with its own part; the start of the epoch if not given.
    """

    dataset: IterableDataset[Any]
    chunk_size: int
    num_workers: int = 0
    place: dict[str, Any] | None = None

    @property
    def seekable(self) -> bool:
        """Whether the data set keeps states."""
        return not self.unseekable

    @property
    def unseekable(self) -> str:
        """The reason why the data set's state cannot be used; "" if it can."""
        name = type(self.dataset).__name__
        if not (hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")):
            return f"{name} has no state_dict and load_state_dict"
        needed = ", ".join(_needed_arguments(self.dataset.state_dict))
        return f"{name}.state_dict needs {needed}, which the loader does not have" if needed else ""

    def first_place(self) -> dict[str, Any]:
        """Return the place at the start of an epoch."""
        workers = max(1, self.num_workers)
        return {"states": [None] * workers, "read": [0] * workers, "ended": [False] * workers, "turn": 0}

    def place_after(self, place: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
        """Return the place after ``chunk``, which was read at ``place``."""
        states, read, ended = list(place["states"]), list(place["read"]), list(place["ended"])
        states[chunk.worker], read[chunk.worker], ended[chunk.worker] = chunk.state, chunk.read, chunk.ended
        return {"states": states, "read": read, "ended": ended, "turn": (chunk.worker + 1) % len(read)}

    def read_chunks(self, place: dict[str, Any] | None = None, epoch: int = 0, seed: int = 0) -> Generator[Chunk, None, None]:
        """Yield the chunks of all workers from ``place`` to the end of the epoch.

        Workers start at once, in the calling thread, and end with the generator.

        Args:
            place: a result of :meth:`first_place` or :meth:`place_after`; the start of the epoch if not given.
            epoch: passed to the data set.
            seed: seed of the workers' random numbers.

        Raises:
            ValueError: the place belongs to another number of workers.
        """
        place = place or self.first_place()
        if len(place["read"]) != max(1, self.num_workers):
            raise ValueError(
                f"num_workers={self.num_workers}, but the state to resume from was made with {len(place['read'])} reader(s): "
                "the samples would come in another order. Use the same num_workers, or resume at the end of an epoch."
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if any(place["read"]) and not self.seekable:
            _log.warning(
                "%s: to resume, the %d samples that were read before are read again and discarded. With state_dict() and "
                "load_state_dict(state) it would continue where it was.",
                self.unseekable,
                sum(place["read"]),
            )
        # starting the workers would draw from the global random state, so the loader gets its own generator
        generator = torch.Generator().manual_seed(seed % 2**63)
        source = replace(self, place=place)
        loader = iter(DataLoader(source, batch_size=None, num_workers=self.num_workers, generator=generator))
        return (chunk for chunk in loader if chunk is not None)

    def __iter__(self) -> Iterator[Chunk | None]:
        dataset: Any = self.dataset
        place = self.place or self.first_place()
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if place["ended"][worker]:
            return
        if worker < place["turn"]:
            yield None  # the loader asks worker 0 first, but another worker is next
        read, ended = place["read"][worker], False
        if read and self.seekable:
            dataset.load_state_dict(copy.deepcopy(place["states"][worker]))
        samples = islice(dataset, 0 if self.seekable else read, None)
        while not ended:
            chunk = list(islice(samples, self.chunk_size))
            read, ended = read + len(chunk), len(chunk) < self.chunk_size
            # a copy: a worker pickles it later, when the data set may be elsewhere already
            state = copy.deepcopy(dataset.state_dict()) if self.seekable else None
            yield Chunk(chunk, worker, state, read, ended)


@dataclass(eq=False)
class RemainingParts:
    """Reads the rest of the streams of several ranks of an interrupted run, one after the other.

    Args:
        source: this rank's own stream, whose data set returns those of other ranks by ``for_rank(rank, world_size)``.
        parts: ``rank``, ``world_size`` and the state of the :class:`StreamReader`, ``reader``, of each stream.
    """

    source: StreamSource
    parts: list[dict[str, Any]]

    def first_place(self) -> dict[str, Any]:
        """Return the place before the rest of the first stream."""
        return {"part": 0, "place": None, "number": 0}

    def place_after(self, place: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
        """Return the place after a chunk."""
        return dict(chunk.state)

    def read_chunks(self, place: dict[str, Any] | None = None, epoch: int = 0, seed: int = 0) -> Generator[Chunk, None, None]:
        """Yield the rest of the streams, as :meth:`StreamSource.read_chunks` does.

        The workers of all parts start at once, in the calling thread. A process that is forked while other threads run
        inherits the locks that they hold at that moment, and may wait for one forever.
        """
        start = place or self.first_place()
        opened = []
        for index, part in list(enumerate(self.parts))[start["part"] :]:
            reader = part["reader"]
            inside = index == start["part"] and start["place"] is not None
            at, number = (start["place"], start["number"]) if inside else (reader["place"], reader["first"])
            source = self._source_of(part, readers=len(at["read"]))
            opened.append((index, source, at, number, source.read_chunks(at, epoch, seed)))
        return self._chunks_of(opened)

    def _chunks_of(self, opened: list[tuple[int, StreamSource, dict[str, Any], int, Any]]) -> Generator[Chunk, None, None]:
        try:
            for index, source, at, number, chunks in opened:
                reader = self.parts[index]["reader"]
                held = set(reader["held"])
                for chunk in chunks:
                    untrained = [each for n, each in enumerate(chunk.samples, number) if n >= reader["read"] or n in held]
                    number, at = number + len(chunk.samples), source.place_after(at, chunk)
                    yield Chunk(untrained, 0, {"part": index, "place": at, "number": number}, 0, ended=False)
        finally:
            for *_, chunks in opened:
                chunks.close()

    def _source_of(self, part: dict[str, Any], readers: int) -> StreamSource:
        dataset: Any = self.source.dataset
        workers = self.source.num_workers
        same = max(1, workers) == readers
        return StreamSource(
            dataset.for_rank(part["rank"], part["world_size"]), self.source.chunk_size, workers if same else readers
        )


def unusable_state(dataset: IterableDataset[Any]) -> str:
    """Return a warning if the state of a data set cannot be asked for although it keeps one; "" otherwise."""
    needed = _needed_arguments(getattr(dataset, "state_dict", dict))
    if not needed:
        return ""
    return (
        f"{type(dataset).__name__}.state_dict needs {', '.join(needed)}, which the loader does not have, so it is not called. "
        "To resume inside an epoch, the samples that were read before are read again and discarded. With a state_dict() "
        "without arguments the data set would continue where it was"
    )


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that the function requires."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # the function is not written in Python
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
