"""What every transport is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_freescale.comm.transfer import Transfer


class TransportRefused(RuntimeError):  # noqa: N818 (says what happened)
    """A transport cannot be had here; the message says why, and what to pass instead."""


class Transport(Protocol):
    """Moves the bytes of a collective on which all ranks have agreed; runs on the lane's thread, one transfer at a time."""

    name: str

    def move(self, transfer: Transfer, pause: Callable[[], None]) -> None:
        """Fill ``transfer.incoming``; when it returns, the bytes are there. Calls ``pause`` between chunks.

        Raises:
            DistBackendError: a peer is gone or does not come.
        """

    def close(self) -> None:
        """Let go of memory and streams."""
