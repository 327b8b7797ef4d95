"""One clock for all ranks, rank 0's: its offset to a rank's own, measured by questions and answers over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Seconds = TypeVar("Seconds", float, Floats)

WORST_DRIFT = 100e-6
"""How far the rates of two clocks may be apart before anything is known: two crystals of 50 ppm, one fast and one slow."""

_SLOW = 3.0  # times the smallest round trip of a measurement; above, something stood in the way
_ALL_ROUNDS, _LEAST_ROUNDS = 640, 8  # rank 0 serves one rank after the other, so their sum bounds the time
_KEPT = 64
_LOADED = 3.0  # times the smallest round trip of all measurements; one above was not taken in quiet
WANDER = 2e-6
"""How far a rate may be from its mean between measurements: a crystal's in a machine that warms up."""


class Alignment:
    """Turns this rank's stamps into seconds on rank 0's clock.

    Clocks of different hosts start anywhere and run apart, by 50 millionths of a second per second and more. So the ranks
    measure the offset several times (:meth:`measure_offset`), while they are idle, and :meth:`to_rank_zero` interpolates.

    How good that is depends on the quiet while they measured and on the time since. Ranks of one host are treated like those
    of several: nothing reliable says that their clocks are one. After a single measurement two clocks drift by up to 100
    microseconds per second; between two, what is left is half a round trip and 2 microseconds per second from the nearer one,
    because a rate changes with the temperature. A clock that NTP is pulling to the right time just then does up to 500, which
    is only noticed at the third measurement.

    Args:
        clock: the clock of the stamps, in seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._leads = False
        self._measurements: list[Measurement] = []
        self._offsets: Offsets | None = None
        self._dropped = 0

    def measure_offset(self, group: dist.ProcessGroup | None, rounds: int = 40) -> None:
        """Measure the offset to rank 0. Collective; call it while the ranks are idle: at the start, after epochs, at the end.

        A measurement whose smallest round trip is more than three times the smallest of all was not taken in quiet. It is used
        only as long as the others know less about its time, which is so for the first.

        Args:
            group: a gloo group of all ranks that serves nothing else; None where there is but one rank.
            rounds: questions of each rank to rank 0, at most; with more than 17 ranks fewer, so that it does not take long.

        Raises:
            RuntimeError: a rank is lost or says nothing within the group's timeout.
        """
        found = measure(group, self._clock, rounds) if group is not None and group.size() > 1 else None
        self._leads = found is None
        self._measurements.append(found or Measurement(self._clock(), offset=0, margin=0, round_trip=0, rounds=0, rejected=0))
        self._drop_loaded()
        if len(self._measurements) > _KEPT:  # of old times half are enough
            self._measurements[1 : _KEPT // 2] = self._measurements[1 : _KEPT // 2 : 2]
        self._offsets = Offsets(self._measurements)

    def to_rank_zero(self, seconds: Seconds) -> Seconds:
        """Return what rank 0's clock shows when this rank's shows ``seconds``.

        Raises:
            RuntimeError: before the first :meth:`measure_offset`.
        """
        return _like(seconds, seconds + self._known().offset_at(seconds))

    def uncertainty_at(self, seconds: Seconds) -> Seconds:
        """Return what :meth:`to_rank_zero` may be wrong by at ``seconds``."""
        margin = self._known().margin_at(seconds)
        return _like(seconds, 0 * margin if self._leads else margin)

    def figures(self) -> Mapping[str, float]:
        """Return figures of this rank's clock for the report; rank 0 has none of its own.

        ``round_trip_s`` is the smallest, ``syncs`` counts the measurements that are used, ``rejected`` the round trips
        that are not (all those of unused measurements among them), ``drift`` is what rank 0's clock gains per second, 0 as
        long as it is not known.
        """
        return {
            "round_trip_s": min((each.round_trip for each in self._measurements), default=0.0),
            "syncs": len(self._measurements),
            "rejected": self._dropped + sum(each.rejected for each in self._measurements),
            "drift": 0.0 if self._offsets is None else self._offsets.drift,
        }

    def _drop_loaded(self) -> None:
        quiet = _LOADED * min(each.round_trip for each in self._measurements)
        for loaded in [each for each in self._measurements if each.round_trip > quiet]:
            others = [each for each in self._measurements if each is not loaded]
            if Offsets(others).margin_at(loaded.time) <= loaded.margin:
                self._measurements = others
                self._dropped += loaded.rounds

    def _known(self) -> Offsets:
        if self._offsets is None:
            raise RuntimeError("Alignment knows nothing of rank 0's clock yet: call measure_offset(group) first, on all ranks")
        return self._offsets


class Offsets:
    """Rank 0's clock minus this rank's: linear between measurements, beyond them as the drift says.

    The drift is taken from the last measurement and the earlier one that tells it best, but only if that leaves less doubt than
    ``WORST_DRIFT``; otherwise the offset stays what it was. There is at least one measurement, and they are in order.

    Attributes:
        drift: seconds that rank 0's clock gains per second; 0 as long as it is not known.
        doubt: ``drift`` may be off by this.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        table = np.array([(each.time, each.offset, each.margin) for each in measurements])
        self.times, self._offsets, self._margins = table.T
        self.drift, self.doubt = self._rate()
        self._bend = self._measured_bend()

    def offset_at(self, seconds: float | Floats) -> Floats:
        """Return the offset when this rank's clock shows ``seconds``."""
        beyond = np.minimum(seconds - self.times[0], 0.0) + np.maximum(seconds - self.times[-1], 0.0)
        return np.interp(seconds, self.times, self._offsets) + self.drift * beyond

    def margin_at(self, seconds: float | Floats) -> Floats:
        """Return what the offset at ``seconds`` may be wrong by.

        The margins of the measurements around it, and for every second since the nearest one ``WANDER``, beyond the first and
        last ``doubt``; and by how much the measurements themselves are further from a line than their margins explain.
        """
        away = np.abs(np.asarray(seconds)[..., None] - self.times).min(axis=-1)
        between = (seconds >= self.times[0]) & (seconds <= self.times[-1])
        return np.interp(seconds, self.times, self._margins) + np.where(between, WANDER, self.doubt) * away + self._bend

    def _rate(self) -> tuple[float, float]:
        elapsed = self.times[-1] - self.times[:-1]
        if not len(elapsed):
            return 0.0, WORST_DRIFT
        doubts = (self._margins[-1] + self._margins[:-1]) / elapsed + WANDER
        best = int(doubts.argmin())
        if doubts[best] >= WORST_DRIFT:
            return 0.0, WORST_DRIFT
        return float((self._offsets[-1] - self._offsets[best]) / elapsed[best]), float(doubts[best])

    def _measured_bend(self) -> float:
        """How far a measurement is from the line between its neighbours, less what the margins of the three allow."""
        if len(self.times) < 3:
            return 0.0
        before, here, after = self.times[:-2], self.times[1:-1], self.times[2:]
        share = (here - before) / (after - before)
        line = self._offsets[:-2] * (1 - share) + self._offsets[2:] * share
        allowed = self._margins[:-2] * (1 - share) + self._margins[2:] * share + self._margins[1:-1]
        return max(0.0, float((np.abs(self._offsets[1:-1] - line) - allowed).max()))


def _like(seconds: Seconds, result: float | NDArray[np.float64]) -> Seconds:
    return np.asarray(result) if isinstance(seconds, np.ndarray) else float(result)


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
    """Ask rank 0 for the time; return None on rank 0, which answers. Collective: no rank leaves before all have measured.

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
        line.round_trip(clock)  # answered when all have measured: a rank that computed would disturb the others
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
