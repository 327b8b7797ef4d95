"""Tells where all ranks stand when a run hangs, or is asked by a signal, while it goes on."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import Self

from lightning_freescale._worker import start_daemon
from lightning_freescale.profiling.hanging.calls import RankCalls, StoreSilent
from lightning_freescale.profiling.hanging.standing import StandingSeen
from lightning_freescale.profiling.hanging.table import hang_document, hang_text
from lightning_freescale.profiling.hanging.wake_up import WakeUp
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import write_atomically

LOOK_SECONDS = 1.0
"""How often a rank looks whether the run hangs: a few numbers of its own, and one small message to the store."""
_UNHANDLED = ("SIGKILL", "SIGSTOP")
_JOIN_SECONDS = 10.0
_STEPS, _LEAST_SECONDS = 20, 60.0
_FIRST_STEPS, _FIRST_SECONDS = 4, 600.0
_KEPT = 20
"""Reports that the file holds, the last ones."""


class HangWatch(AbstractContextManager["HangWatch"]):
    """Tells where all ranks stand when no step ends any more, or when a signal asks, while training goes on.

    One rank prints a table to stderr, and writes ``hang.json``: in which exchange each rank stands, since when, and where in
    the code, who has not come to that exchange, which ranks do not answer. Ranks tell each other by the store that they met
    at, so none has to come to a collective. As long as no step ends the report is repeated, each time after twice as long.
    Nothing is added to a step: a thread aside looks every second.

    Enter it on all ranks, on the thread that trains.

    Args:
        timeline: that the run is recorded on, enabled.
        dirpath: where ``hang.json`` goes.
        hang_timeout: seconds in which no step ends. ``"auto"``: 20 times the median of the last 20 steps, and at least 60 s, so
            that a slow batch is no hang, and a run whose collectives give up after minutes is told of before; 600 s before the
            fourth step has ended, because first steps compile, and while a checkpoint is saved. None: only when asked.
        hang_signal: name of the signal by which any rank is asked for all; None for none. A handler that somebody else has
            installed stays.

    Attributes:
        problem: why the signal is not listened to; None if it is.
        file: what was written; None before.

    Raises:
        ValueError: an argument does not fit.
    """

    def __init__(
        self,
        timeline: Timeline,
        dirpath: Path,
        *,
        hang_timeout: float | Literal["auto"] | None = "auto",
        hang_signal: str | None = "SIGUSR2",
    ) -> None:
        check_options(hang_timeout, hang_signal)
        self._timeline, self._dirpath, self._timeout, self._signal = timeline, dirpath, hang_timeout, hang_signal
        self.problem: str | None = None
        self.file: Path | None = None
        self._reports: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._closing = False
        self._beats = 0
        self._patience: float | None = None

    def __enter__(self) -> Self:
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank, self._ranks = dist.get_rank() if size > 1 else 0, range(size)
        store = dist.distributed_c10d._get_default_store() if size > 1 else None
        self._calls = None if store is None else RankCalls(store, self._rank, size)
        self._seen = StandingSeen(self._timeline, self._rank)
        self._wakes = WakeUp(self._signal)
        self.problem = self._wakes.problem
        self._mark, self._since = self._progress(), time.perf_counter()
        self._thread = start_daemon(self._watch, "freescale-hang watch")
        return self

    def __exit__(self, *_: object) -> None:
        self._wakes.release()
        self._closing = True
        self._wakes.wake()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # else it waits for a store that does not answer
            self._wakes.close()
        if self._calls is not None:
            self._calls.close()

    def note_progress(self) -> None:
        """Tell that the run goes on although no step ends: a batch of validation has."""
        self._beats += 1

    # -- on the thread aside

    def _watch(self) -> None:
        while True:
            asked = self._wakes.wait(LOOK_SECONDS)
            if self._closing:
                return
            self._seen.look()
            idle, patience = self._idle_seconds(), self._patience_seconds()
            why = None
            if asked:
                why = f"rank {self._rank} was asked by {self._signal}"
            elif idle >= patience:
                why = f"rank {self._rank} has ended no step for {idle:.0f} s"
            self._report(why, idle)

    def _idle_seconds(self) -> float:
        mark, now = self._progress(), time.perf_counter()
        if mark != self._mark:
            self._mark, self._since, self._patience = mark, now, None
        return now - self._since

    def _progress(self) -> tuple[Any, int]:
        ended = list(self._timeline.ended)  # the training thread may empty it meanwhile
        return ended[-1] if ended else None, self._beats

    def _patience_seconds(self) -> float:
        if self._patience is not None:
            return self._patience
        if self._timeout == "auto":
            ends = [end for _, end in list(self._timeline.ended)]
            steps = [end - start for start, end in zip(ends, ends[1:])]
            if len(ends) < _FIRST_STEPS or self._is_paused():
                return _FIRST_SECONDS
            return max(_LEAST_SECONDS, _STEPS * median(steps))
        return math.inf if self._timeout is None else self._timeout

    def _is_paused(self) -> bool:
        """Whether this rank saves a checkpoint, validates or logs, which takes what it takes."""
        record, _ = self._timeline.position()
        return record is not None and any(span.kind == "pause" and span.end is None for span in list(record.spans))

    def _report(self, why: str | None, idle: float) -> None:
        """Answer a rank that calls, or call all for a reason of one's own; report what they say, if it is this rank's turn."""
        ranks: list[dict[str, Any]] | None = None
        try:
            why = why if self._calls is None else self._calls.heed(why)
            if why is None:
                return
            standing = self._seen.as_document()  # before anybody waits for answers, which takes seconds
            ranks = [standing] if self._calls is None else self._calls.answer(standing)
        except StoreSilent as silent:
            if why is None:  # nobody may know whether the run hangs
                return
            ranks = [{"rank": rank, "silent": f"the ranks' store, in rank 0 or its launcher, {silent}"} for rank in self._ranks]
            ranks[self._rank] = self._seen.as_document()
        self._wakes.forget()  # whoever sent the signal to several ranks has asked once
        patience = self._patience_seconds()
        if idle > patience / 2:  # this rank hangs, too: it is not to call for it by itself in a moment
            patience = self._patience = 2 * max(idle, patience)
        if ranks is not None and not self._closing:
            self._tell(hang_document(why, ranks, patience if math.isfinite(patience) else None))

    def _tell(self, document: dict[str, Any]) -> None:
        self._reports.append(document)
        print("", hang_text(document), sep="\n", file=sys.stderr, flush=True)  # below a progress bar
        try:
            self.file = write_atomically(self._dirpath / "hang.json", _as_json(list(self._reports)))
        except OSError as error:
            print(f"BubbleProfiler: hang.json could not be written to {self._dirpath}: {error}", file=sys.stderr, flush=True)


def check_options(hang_timeout: object, hang_signal: object) -> None:
    """Check the options of a :class:`HangWatch`.

    Raises:
        ValueError: one does not fit.
    """
    is_number = isinstance(hang_timeout, (int, float)) and not isinstance(hang_timeout, bool)
    if hang_timeout is not None and hang_timeout != "auto" and not (is_number and hang_timeout > 0):  # type: ignore[operator]
        raise ValueError(f"hang_timeout={hang_timeout!r}: pass seconds above 0, 'auto', or None to be told only by hang_signal")
    if hang_signal is not None and not (isinstance(hang_signal, str) and hang_signal in signal.Signals.__members__):
        raise ValueError(f"hang_signal={hang_signal!r}: pass the name of a signal, such as 'SIGUSR2', or None for none")
    if hang_signal in _UNHANDLED:
        raise ValueError(f"hang_signal={hang_signal!r}: no process can handle it, pass another one, such as 'SIGUSR2'")


def _as_json(reports: list[dict[str, Any]]) -> Iterator[str]:
    yield json.dumps({"format": "lightning_freescale hangs", "version": 1, "reports": reports}, indent=1)
    yield "\n"
