"""Report where all ranks stand when a run hangs, or when a signal asks, while the run goes on."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import Self

from lightning_freescale._runtime.worker import WorkerThread, start_daemon
from lightning_freescale.profiling.hang_report import RankObserver, hang_document, hang_text, why_silent
from lightning_freescale.profiling.recording.timeline import Timeline
from lightning_freescale.profiling.reporting.document import write_atomically

LOOK_SECONDS = 1.0
"""How often a rank looks whether the run hangs: a few numbers of its own, and one small message to the store."""
ANSWER_SECONDS = 3.0
"""How long a rank that reports waits for the others' answers, and all wait for their store."""
_ASK_EVERY = 0.05
_UNHANDLED = ("SIGKILL", "SIGSTOP")
_JOIN_SECONDS = 10.0
_STEPS, _LEAST_SECONDS = 20, 60.0
_FIRST_STEPS, _FIRST_SECONDS = 4, 600.0
_KEPT = 20
"""Reports that the file holds, the last ones."""
_RUNS = count()  # every rank has as many


class HangWatch(AbstractContextManager["HangWatch"]):
    """Reports where all ranks stand when no step ends any more, or when a signal asks, while training goes on.

    One rank prints a table to stderr, and writes ``hang.json``: in which exchange each rank stands, since when, and where in
    the code, who has not come to that exchange, which ranks do not answer. Ranks ask each other through the store that they met
    at, so none has to come to a collective. As long as no step ends the report is repeated, each time after twice as long.
    Nothing is added to a step: another thread looks every second.

    Enter it on all ranks, on the thread that trains.

    Args:
        timeline: that the run is recorded on, enabled.
        dirpath: where ``hang.json`` goes.
        hang_timeout: seconds in which no step ends. ``"auto"``: 20 times the median of the last 20 steps, and at least 60 s, so
            that a slow batch is no hang, and the report comes before collectives time out; 600 s before the fourth step has
            ended, because first steps compile, and while a checkpoint is saved. None: only when asked.
        hang_signal: name of the signal by which any rank is asked for all; None for none. A handler that the process already
            has stays.

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
        _check_options(hang_timeout, hang_signal)
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
        self._observer = RankObserver(self._timeline, self._rank)
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
        """Note that the run goes on although no step ends, for example after a batch of validation."""
        self._beats += 1

    # -- on the watching thread

    def _watch(self) -> None:
        while True:
            asked = self._wakes.wait(LOOK_SECONDS)
            if self._closing:
                return
            self._observer.look()
            idle, why = self._idle_seconds(), None
            if asked:
                why = f"rank {self._rank} was asked by {self._signal}"
            elif idle >= self._patience_seconds():
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
        if self._timeout != "auto":
            return math.inf if self._timeout is None else self._timeout
        ends = [end for _, end in list(self._timeline.ended)]
        if len(ends) < _FIRST_STEPS or self._is_paused():
            return _FIRST_SECONDS
        return max(_LEAST_SECONDS, _STEPS * median(end - start for start, end in zip(ends, ends[1:])))

    def _is_paused(self) -> bool:
        """Whether this rank saves a checkpoint, validates or logs, which may take any time."""
        record, _ = self._timeline.position()
        return record is not None and any(span.kind == "pause" and span.end is None for span in list(record.spans))

    def _report(self, why: str | None, idle: float) -> None:
        """Answer a rank that calls, or call all for a reason of one's own; report what they say, if it is this rank's turn."""
        ranks: list[dict[str, Any]] | None = None
        try:
            why = why if self._calls is None else self._calls.heed(why)
            if why is None:
                return
            standing = self._observer.standing()  # before the answers, which take seconds
            ranks = [standing] if self._calls is None else self._calls.answer(standing)
        except StoreSilent as silent:
            if why is None:  # this rank does not know whether the run hangs
                return
            ranks = [{"rank": rank, "silent": f"the ranks' store, in rank 0 or its launcher, {silent}"} for rank in self._ranks]
            ranks[self._rank] = self._observer.standing()
        self._wakes.forget()  # a signal to several ranks asks once
        patience = self._patience_seconds()
        if idle > patience / 2:  # this rank hangs, too: it is not to call by itself in a moment
            patience = self._patience = 2 * max(idle, patience)
        if ranks is not None and not self._closing:
            self._print_and_write(hang_document(why, ranks, patience if math.isfinite(patience) else None))

    def _print_and_write(self, document: dict[str, Any]) -> None:
        self._reports.append(document)
        print("", hang_text(document), sep="\n", file=sys.stderr, flush=True)  # below a progress bar
        written = {"format": "lightning_freescale hangs", "version": 1, "reports": list(self._reports)}
        try:
            self.file = write_atomically(self._dirpath / "hang.json", [json.dumps(written, indent=1), "\n"])
        except OSError as error:
            print(f"BubbleProfiler: hang.json could not be written to {self._dirpath}: {error}", file=sys.stderr, flush=True)


def _check_options(hang_timeout: object, hang_signal: object) -> None:
    is_number = isinstance(hang_timeout, (int, float)) and not isinstance(hang_timeout, bool)
    if hang_timeout is not None and hang_timeout != "auto" and not (is_number and hang_timeout > 0):  # type: ignore[operator]
        raise ValueError(f"hang_timeout={hang_timeout!r}: pass seconds above 0, 'auto', or None to be told only by hang_signal")
    if hang_signal is not None and not (isinstance(hang_signal, str) and hang_signal in signal.Signals.__members__):
        raise ValueError(f"hang_signal={hang_signal!r}: pass the name of a signal, such as 'SIGUSR2', or None for none")
    if hang_signal in _UNHANDLED:
        raise ValueError(f"hang_signal={hang_signal!r}: no process can handle it, pass another one, such as 'SIGUSR2'")


class StoreSilent(RuntimeError):  # noqa: N818 (says what happened)
    """The store has not answered in time, or is gone."""


class RankCalls:
    """Lets a rank ask all others where they stand. No collective: ranks may be gone, or wait in one.

    The store is asked on a thread of its own, with a connection of its own: the process that holds it may be frozen, and torch
    waits for such a store without end.

    Args:
        store: where the ranks met.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = dist.PrefixStore(f"freescale hangs/{next(_RUNS)}", store.clone())
        self._asker = WorkerThread("freescale-hang store")
        here = json.dumps([socket.gethostname(), os.getpid()])
        self._asked: Any = self._asker.submit(self._store.set, f"process/{rank}", here)
        self._number, self._given_up = 0, False

    def heed(self, why: str | None) -> str | None:
        """Return why a rank calls all, if one does that this rank has not answered; call them if it has a reason itself.

        Raises:
            StoreSilent: no rank can be called.
        """
        call = f"call/{self._number}"
        if why is not None:
            return self._ask(lambda: str(self._store.compare_set(call, "", why).decode()))
        return self._ask(lambda: str(self._store.get(call).decode()) if self._store.check([call]) else None)

    def answer(self, standing: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Say where this rank stands; return where all do, by rank, on the one that is to report it, None on the others.

        A rank that does not answer has ``silent``, which says why, and one whose training has ended ``ended``. Rank 0 is the
        one that reports, or the lowest of those that answer.

        Raises:
            StoreSilent: no rank can be called.
        """
        number, self._number = self._number, self._number + 1
        return self._ask(lambda: self._answer(number, standing), 2 * ANSWER_SECONDS)

    def close(self) -> None:
        """Let the others know that this rank's training has ended, and end the thread."""
        try:
            self._ask(lambda: self._store.set(f"ended/{self.rank}", ""))
        except StoreSilent:
            if not self._asked.done():
                return  # the thread waits for a store that does not answer, in vain
        self._asker.stop(ANSWER_SECONDS)

    def _ask(self, question: Callable[[], Any], seconds: float = 0.0) -> Any:
        frozen = "does not answer: its process is frozen"
        if self._given_up and not self._asked.done():
            raise StoreSilent(frozen)
        self._asked = self._asker.submit(question)
        try:
            return self._asked.result(seconds + ANSWER_SECONDS)
        except NotInTime:
            self._given_up = True
            raise StoreSilent(frozen) from None
        except RuntimeError as error:
            raise StoreSilent("is gone: its process has ended") from error

    def _answer(self, number: int, standing: dict[str, Any]) -> list[dict[str, Any]] | None:
        answers = [f"stands/{number}/{rank}" for rank in range(self.size)]
        self._store.set(answers[self.rank], json.dumps(standing))
        if not self._reports(number, answers):
            return None
        silent, until = set(range(self.size)), time.monotonic() + ANSWER_SECONDS
        while silent and time.monotonic() < until:
            time.sleep(_ASK_EVERY)
            keys = {rank: (answers[rank], f"ended/{rank}") for rank in silent}
            silent = {rank for rank, either in keys.items() if not any(self._store.check([key]) for key in either)}
        return [self._found(rank, answers[rank], rank in silent) for rank in range(self.size)]

    def _found(self, rank: int, answer: str, silent: bool) -> dict[str, Any]:
        process = f"process/{rank}"
        if silent:
            known = self._store.check([process])
            why = why_silent(*json.loads(self._store.get(process))) if known else "it has not begun to train"
            return {"rank": rank, "silent": why}
        return json.loads(self._store.get(answer)) if self._store.check([answer]) else {"rank": rank, "ended": True}

    def _reports(self, number: int, answers: list[str]) -> bool:
        reporter, until = f"reporter/{number}", time.monotonic() + ANSWER_SECONDS
        while self.rank > 0 and time.monotonic() < until:
            if self._store.check([reporter]):
                return False
            time.sleep(_ASK_EVERY)
        # rank 0 does not answer; a lower rank than this one may
        if any(self._store.check([answer]) for answer in answers[: self.rank]):
            return False
        return self._store.compare_set(reporter, "", str(self.rank)) == str(self.rank).encode()


class WakeUp:
    """A pipe that a signal writes to, also while the main thread runs code that is not Python. Create it on the main thread.

    Python runs a handler on the main thread between two of its instructions, so never while that thread waits in a collective.
    It writes to the wake-up descriptor at once. There is one such descriptor per process, as there is one handler per signal:
    those that are taken stay.

    Args:
        name: of the signal; None for none.

    Attributes:
        problem: why the signal wakes nothing; None if it does.
    """

    def __init__(self, name: str | None) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        os.set_blocking(self._writes, False)
        self._signal = None if name is None else getattr(signal, name)
        self.problem = None if self._signal is None else self._take(self._signal)
        self._taken = self._signal is not None and self.problem is None

    def wait(self, seconds: float) -> bool:
        """Wait to be woken, at most so long; return whether the signal did."""
        poll = select.poll()  # select() refuses descriptors from 1024 on, which a run on many ranks has
        poll.register(self._reads, select.POLLIN)
        poll.poll(seconds * 1000)
        return self.forget()

    def forget(self) -> bool:
        """Forget what has come until now; return whether the signal has."""
        came = b""
        with suppress(BlockingIOError):
            came = os.read(self._reads, 4096)
        return self._signal is not None and self._signal in came

    def wake(self) -> None:
        """Wake the thread that waits."""
        with suppress(BlockingIOError):  # full, so it is about to wake
            os.write(self._writes, b"\0")

    def release(self) -> None:
        """Stop listening to the signal."""
        if not self._taken or self._signal is None:
            return
        self._taken = False
        if signal.getsignal(self._signal) is _nothing:
            signal.signal(self._signal, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current != self._writes:  # other code has taken it over meanwhile
            signal.set_wakeup_fd(current)

    def close(self) -> None:
        """Close the pipe, when no thread waits any more."""
        os.close(self._reads)
        os.close(self._writes)

    def _take(self, number: int) -> str | None:
        if threading.current_thread() is not threading.main_thread():
            return "signals can be handled on the main thread alone, and training runs on another"
        if signal.getsignal(number) != signal.SIG_DFL or _is_caught(number):
            return "it has a handler already, which stays"
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return "other code, such as asyncio, has this process's wake-up descriptor for signals"
        try:
            signal.signal(number, _nothing)
        except OSError as error:  # the kernel or the C library keeps some to itself
            signal.set_wakeup_fd(-1)
            return f"it cannot be handled ({error})"
        return None


def _is_caught(number: int) -> bool:
    """Whether the process has a handler that Python does not see, such as faulthandler's, as the kernel knows it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _nothing(number: int, frame: object) -> None:
    """Keep the signal from ending the process; the pipe holds it."""
