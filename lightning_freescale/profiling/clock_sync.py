"""Align the clock of every rank with rank 0's clock, by round trips over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WORST_DRIFT = 100e-6
"""Largest drift between two clocks before any is measured: two crystals of 50 ppm, one fast and one slow."""
WANDER = 2e-6
"""Largest deviation of a rate from its mean between measurements, such as that of a crystal in a machine that warms up."""
_SLOW = 3.0
"""A round trip above this multiple of the smallest one of its measurement was delayed."""
_LOADED = 3.0
"""A measurement with a smallest round trip above this multiple of the smallest of all was taken under load."""
_ALL_ROUNDS, _LEAST_ROUNDS = 640, 8  # rank 0 serves one rank after the other, so the sum bounds the time
_KEPT = 64


class Alignment:
    """Converts stamps of this rank into seconds on rank 0's clock.

    Clocks of different hosts have different zeros, and drift by 50 microseconds per second and more. The ranks measure their
    offsets several times (:meth:`measure_offset`), and :meth:`to_rank_zero` interpolates. Ranks of one host are treated alike,
    because nothing reliable states that they share a clock.

    :meth:`Offsets.margin_at` has the uncertainty. A clock that NTP corrects drifts by up to 500 microseconds per second, which
    only a third measurement reveals.

    Args:
        clock: monotonic clock of the stamps, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._leads = False
        self._measurements: list[Measurement] = []
        self._offsets: Offsets  # after the first measurement
        self._dropped = 0

    def measure_offset(self, group: dist.ProcessGroup | None, rounds: int = 40) -> None:
        """Measure the offset to rank 0, while the ranks are idle: at the start, after epochs, at the end. Collective.

        A measurement under load is used only while the others have a larger uncertainty at its time.

        Args:
            group: gloo group of all ranks that has no other use; None with one rank.
            rounds: largest number of round trips of each rank; fewer with more than 17 ranks, which bounds the time.

        Raises:
            RuntimeError: a rank is lost or does not answer within the group's timeout.
        """
        found = measure(group, self._clock, rounds) if group is not None and group.size() > 1 else None
        self._leads = found is None
        self._measurements.append(found or Measurement(self._clock(), offset=0, margin=0, round_trip=0, rounds=0, rejected=0))
        self._drop_loaded()
        if len(self._measurements) > _KEPT:  # every second one of the older measurements suffices
            self._measurements[1 : _KEPT // 2] = self._measurements[1 : _KEPT // 2 : 2]
        self._offsets = Offsets(self._measurements)

    def to_rank_zero(self, seconds: Any) -> Any:
        """Return the time of rank 0's clock at the time ``seconds`` of this rank's clock, a number or an array of them."""
        return seconds + self._offsets.offset_at(seconds)

    def uncertainty_at(self, seconds: Any) -> Any:
        """Return the largest error of :meth:`to_rank_zero` at ``seconds``."""
        return 0 * seconds if self._leads else self._offsets.margin_at(seconds)

    def figures(self) -> Mapping[str, float]:
        """Return figures of this rank's clock for the report; zeros on rank 0, except for ``syncs``.

        ``round_trip_s`` is the smallest round trip, ``syncs`` the number of measurements in use, ``rejected`` the number of
        unused round trips, and ``drift`` the seconds that rank 0's clock gains per second, 0 while unknown.
        """
        return {
            "round_trip_s": min(each.round_trip for each in self._measurements),
            "syncs": len(self._measurements),
            "rejected": self._dropped + sum(each.rejected for each in self._measurements),
            "drift": self._offsets.drift,
        }

    def _drop_loaded(self) -> None:
        quiet = _LOADED * min(each.round_trip for each in self._measurements)
        for loaded in [each for each in self._measurements if each.round_trip > quiet]:
            others = [each for each in self._measurements if each is not loaded]
            if Offsets(others).margin_at(loaded.time) <= loaded.margin:
                self._measurements = others
                self._dropped += loaded.rounds


class Offsets:
    """Rank 0's clock minus this rank's clock, from one or more measurements in order of time.

    The offset is linear between measurements. Beyond them it changes by the drift, which is known if its uncertainty is below
    ``WORST_DRIFT``. The drift comes from the last measurement and the earlier one that gives the smallest uncertainty.

    Attributes:
        drift: seconds that rank 0's clock gains per second; 0 while unknown.
        doubt: uncertainty of ``drift``.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        table = np.array([(each.time, each.offset, each.margin) for each in measurements])
        self.times, self._offsets, self._margins = table.T
        self.drift, self.doubt = self._rate()
        self._bend = self._measured_bend()

    def offset_at(self, seconds: float | Floats) -> Floats:
        """Return the offset at the time ``seconds`` of this rank's clock."""
        beyond = np.minimum(seconds - self.times[0], 0.0) + np.maximum(seconds - self.times[-1], 0.0)
        return np.interp(seconds, self.times, self._offsets) + self.drift * beyond

    def margin_at(self, seconds: float | Floats) -> Floats:
        """Return the uncertainty of the offset at ``seconds``.

        It is the sum of the interpolated margins, of the drift since the nearest measurement (``WANDER`` per second between
        measurements, ``doubt`` beyond them), and of the distance of the measurements from a line beyond their margins.
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
        """Return the largest distance of a measurement from the line between its neighbours, minus their three margins."""
        if len(self.times) < 3:
            return 0.0
        before, here, after = self.times[:-2], self.times[1:-1], self.times[2:]
        share = (here - before) / (after - before)
        line = self._offsets[:-2] * (1 - share) + self._offsets[2:] * share
        allowed = self._margins[:-2] * (1 - share) + self._margins[2:] * share + self._margins[1:-1]
        return max(0.0, float((np.abs(self._offsets[1:-1] - line) - allowed).max()))


@dataclass(frozen=True)
class Measurement:
    """One measurement in seconds: at ``time`` of this rank's clock, rank 0's shows ``time + offset``, within ``margin``.

    ``round_trip`` is the smallest one. ``rejected`` of the ``rounds`` were more than three times as long and are not used.
    """

    time: float
    offset: float
    margin: float
    round_trip: float
    rounds: int
    rejected: int

    @classmethod
    def from_stamps(cls, stamps: NDArray[np.float64]) -> Measurement:
        """Measure by stamps of shape ``[rounds, 4]``: asked, heard there, answered there, heard here (RFC 5905, NTP).

        No message arrives before it is sent. So every question bounds the offset from above and every answer from below, and
        the offset is half-way between the closest bounds (Marzullo's intersection). Its error is at most half of their distance
        plus the drift between them, which is half of the smallest round trip (Cristian 1989) or less.
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
    """Measure the offset to rank 0; return None on rank 0, which answers. Collective: all ranks return together.

    With many ranks, each makes fewer round trips (640 in total, but at least 8 of each).

    Raises:
        RuntimeError: a rank is lost or does not answer within the group's timeout.
    """
    rounds = min(rounds, max(_ALL_ROUNDS // (group.size() - 1), _LEAST_ROUNDS))
    if group.rank() == 0:
        # in stages: every rank is answered up to its next yield before the first one continues
        for _ in zip_longest(*(_answer(_Line(group, other), clock, rounds) for other in range(1, group.size()))):
            pass
        return None
    line, stamps = _Line(group, 0), np.empty((rounds, 4))
    with line.named():
        line.round_trip(clock)  # answered when all ranks are here and it is this rank's turn
        for row in stamps:
            row[0], row[3] = line.round_trip(clock)
            row[1:3] = line.received
        line.round_trip(clock)  # answered when all have measured: a rank that computes would disturb the others
    return Measurement.from_stamps(stamps)


def _answer(line: _Line, clock: Callable[[], float], rounds: int) -> Iterator[None]:
    """Answer one rank; yield where the other ranks take their turn."""
    with line.named():
        line.expect()
        line.hear()
        yield
        line.expect()
        line.send().wait()
        for _ in range(rounds):
            line.hear()
            line.sent[0] = clock()
            line.expect()  # before the answer, so that the next question finds a receive, which gloo's sends wait for
            line.sent[1] = clock()
            line.send().wait()
        yield
        line.hear()
        line.send().wait()


class _Line:
    """Messages of two numbers to and from one rank, in preallocated memory."""

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
        """Name the two ranks in errors of this line."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"clock alignment: rank {self._group.rank()} lost rank {self._other}, or waited for it longer than the group's "
                f"timeout. If rank {self._other} failed because of another rank, its own error names that rank: {error}"
            ) from error
