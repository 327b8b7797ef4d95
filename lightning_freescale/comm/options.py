"""The options of a process group ``"freescale"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

TRANSPORTS = ("auto", "host", "peer", "nccl-zero-cta", "two-level", "native")
MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""The largest chunk. The pinned memory of the host transport holds eight chunks of this size."""


@dataclass(frozen=True)
class ProcessGroupFreeScaleOptions:
    """The options for ``dist.new_group(backend="freescale", pg_options=...)``. A group with its connections is called a lane.

    Pass the same options on every rank. The ranks compare transport, priority and chunk_bytes when they create the group. Issue
    the collectives of a group from one thread, in the same order on every rank.

    Attributes:
        transport: the transport of CUDA tensors: ``"host"``, ``"peer"``, ``"nccl-zero-cta"``, ``"two-level"``, ``"native"`` or
            ``"auto"``. ``"auto"`` uses torch's own backend until ``"peer"``, ``"two-level"`` or ``"host"`` has passed a trial
            in this process: it delivers the same bytes, faster beside compute. The trial runs when the first such group is
            created. CPU tensors use the host transport, or gloo with ``"native"``.
        name: the name of the lane in errors and threads; by default that of the process group.
        priority: the priority of the lane. Lanes of lower priority in the same process pause while this lane has work.
        chunk_bytes: the size of a message, after which a lane may pause; at most 16 MiB. If a lane of higher priority exists,
            this lane has two chunks or two milliseconds of chunks in flight. A message of the higher lane may wait that long.

    Raises:
        ValueError: an option is out of range.
    """

    transport: str = "auto"
    name: str = ""
    priority: int = 0
    chunk_bytes: int = 1024 * 1024

    _lazy_gloo: ClassVar[bool] = False
    """Whether gloo connects at its first collective, whose call then blocks until all ranks have made it."""
    _max_ctas: ClassVar[int | None] = None
    """The maximum number of thread blocks, and so of streaming multiprocessors, for NCCL; None for NCCL's choice."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}: pass one of {', '.join(map(repr, TRANSPORTS))}")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: pass 1 to {MAX_CHUNK_BYTES} bytes")


class LazyGlooOptions(ProcessGroupFreeScaleOptions):
    """The options of the lanes that this package creates, which rarely run a collective of gloo."""

    _lazy_gloo = True


class OverlapOptions(LazyGlooOptions):
    """The options of a lane whose collectives run beside compute. Not tested on GPU."""

    # these multiprocessors are not available for compute and for DDP's all-reduce, which must fit on the device as well
    _max_ctas = 8
