"""What a user may choose about a lane."""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("auto", "host", "peer", "nccl-zero-cta", "two-level", "native")

MIN_PINNED_CHUNKS = 16
"""Chunks that the bound of pinned memory must hold: two in flight and two more to arrive, in size classes that are powers of
two, in each of two directions."""
MIN_PEER_BYTES = 1024 * 1024
"""Two chunks of 256 bytes, to which copy engines align, for each of more ranks than an NVLink domain has."""


@dataclass(frozen=True)
class ProcessGroupFreeScaleOptions:
    """A lane is a process group with its own order and a priority: ``dist.new_group(backend="freescale", pg_options=...)``.

    Give every rank of a group the same options; the ranks compare transport, priority, chunk_bytes, pinned_bytes, peer_bytes,
    nccl_ctas and lazy_gloo when the group is made. Issue the collectives of a group from one thread: their order must be that
    of the other ranks.

    Attributes:
        transport: what moves CUDA tensors: ``"host"``, ``"peer"``, ``"nccl-zero-cta"``, ``"two-level"``, ``"native"``, or
            ``"auto"``: torch's own backend, until ``"peer"``, ``"two-level"`` or ``"host"`` has delivered the same bytes in
            this process, and sooner with compute beside it, which is tried when the first such group is made. CPU tensors
            take the host's path, or gloo's own with ``"native"``.
        name: of the lane, for errors and threads; that of the process group if empty.
        priority: lanes of lower priority in the same process pause while this one has work.
        chunk_bytes: what travels in one message, and where a lane may pause. Where a higher lane exists, a lane has two chunks
            in flight, or what takes two milliseconds; that is how long a message of the higher one may have to wait.
        preempt_below_bytes: lower lanes pause for collectives of this lane that move fewer bytes; larger ones share the link
            with them. None: they always pause.
        max_pause_seconds: how long this lane pauses at most between two chunks, so that it never starves; also how long a
            higher lane without progress, whose peers have not come yet, holds it up.
        lazy_gloo: connect gloo, for the collectives that no transport moves, at the first of them, which then waits for all
            ranks even to be issued; else when the group is made. For groups that may never have such a collective.
        pinned_bytes: bound of the host memory pinned for CUDA tensors.
        nccl_ctas: thread blocks, and so at most streaming multiprocessors, that NCCL takes for a collective of this lane; None:
            as many as it chooses. Not tested on GPU.
        peer_bytes: memory that ``"peer"`` and ``"two-level"`` take on every GPU for each lane: two chunks for every other rank
            of the NVLink domain. So half of it is what a rank sends in one round, after which the lane may pause.

    Raises:
        ValueError: an option is out of range.
    """

    transport: str = "auto"
    name: str = ""
    priority: int = 0
    chunk_bytes: int = 1024 * 1024
    preempt_below_bytes: int | None = None
    max_pause_seconds: float = 0.05
    lazy_gloo: bool = False
    pinned_bytes: int = 256 * 1024 * 1024
    nccl_ctas: int | None = None
    peer_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}: pass one of {', '.join(map(repr, TRANSPORTS))}")
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: pass at least 1 byte")
        if self.preempt_below_bytes is not None and self.preempt_below_bytes < 0:
            raise ValueError(f"preempt_below_bytes={self.preempt_below_bytes}: pass bytes, at least 0, or None")
        if self.max_pause_seconds < 0:
            raise ValueError(f"max_pause_seconds={self.max_pause_seconds}: pass seconds, at least 0")
        if self.nccl_ctas is not None and not 1 <= self.nccl_ctas <= 64:  # NCCL's own bound
            raise ValueError(f"nccl_ctas={self.nccl_ctas}: pass 1 to 64, or None")
        if self.pinned_bytes < (least := MIN_PINNED_CHUNKS * self.chunk_bytes):
            raise ValueError(
                f"pinned_bytes={self.pinned_bytes}: pass at least {MIN_PINNED_CHUNKS} chunks, {least} bytes, or a smaller "
                f"chunk_bytes than {self.chunk_bytes}"
            )
        if self.peer_bytes < MIN_PEER_BYTES:
            raise ValueError(f"peer_bytes={self.peer_bytes}: pass at least {MIN_PEER_BYTES} bytes")
