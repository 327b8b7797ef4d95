"""The options of a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

TRANSPORTS = ("auto", "host", "peer", "nccl-zero-cta", "two-level", "native")
MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""The pinned memory of the host's transport holds sixteen chunks of this size."""


@dataclass(frozen=True)
class ProcessGroupFreeScaleOptions:
    """Options of a lane: ``dist.new_group(backend="freescale", pg_options=...)`` makes a group with its own order.

    Give every rank of a group the same options. The ranks compare transport, priority and chunk_bytes when the group is made.
    Issue the collectives of a group from one thread: their order must be that of the other ranks.

    Attributes:
        transport: what moves CUDA tensors: ``"host"``, ``"peer"``, ``"nccl-zero-cta"``, ``"two-level"``, ``"native"``, or
            ``"auto"``: torch's own backend, until ``"peer"``, ``"two-level"`` or ``"host"`` has delivered the same bytes in
            this process, and sooner with compute beside it, which is tried when the first such group is made. CPU tensors
            take the host's path, or gloo's own with ``"native"``.
        name: of the lane, for errors and threads; that of the process group if empty.
        priority: lanes of lower priority in the same process pause while this one has work.
        chunk_bytes: size of one message, after which a lane may pause; at most 16 MiB. Where a higher lane exists, a lane has
            two chunks in flight, or what takes two milliseconds; a message of the higher one may have to wait that long.

    Raises:
        ValueError: an option is out of range.
    """

    transport: str = "auto"
    name: str = ""
    priority: int = 0
    chunk_bytes: int = 1024 * 1024

    _lazy_gloo: ClassVar[bool] = False
    """Whether gloo connects at its first collective, which then waits for all ranks even to be issued."""
    _max_ctas: ClassVar[int | None] = None
    """Thread blocks, and so streaming multiprocessors, that NCCL takes at most; None: as many as it chooses."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}: pass one of {', '.join(map(repr, TRANSPORTS))}")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: pass 1 to {MAX_CHUNK_BYTES} bytes")


class LazyGlooOptions(ProcessGroupFreeScaleOptions):
    """Options of the lanes that this package makes: most have no collective of gloo."""

    _lazy_gloo = True


class OverlapOptions(LazyGlooOptions):
    """Options of a lane whose collectives run beside compute. Not tested on GPU."""

    # NCCL takes these from the compute, and from DDP's all-reduce, which has to fit on the device as well
    _max_ctas = 8
