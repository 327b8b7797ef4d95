"""What a user may choose about a lane."""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("auto", "host", "peer", "nccl-zero-cta", "two-level", "native")

COPIES = 16
"""Of a chunk that the bound of pinned memory must hold: two under way and two more to arrive, in size classes that are powers
of two, in each of two directions."""


@dataclass(frozen=True)
class LaneOptions:
    """A lane is a process group with its own order and a priority: ``dist.new_group(backend="freescale", pg_options=...)``.

    Give every rank of a group the same options; the ranks compare transport, priority, chunk_bytes and pinned_bytes when the
    group is made. Issue the collectives of a group from one thread: their order must be that of the other ranks.

    Attributes:
        transport: what moves CUDA tensors: ``"host"``, ``"peer"``, ``"nccl-zero-cta"``, ``"two-level"``, ``"native"``, or
            ``"auto"``, which chooses by topology. CPU tensors take the host's path, or gloo's own with ``"native"``.
        name: of the lane, for errors and threads; that of the process group if empty.
        priority: lanes of lower priority in the same process pause while this one has work.
        chunk_bytes: what travels in one piece, and where a lane may pause. Where a higher lane exists, a lane has two chunks
            under way, or what takes two milliseconds; that is how long a message of the higher one may have to wait.
        pause_below: lower lanes pause for collectives of this lane that move fewer bytes; larger ones share the link with
            them. None: they always pause.
        patience: seconds that this lane pauses at most between two chunks, so that it never starves; also how long a higher
            lane without progress, whose peers have not come yet, holds it up.
        pinned_bytes: bound of the host memory pinned for CUDA tensors.

    Raises:
        ValueError: an option is out of range.
    """

    transport: str = "auto"
    name: str = ""
    priority: int = 0
    chunk_bytes: int = 1024 * 1024
    pause_below: int | None = None
    patience: float = 0.05
    pinned_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}: pass one of {', '.join(map(repr, TRANSPORTS))}")
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: pass at least 1 byte")
        if self.pause_below is not None and self.pause_below < 0:
            raise ValueError(f"pause_below={self.pause_below}: pass bytes, at least 0, or None")
        if self.patience < 0:
            raise ValueError(f"patience={self.patience}: pass seconds, at least 0")
        if self.pinned_bytes < COPIES * self.chunk_bytes:
            raise ValueError(
                f"pinned_bytes={self.pinned_bytes}: pass at least {COPIES} chunks, {COPIES * self.chunk_bytes} bytes, or a "
                f"smaller chunk_bytes than {self.chunk_bytes}"
            )
