"""The chunks of one transfer over the network, and how many of them are under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lightning_freescale.comm.options import COPIES, LaneOptions
from lightning_freescale.comm.p2p import GlooP2P
from lightning_freescale.comm.priority import TRAFFIC
from lightning_freescale.comm.transfer import Transfer
from lightning_freescale.comm.transports.host.staging import Lifted, Staging

EXACT = 2**20
"""Bytes of a chunk up to which every size has its own tag."""


@dataclass
class InFlightWindow:
    """How many rounds are under way: what takes ``seconds``, within bounds.

    The more, the less a rank that the system keeps from running holds up the others; the fewer, the sooner a higher lane has
    the link.
    """

    seconds: float
    fewest: int
    most: int

    @staticmethod
    def of(options: LaneOptions) -> InFlightWindow:
        """Of a lane."""
        seconds, fewest = (0.002, 2) if TRAFFIC.has_above(options.priority) else (0.02, 6)
        most = min(64, options.pinned_bytes // (COPIES // 2 * options.chunk_bytes))
        return InFlightWindow(seconds, min(fewest, most), most)

    def rounds(self, seconds_per_round: float) -> int:
        """So many."""
        return min(max(self.fewest, int(self.seconds / max(seconds_per_round, 1e-9))), self.most)


@dataclass
class _Round:
    """At most one chunk to a rank, and one from a rank."""

    target: int
    source: int
    outgoing: Tensor | None
    incoming: Tensor | None
    lifted: Lifted | None = None
    send: dist.Work | None = None
    memory: Tensor | None = None
    receive: dist.Work | None = None

    @property
    def is_lifted(self) -> bool:
        """Whether sending would not have to wait."""
        return self.lifted is None or self.lifted.is_ready


class P2PSchedule:
    """One transfer in rounds: in each, every rank sends a chunk to one rank and receives one from another.

    So a link carries one chunk each way at a time, and no rank is sent to by many at once. All ranks go through the rounds in
    the same order, and wait only for a chunk of whose round all ranks have posted their part, or will without waiting for a
    later one: uneven parts cannot make them wait for each other in a circle. Receives are posted ahead of sends.
    """

    def __init__(self, wire: GlooP2P, staging: Staging, transfer: Transfer, chunk: int, served: Collection[int]) -> None:
        self._wire, self._staging, self._transfer, self._chunk = wire, staging, transfer, chunk
        self._bounces = wire.rank in served
        ways = (transfer.outgoing, transfer.incoming)
        outgoing, incoming = ([self._cut(part) for part in parts] for parts in ways)
        pairs = list(zip(wire.peers, wire.sources))
        longest = max((len(pieces) for way in (outgoing, incoming) for pieces in way), default=0)
        every = [
            _Round(
                target,
                source,
                outgoing[target][number] if target in served and number < len(outgoing[target]) else None,
                incoming[source][number] if source in served and number < len(incoming[source]) else None,
            )
            for number in range(longest)
            for target, source in pairs
        ]
        self._rounds = [each for each in every if each.outgoing is not None or each.incoming is not None]
        self._begun = dict.fromkeys((self._receive, self._lift, self._send), 0)

    def begin(self, pace: InFlightWindow, early: bool) -> None:
        """Before the ranks have agreed: post what comes first, if ``early``, as a message of another size has another tag."""
        self._staging.begin(self._transfer.issued)
        if early:
            self._look_ahead(0, pace.fewest)

    def finish(self, pause: Callable[[], None], pace: InFlightWindow) -> None:
        """Move everything."""
        start, window = time.monotonic(), pace.fewest
        for number, current in enumerate(self._rounds):
            pause()
            self._look_ahead(number, window)
            self._complete(current)
            window = pace.rounds((time.monotonic() - start) / (number + 1))
        if self._bounces:
            self._bounce()
        self._staging.finish()

    def _look_ahead(self, number: int, window: int) -> None:
        """Begin what belongs to the rounds from ``number`` on: twice as many receives as sends, and one more copy."""
        for begin, last in ((self._receive, 2 * window), (self._lift, window + 1), (self._send, window)):
            while (index := self._begun[begin]) < min(number + last, len(self._rounds)):
                if begin == self._send and index > number and not self._rounds[index].is_lifted:
                    break  # rather receive meanwhile than wait for the copy
                begin(self._rounds[index])
                self._begun[begin] += 1

    def _receive(self, ahead: _Round) -> None:
        if ahead.incoming is not None:
            ahead.memory = self._staging.room(ahead.incoming)
            memory, tag = ahead.memory[: len(ahead.incoming)], self._tag(ahead.incoming)
            ahead.receive = self._wire.receive(memory, ahead.source, tag)

    def _lift(self, ahead: _Round) -> None:
        if ahead.outgoing is not None:
            ahead.lifted = self._staging.lift(ahead.outgoing)

    def _send(self, ahead: _Round) -> None:
        if ahead.lifted is not None and ahead.outgoing is not None:
            tag = self._tag(ahead.outgoing)
            ahead.send = self._wire.send(ahead.lifted.ready(), ahead.target, tag)

    def _complete(self, current: _Round) -> None:
        if current.receive is not None and current.memory is not None and current.incoming is not None:
            self._wire.wait(current.receive, current.source, self._transfer.timeout)
            self._staging.lower(current.memory, current.incoming)
        if current.send is not None and current.lifted is not None:
            self._wire.wait(current.send, current.target, self._transfer.timeout)
            self._staging.drop(current.lifted)
        current.receive = current.send = current.memory = current.lifted = None

    def _cut(self, part: Tensor) -> tuple[Tensor, ...]:
        return part.split(self._chunk) if len(part) and not self._transfer.fits(part) else ()

    def _bounce(self) -> None:
        """This rank's own part."""
        own = (self._transfer.outgoing[self._wire.rank], self._transfer.incoming[self._wire.rank])
        if len(own[0]) and own[0].data_ptr() != own[1].data_ptr():
            for source, target in zip(*(part.split(self._chunk) for part in own)):
                self._staging.bounce(self._staging.lift(source), target)

    def _tag(self, chunk: Tensor) -> int:
        """Odd, and another for another size: gloo ends the process if a message is larger than the receive it meets."""
        return 2 * ((self._transfer.number & 0x3FF) << 20 | (len(chunk) - 1) % EXACT) + 1
