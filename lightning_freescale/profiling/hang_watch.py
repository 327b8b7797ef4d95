"""Report the state of all ranks when a run hangs or when a signal asks for it. Training continues."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from typing_extensions import Self

from lightning_freescale._runtime.worker import WorkerThread, start_daemon
from lightning_freescale.profiling.hang_report import RankObserver, hang_document, hang_text, why_silent
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import write_atomically

LOOK_SECONDS = 1.0
"""Interval of the checks. A check reads a few numbers of this rank and sends one small message to the store."""
ANSWER_SECONDS = 3.0
"""Time that the reporting rank waits for the answers of the others, and that every rank waits for the store."""
_POLL_SECONDS = 0.05
_JOIN_SECONDS = 10.0
_STEPS, _LEAST_SECONDS = 20, 60.0
_FIRST_STEPS, _FIRST_SECONDS = 4, 600.0
_SIGNAL = "SIGUSR2"
_KEPT = 20
"""The number of reports in the file, counted from the end."""
_RUNS = count()  # the same on every rank


class HangWatch(AbstractContextManager["HangWatch"]):
    """Reports the state of all ranks when no step ends for a while, or when a signal asks for it.

    One rank prints a table to stderr and writes ``hang.json``. The report has, for each rank, the step, the exchange in which
    the rank waits, since when, and the line of code. It names the ranks that have not reached that exchange, and the ranks that
    do not answer. The ranks communicate through the store of the process group, so no rank has to enter a collective. The
    report is repeated as long as no step ends, each time after twice as long. A separate thread checks once a second; a step
    costs nothing.

    The first report comes after 20 times the median of the last 20 steps, at least 60 s: a slow batch is no hang, and the
    report comes before collectives time out. Until the fourth step has ended, and while a checkpoint is saved, it comes after
    600 s, because the first steps compile. The signal SIGUSR2 asks for a report on any rank. An existing handler stays.

    Enter the context on all ranks, on the thread that trains.

    Args:
        timeline: enabled timeline on which the run is recorded.
        dirpath: folder of ``hang.json``.

    Attributes:
        problem: reason why the signal is not handled; None if it is handled.
        file: path of ``hang.json``; None before the first report.
    """

    def __init__(self, timeline: Timeline, dirpath: Path) -> None:
        self._timeline, self._dirpath = timeline, dirpath
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
        self._observer = RankObserver(self._timeline, self._rank)
        self._pipe = SignalPipe(_SIGNAL)
        self.problem = self._pipe.problem
        self._mark, self._since = self._progress(), time.perf_counter()
        self._thread = start_daemon(self._watch, "freescale-hang watch")
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.release()
        self._closing = True
        self._pipe.wake()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # otherwise it waits for a store that does not answer
            self._pipe.close()
        if self._calls is not None:
            self._calls.close()

    def note_progress(self) -> None:
        """Note that the run continues although no step ends, for example after a batch of validation."""
        self._beats += 1

    # -- on the watching thread

    def _watch(self) -> None:
        while True:
            asked = self._pipe.wait(LOOK_SECONDS)
            if self._closing:
                return
            self._observer.look()
            idle, why = self._idle_seconds(), None
            if asked:
                why = f"rank {self._rank} received {_SIGNAL}"
            elif idle >= self._patience_seconds():
                why = f"rank {self._rank} has ended no step for {idle:.0f} s"
            self._report(why, idle)

    def _idle_seconds(self) -> float:
        mark, now = self._progress(), time.perf_counter()
        if mark != self._mark:
            self._mark, self._since, self._patience = mark, now, None
        return now - self._since

    def _progress(self) -> tuple[Any, int]:
        ended = list(self._timeline.ended)  # a copy: the training thread may empty the deque meanwhile
        return ended[-1] if ended else None, self._beats

    def _patience_seconds(self) -> float:
        if self._patience is not None:
            return self._patience
        ends = [end for _, end in list(self._timeline.ended)]
        if len(ends) < _FIRST_STEPS or self._is_paused():
            return _FIRST_SECONDS
        return max(_LEAST_SECONDS, _STEPS * median(end - start for start, end in zip(ends, ends[1:])))

    def _is_paused(self) -> bool:
        """Return True if this rank saves a checkpoint, validates or logs, which may take any time."""
        record, _ = self._timeline.position()
        return record is not None and any(span.kind == "pause" and span.end is None for span in list(record.spans))

    def _report(self, why: str | None, idle: float) -> None:
        """Answer the call of another rank, or call all ranks for the reason ``why``; report if this rank is the reporter."""
        ranks: list[dict[str, Any]] | None = None
        try:
            why = why if self._calls is None else self._calls.heed(why)
            if why is None:
                return
            state = self._observer.state()  # before the answers, which take seconds
            ranks = [state] if self._calls is None else self._calls.answer(state)
        except StoreSilent as silent:
            if why is None:  # this rank does not know whether the run hangs
                return
            ranks = [{"rank": rank, "silent": f"the store of the ranks {silent}"} for rank in self._ranks]
            ranks[self._rank] = self._observer.state()
        self._pipe.empty()  # a signal to several ranks asks once
        patience = self._patience_seconds()
        if idle > patience / 2:  # this rank hangs, too, and should not call by itself a moment later
            patience = self._patience = 2 * max(idle, patience)
        if ranks is not None and not self._closing:
            self._print_and_write(hang_document(why, ranks, patience))

    def _print_and_write(self, document: dict[str, Any]) -> None:
        self._reports.append(document)
        print("", hang_text(document), sep="\n", file=sys.stderr, flush=True)  # below a progress bar
        written = {"format": "lightning_freescale hangs", "version": 1, "reports": list(self._reports)}
        try:
            self.file = write_atomically(self._dirpath / "hang.json", [json.dumps(written, indent=1), "\n"])
        except OSError as error:
            print(f"BubbleProfiler cannot write hang.json to {self._dirpath}: {error}", file=sys.stderr, flush=True)


class StoreSilent(RuntimeError):  # noqa: N818 (it is a state)
    """The store does not answer or no longer exists."""


class RankCalls:
    """Collects the states of all ranks through the store, without a collective: ranks may have died, or wait in one.

    Requests run on a separate thread and use a separate connection. The process that holds the store may be stopped, and torch
    waits for such a store without a timeout.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = dist.PrefixStore(f"freescale hangs/{next(_RUNS)}", store.clone())
        self._worker = WorkerThread("freescale-hang store")
        here = json.dumps([socket.gethostname(), os.getpid()])
        self._request: Any = self._worker.submit(self._store.set, f"process/{rank}", here)
        self._number, self._given_up = 0, False

    def heed(self, why: str | None) -> str | None:
        """Return the reason of a call that this rank has not answered; None without one. Call all ranks if ``why`` is given.

        Raises:
            StoreSilent: the store does not answer.
        """
        call = f"call/{self._number}"
        if why is not None:
            return self._ask(lambda: str(self._store.compare_set(call, "", why).decode()))
        return self._ask(lambda: str(self._store.get(call).decode()) if self._store.check([call]) else None)

    def answer(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Publish the state of this rank. Return the states of all ranks on the rank that reports, None on the others.

        Rank 0 reports, or the lowest rank that answers. A rank that does not answer has the entry ``silent`` with the reason, a
        rank whose training has ended has the entry ``ended``.

        Raises:
            StoreSilent: the store does not answer.
        """
        number, self._number = self._number, self._number + 1
        return self._ask(lambda: self._answer(number, state), 2 * ANSWER_SECONDS)

    def close(self) -> None:
        """Tell the other ranks that training has ended on this one, and end the thread."""
        try:
            self._ask(lambda: self._store.set(f"ended/{self.rank}", ""))
        except StoreSilent:
            if not self._request.done():
                return  # the thread waits for a store that does not answer
        self._worker.stop(ANSWER_SECONDS)

    def _ask(self, request: Callable[[], Any], seconds: float = 0.0) -> Any:
        frozen = "does not answer: its process (rank 0 or the launcher) is stopped"
        if self._given_up and not self._request.done():
            raise StoreSilent(frozen)
        self._request = self._worker.submit(request)
        try:
            return self._request.result(seconds + ANSWER_SECONDS)
        except NotInTime:
            self._given_up = True
            raise StoreSilent(frozen) from None
        except RuntimeError as error:
            raise StoreSilent("no longer exists: its process (rank 0 or the launcher) has ended") from error

    def _answer(self, number: int, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        answers = [f"state/{number}/{rank}" for rank in range(self.size)]
        self._store.set(answers[self.rank], json.dumps(state))
        if not self._is_reporter(number, answers):
            return None
        silent, until = set(range(self.size)), time.monotonic() + ANSWER_SECONDS
        while silent and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            silent -= {rank for rank in silent if self._has(answers[rank]) or self._has(f"ended/{rank}")}
        return [self._state_of(rank, answers[rank], rank in silent) for rank in range(self.size)]

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _state_of(self, rank: int, answer: str, silent: bool) -> dict[str, Any]:
        process = f"process/{rank}"
        if silent:
            known = self._has(process)
            why = why_silent(*json.loads(self._store.get(process))) if known else "it has not started to train"
            return {"rank": rank, "silent": why}
        return json.loads(self._store.get(answer)) if self._has(answer) else {"rank": rank, "ended": True}

    def _is_reporter(self, number: int, answers: list[str]) -> bool:
        reporter, until = f"reporter/{number}", time.monotonic() + ANSWER_SECONDS
        while self.rank > 0 and time.monotonic() < until:
            if self._has(reporter):
                return False
            time.sleep(_POLL_SECONDS)
        # rank 0 does not answer; a rank between it and this one may
        if any(map(self._has, answers[: self.rank])):
            return False
        return self._store.compare_set(reporter, "", str(self.rank)) == str(self.rank).encode()


class SignalPipe:
    """A pipe that becomes readable when a signal arrives, also while the main thread waits in a collective.

    Python runs a signal handler only between two instructions of the main thread. ``faulthandler`` runs in C at once and writes
    a traceback to the pipe.

    Attributes:
        problem: reason why the signal is not handled; None if it is.
    """

    def __init__(self, name: str) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        os.set_blocking(self._writes, False)
        number = signal.Signals[name]
        self.problem = self._register(number)
        self._signal = number if self.problem is None else None

    def _register(self, number: int) -> str | None:
        if signal.getsignal(number) != signal.SIG_DFL or _is_caught(number):
            return "it already has a handler, which stays"
        try:
            faulthandler.register(number, self._writes, all_threads=False)
        except (OSError, RuntimeError) as error:
            return f"it cannot be handled ({error})"
        return None

    def wait(self, seconds: float) -> bool:
        """Wait until the pipe is readable, at most ``seconds``; return True if the signal has arrived."""
        poll = select.poll()  # select() refuses file descriptors above 1023, which a run on many ranks has
        poll.register(self._reads, select.POLLIN)
        poll.poll(seconds * 1000)
        arrived = self.empty()
        if arrived:
            time.sleep(_POLL_SECONDS)  # a traceback is written in several pieces
            self.empty()
        return arrived

    def empty(self) -> bool:
        """Empty the pipe; return True if the signal has arrived."""
        content = b""
        with suppress(BlockingIOError):
            content = os.read(self._reads, 2**16)  # its capacity
        return content.strip(b"\0") != b""

    def wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes it anyway
            os.write(self._writes, b"\0")

    def release(self) -> None:
        if self._signal is not None:
            number, self._signal = self._signal, None
            later = signal.getsignal(number)
            faulthandler.unregister(number)
            if later != signal.SIG_DFL:  # other code has set a handler meanwhile, which unregister() has removed
                signal.signal(number, later)

    def close(self) -> None:
        """Close the pipe. No thread may wait for it any more."""
        os.close(self._reads)
        os.close(self._writes)


def _is_caught(number: int) -> bool:
    """Return True if the kernel knows a handler, also one that Python does not know, such as that of ``faulthandler``."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
