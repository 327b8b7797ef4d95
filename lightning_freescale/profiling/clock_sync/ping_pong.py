"""What rank 0's clock shows when this rank's shows something, by questions and answers over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

WORST_DRIFT = 100e-6
"""How far the rates of two clocks may be apart before anything is known: two crystals of 50 ppm, one fast and one slow."""

_SLOW = 3.0  # times the smallest round trip of a measurement; above, something stood in the way
_ALL_ROUNDS, _LEAST_ROUNDS = 640, 8  # rank 0 serves one rank after the other, so their sum bounds the time


@dataclass(frozen=True)
class Measurement:
    """When this rank's clock shows ``time``, rank 0's shows ``time + offset``, give or take ``margin``; all in seconds.

    ``round_trip`` is the smallest one; ``rejected`` of the ``rounds`` took more than three times as long and do not count.
    """

    time: float
    offset: float
    margin: float
    round_trip: float
    rounds: int
    rejected: int

    @classmethod
    def from_stamps(cls, stamps: NDArray[np.float64]) -> Measurement:
        """Measure by stamps, shape ``[rounds, 4]``: asked, heard there, answered there, heard here (the four of NTP, RFC 5905).

        No message arrives before it is sent, so every question bounds the offset from above and every answer from below
        (Marzullo's intersection): the offset is half-way between the closest bounds, wrong by half their distance at most, and
        what the clocks drift from one bound to the other. That is half of the smallest round trip (Cristian 1989) or less.
        """
        forth, back = stamps[:, 1] - stamps[:, 0], stamps[:, 3] - stamps[:, 2]
        round_trips = forth + back
        good = round_trips <= _SLOW * round_trips.min()
        question, answer = int(np.where(good, forth, np.inf).argmin()), int(np.where(good, back, np.inf).argmin())
        asked, heard = float(stamps[question, 0]), float(stamps[answer, 3])
        return cls(
            time=(asked + heard) / 2,
            offset=float(forth[question] - back[answer]) / 2,
            margin=float(forth[question] + back[answer] + WORST_DRIFT * abs(heard - asked)) / 2,
            round_trip=float(round_trips.min()),
            rounds=len(stamps),
            rejected=len(stamps) - int(good.sum()),
        )


def measure(group: dist.ProcessGroup, clock: Callable[[], float], rounds: int) -> Measurement | None:
    """Ask rank 0 for the time; return None on rank 0, which answers. Collective: nobody leaves before all have measured.

    On the gloo group of all ranks nothing else is under way; the clock tells seconds. Every rank asks ``rounds`` questions,
    with many ranks fewer (640 in all, but 8 of each).

    Raises:
        RuntimeError: a rank is lost or says nothing within the group's timeout.
    """
    rounds = min(rounds, max(_ALL_ROUNDS // (group.size() - 1), _LEAST_ROUNDS))
    if group.rank() == 0:
        # in turns: every rank is answered up to a point, then every rank up to the next
        for _ in zip_longest(*(_answer(_Line(group, other), clock, rounds) for other in range(1, group.size()))):
            pass
        return None
    line, stamps = _Line(group, 0), np.empty((rounds, 4))
    with line.named():
        line.round_trip(clock)  # answered when all are here and it is this rank's turn
        for row in stamps:
            row[0], row[3] = line.round_trip(clock)
            row[1:3] = line.received
        line.round_trip(clock)  # answered when all have measured: whoever computed would disturb the others
    return Measurement.from_stamps(stamps)


def _answer(line: _Line, clock: Callable[[], float], rounds: int) -> Iterator[None]:
    """Answer one rank; yields where it is the others' turn."""
    with line.named():
        line.expect()
        line.hear()
        yield
        line.expect()
        line.send().wait()
        for _ in range(rounds):
            line.hear()
            line.sent[0] = clock()
            line.expect()  # before the answer, so that the next question finds a receive: gloo's sends wait for one
            line.sent[1] = clock()
            line.send().wait()
        yield
        line.hear()
        line.send().wait()


class _Line:
    """Messages of two numbers to and from one rank, in memory that is there from the start."""

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group, self._other = group, other
        self.sent, self.received = np.zeros(2), np.zeros(2)
        self._out, self._in = torch.from_numpy(self.sent), torch.from_numpy(self.received)
        self._expected: Any = None

    def expect(self) -> None:
        self._expected = dist.irecv(self._in, group=self._group, group_src=self._other)

    def hear(self) -> None:
        self._expected.wait()

    def send(self) -> Any:
        return dist.isend(self._out, group=self._group, group_dst=self._other)

    def round_trip(self, clock: Callable[[], float]) -> tuple[float, float]:
        self.expect()
        asked = clock()
        sending = self.send()
        self.hear()
        heard = clock()
        sending.wait()
        return asked, heard

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error on this line says what the ranks were doing, and which of them."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"clock alignment: rank {self._group.rank()} lost rank {self._other}, or heard nothing from it within the "
                f"group's timeout (if rank {self._other} failed because of another rank, its own error names that one): {error}"
            ) from error
