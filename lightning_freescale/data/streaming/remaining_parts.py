"""What an interrupted epoch has left of the streams of other ranks than there are now, each read on by one rank."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from lightning_freescale.data.streaming.reader import Chunk, StreamSource


@dataclass(eq=False)
class RemainingParts:
    """Reads on what is left of some ranks' streams, one after the other, as a :class:`StreamSource` reads one.

    Args:
        source: this rank's own stream, whose data set gives those of other ranks by ``for_rank(rank, world_size)``.
        parts: whose streams: ``rank``, ``world_size`` and the state of its :class:`StreamReader`, ``reader``.
    """

    source: StreamSource
    parts: list[dict[str, Any]]

    def first_place(self) -> dict[str, Any]:
        """Return the place before all that is left."""
        return {"part": 0, "place": None, "number": 0}

    def place_after(self, place: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
        """Return the place after a chunk."""
        return dict(chunk.state)

    def read_chunks(self, place: dict[str, Any] | None = None, epoch: int = 0, seed: int = 0) -> Generator[Chunk, None, None]:
        """Yield what is left, as :meth:`StreamSource.read_chunks` does.

        The workers of all parts start at once, in the calling thread: a process that is forked from a thread beside others
        inherits the locks that these hold at that moment, and may wait for one for ever.
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
