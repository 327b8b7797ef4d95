"""One collective, as bytes for every rank and bytes from every rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.comm.header import ROOM
from lightning_freescale.comm.parts import RankBuffers


@dataclass
class Transfer:
    """What a transport moves.

    Attributes:
        name: of the collective.
        outgoing: for every rank of the group what it gets, as uint8 of shape ``[bytes]``.
        incoming: for every rank of the group where what it sends goes, likewise.
        dtype: of the elements, as its place in :data:`DTYPES`.
        device: of all tensors.
        total: bytes of the larger direction.
        timeout: how long a peer may show no progress.
        number: place in the order of the lane's collectives.
        largest: the most bytes that any rank sends to any other in it; known once the ranks have agreed.
        issued: on CUDA, an event of the caller's stream, after which the tensors may be used.
    """

    name: str
    outgoing: list[Tensor]
    incoming: list[Tensor]
    dtype: int
    device: torch.device
    total: int
    timeout: timedelta
    number: int
    largest: int = 0
    issued: Any = None

    @staticmethod
    def of(name: str, outgoing: RankBuffers, incoming: RankBuffers, rank: int, timeout: timedelta, number: int) -> Transfer:
        """Of what goes from ``rank`` and what comes to it.

        Raises:
            ValueError: they differ in dtype, device, or the size of the own part.
        """
        if (outgoing.dtype, outgoing.device) != (incoming.dtype, incoming.device):
            raise ValueError(f"the input is {outgoing.kind}, the output {incoming.kind}: pass one dtype and one device")
        gives, gets = outgoing.pieces[rank].shape[0], incoming.pieces[rank].shape[0]
        if gives != gets:
            raise ValueError(f"it gives itself {gives} bytes and expects {gets}: pass sizes that fit each other")
        total = max(outgoing.total(), incoming.total())
        return Transfer(name, outgoing.pieces, list(incoming.pieces), outgoing.dtype, outgoing.device, total, timeout, number)

    def fits(self, part: Tensor) -> bool:
        """Whether a part travels in the envelope."""
        return self.device.type == "cpu" and part.shape[0] <= ROOM
