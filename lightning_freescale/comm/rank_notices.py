"""The notices of ranks that stop or fail to the other ranks.

The ranks exchange notices through their store, beside training: which rank wants to stop, which has failed, and where each is.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._runtime.code_place import place_in_code
from lightning_freescale._runtime.error_text import error_text, sendable, whole_text
from lightning_freescale._runtime.worker import resolve, start_daemon
from lightning_freescale.comm.transports.p2p import GlooP2P
from lightning_freescale.comm.waits import WAITING, MainThread

Point = tuple[int, int]
"""A place in a run where it can stop. All ranks pass the same points in the same order."""
POLL_SECONDS = 1.0
"""The interval at which a rank reads the notices of the others: one small message to the store."""
ANSWER_SECONDS = 3.0
"""The longest time for which a rank waits for answers of the other ranks or of the store."""
_AGREE_SECONDS = 0.05
_TELL_SECONDS = 1.0
_BLOCKED_SECONDS = 0.25
_NEVER: Point = (2**62, 0)
_FAREWELL = 0  # the tag
_FAREWELL_SECONDS = 1.0
_FOREVER = timedelta(days=3650)
_OF_A_COLLECTIVE = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout|gloo/transport|"
    "Application timeout caused pair closure|NCCL|ncclUnhandled|has closed its connections"
)
_RUNS = count()  # all ranks count the same runs


class RankNotices:
    """Notices to and from the other ranks, on two daemon threads.

    The first thread reads and writes the store over its own connection. The main thread waits for it for a few seconds at most,
    because the process that holds the store may be frozen. The second thread watches the process of the next rank.

    If another rank has failed while the main thread waits in torch.distributed, the first thread closes the other connections
    of this process to the store. Otherwise the creation of a process group would wait there for the failed rank.

    Create an object on the main thread of every rank, and :meth:`close` it. ``timeout`` is how long a rank waits at a point for
    the others to agree where to stop.

    Attributes:
        why: why all ranks stop, once they have agreed.
        failed_with: the type of the error of the rank that failed first; empty if there is none, or if it is unknown.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self._process = rank, size, os.getpid()
        self._timeout = timeout.total_seconds()
        self._main = MainThread(store, self._another_failed)
        self._store = dist.PrefixStore(f"freescale notices/{next(_RUNS)}", self._main.store)
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answered = self._alarmed = self._failed = False
        self._lost = False  # whether the store has ended with its process, or does not answer
        self._pause = (0.0, 0.0)  # length of this process's last pause, and when it ended, in seconds of the monotonic clock
        self._failure, self._readers, self.failed_with = "", 0, ""  # why the first rank failed, and how many ranks read it
        self._wish = ""  # why this rank wants all ranks to stop
        self._lock = threading.Lock()
        self._reached: Point = (-1, 0)
        self._stopping = False  # if True, the main thread passes no point until all ranks agree where to stop
        self._last: Point = _NEVER  # the last point that any rank has passed; all ranks stop at the next one
        self.why = ""
        self._agreed = threading.Event()
        self._next = NextRank(self._store, rank, size, timeout, self._report_end)
        self._thread: threading.Thread | None = start_daemon(self._work, "freescale notices")
        WAITING.append(self._main)
        atexit.register(self._exit)  # a thread that waits for a peer while the interpreter exits would crash it

    def close(self, *, farewell: bool = True) -> None:
        """Notify the other ranks that this rank passes no further point and may end, and end the threads.

        Without a farewell, the previous rank reports the end of this process.
        """
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:  # closed already, or a forked process
            return
        self._jobs.put(self._leave)
        self._jobs.put(None)
        thread.join(_TELL_SECONDS if self._lost else ANSWER_SECONDS)  # a store that does not answer blocks the thread
        atexit.unregister(self._exit)
        WAITING.remove(self._main)
        self._next.close(farewell and not self._lost)

    def _exit(self) -> None:
        """Close at the end of a program that does not. A rank that has failed sends no farewell."""
        if not self._failed:
            self._jobs.put(partial(self._store.set, f"exited/{self.rank}", ""))  # a forked process has no thread that runs it
        self.close(farewell=not self._failed)

    # -- stop together

    def request_stop(self, why: str) -> None:
        """Make all ranks stop at the next point that no rank has passed. The first reason of any rank counts.

        A signal handler may call this method.
        """
        self._wish = self._wish or why
        self._jobs.put(self._look)  # SimpleQueue.put is reentrant, unlike that of Queue

    def stops_at(self, point: Point) -> bool:
        """Pass a point, which is greater than all before, or return True if all ranks stop there.

        The thread publishes the position of this rank. A rank on which others wait in a collective continues to the point of
        the most advanced rank, and no further.
        """
        with self._lock:
            if not (self._stopping or self._wish):
                self._reached = point
                return False
        return self._agreed.wait(self._timeout) and point > self._last

    def look(self) -> None:
        """Exchange notices with the store now, without waiting for the next poll."""
        with suppress(NotInTime, RuntimeError):
            self._ask(self._look, _TELL_SECONDS)

    def _agree(self) -> None:
        with self._lock:
            first, self._stopping = not self._stopping, True
        if first:
            self._store.compare_set("stop", "", self._wish)
            self._store.set("alarm", "1")
            self._store.set(f"at/{self.rank}", json.dumps(self._reached))
        keys = [f"at/{rank}" for rank in range(self.size)]
        if self.rank == 0 and self._store.check(keys):
            last = max(tuple(json.loads(at)) for at in self._store.multi_get(keys))
            self._store.compare_set("last", "", json.dumps([*last, self._store.get("stop").decode()]))
        if self._store.check(["last"]):
            step, batch, *why = json.loads(self._store.get("last"))
            self._last, self.why = (step, batch), "".join(why)
            self._agreed.set()

    def _leave(self) -> None:
        if not self._stopping:
            self._store.set(f"at/{self.rank}", json.dumps(_NEVER))
        if self.rank == 0:  # no other rank decides
            self._store.compare_set("last", "", json.dumps(_NEVER))

    # -- report failures

    def tell_or_explain(self, error: BaseException) -> str:
        """Report the error of this rank to the others. If a collective failed, add the cause on another rank to the error.

        Return the added cause. Only the first error counts. The call takes a few seconds at most and raises nothing. An
        attribute ``during`` of the error says what the rank was doing.
        """
        if self._failed or self._thread is None:
            return ""
        self._failed, during = True, getattr(error, "during", "")
        if _is_of_a_collective(error):
            text = " ".join(str(argument) for argument in error.args)
            cause = self._explain(place_in_code(traceback.extract_tb(error.__traceback__)))
            error.args = (f"{text}\n{cause}{during and f' (rank {self.rank} noticed it{during})'}",)
            return cause
        text = f"rank {self.rank} has failed first{during}: {error_text(error)}"
        with suppress(NotInTime, RuntimeError):
            self._ask(partial(self._publish, text, self.size, type(error).__name__), 2 * ANSWER_SECONDS)
        return ""

    def _explain(self, place: str) -> str:
        """Return the rank that failed first and its error, or the silent ranks and the locations of the others."""
        held = "the ranks' store, which is in rank 0 unless the launcher holds it,"
        try:
            self._ask(partial(self._answer, place), ANSWER_SECONDS)
            return str(self._ask(partial(self._inquire, place), 3 * ANSWER_SECONDS))
        except NotInTime:
            self._lost = True
            return self._failure or f"{held} does not answer: its process is frozen"
        except RuntimeError:
            return self._failure or self._own_pause() or f"{held} does not exist any more: its process has ended"

    def _own_pause(self) -> str:
        seconds, ended = self._pause
        if time.monotonic() - ended > 3 * ANSWER_SECONDS:
            return ""
        return f"rank {self.rank}, this one, did not run for {seconds:.0f} s: it was frozen, and the other ranks have ended"

    def _inquire(self, place: str) -> str:
        self._store.set("report", "1")
        self._store.set("alarm", "1")
        silent, began = set(range(self.size)), time.monotonic()
        # a rank that fails may have closed its connections before it publishes why
        while time.monotonic() - began < (ANSWER_SECONDS if silent else _TELL_SECONDS):
            self._read_failure()
            if self._failure:
                self._wait_until_read()
                return self._failure
            silent = {rank for rank in silent if not self._store.check([f"here/{rank}"])}
            time.sleep(_AGREE_SECONDS)
        if silent and (pause := self._own_pause()):
            return self._publish(pause, self.size - len(silent))
        ended = {rank for rank in silent if self._store.check([f"exited/{rank}"])}
        missing = [
            f"rank {rank} " + ("has ended" if rank in ended else "does not answer: its process is frozen, or unreachable")
            for rank in sorted(silent)
        ]
        answered = [rank for rank in range(self.size) if rank not in silent]
        places = [f"rank {rank} in {self._store.get(f'here/{rank}').decode()}" for rank in answered]
        return self._publish("; ".join([*missing, f"locations of the ranks: {', '.join(places)}"]), len(answered))

    def _publish(self, failure: str, readers: int, kind: str = "") -> str:
        """Publish a failure unless another rank has published one, and return the first one.

        ``readers`` is the number of ranks that read it, this one included. ``kind`` is the type of the error, if there is one.
        """
        self._announce(failure, readers, kind)
        self._read_failure()
        self._wait_until_read()
        return self._failure

    def _announce(self, failure: str, readers: int, kind: str = "") -> None:
        self._store.compare_set("failure", "", json.dumps([kind, readers, failure]))
        self._store.set("alarm", "1")

    def _wait_until_read(self) -> None:
        if self.rank != 0:  # the store may end with the process of rank 0
            return
        began = time.monotonic()
        while self._store.add("heard", 0) < self._readers and time.monotonic() - began < ANSWER_SECONDS:
            time.sleep(_AGREE_SECONDS)

    def _read_failure(self) -> None:
        if not self._failure and self._store.check(["failure"]):
            self.failed_with, self._readers, self._failure = json.loads(self._store.get("failure"))
            self._store.add("heard", 1)
            self._agreed.set()  # a failed rank never agrees where to stop

    def _answer(self, place: str) -> None:
        self._answered = True
        self._store.set(f"here/{self.rank}", sendable(place))

    def _report_end(self, rank: int) -> None:
        with suppress(RuntimeError):  # the store has ended with that process
            self._announce(f"rank {rank} has ended: it was killed, or exited without an error", self.size - 1)
        self._jobs.put(self._look)

    def _another_failed(self) -> bool:
        return not self._failed and bool(self._failure or self._lost)

    # -- the thread

    def _ask(self, call: Callable[[], Any], seconds: float) -> Any:
        if self._thread is None:
            raise RuntimeError("notices are closed")
        answer: Future[Any] = Future()
        self._jobs.put(partial(resolve, answer, call))
        return answer.result(seconds)

    def _work(self) -> None:
        while True:
            began, wait = time.monotonic(), self._interval()
            try:
                job = self._jobs.get(timeout=wait)
            except Empty:
                job = self._look
            if (late := time.monotonic() - began - wait) > ANSWER_SECONDS:
                self._pause = (late, time.monotonic())
            if job is None:
                return
            try:
                job()
            except RuntimeError:  # the store has ended with its process; other calls report that
                self._lost = True

    def _interval(self) -> float:
        if self._stopping and not self._agreed.is_set():
            return _AGREE_SECONDS
        return _BLOCKED_SECONDS if self._another_failed() else POLL_SECONDS

    def _look(self) -> None:
        if self._lost:
            return
        self._alarmed = self._alarmed or bool(self._wish) or self._store.check(["alarm"])
        if not self._alarmed:
            return
        if not self._agreed.is_set() and (self._wish or self._stopping or self._store.check(["stop"])):
            self._agree()
        self._read_failure()
        if self._another_failed():
            self._main.end_wait()
        if not self._answered and self._store.check(["report"]):
            self._answer(place_in_code(traceback.extract_stack(self._main.frame)))


class NextRank:
    """A thread that waits for the farewell of the next rank. The constructor is collective.

    If the connection ends without a farewell, that process has ended. The thread then calls ``on_end`` with the rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, on_end: Callable[[int], None]) -> None:
        self._ring = GlooP2P(store, rank, size, timeout, list(range(size)))
        self._previous, self._next = (rank - 1) % size, (rank + 1) % size
        self._is_closed = False
        self._thread = start_daemon(partial(self._watch, on_end), "freescale watch")

    def close(self, farewell: bool) -> None:
        """Send a farewell to the previous rank if wanted, and end the thread and the connections."""
        if farewell:
            with suppress(RuntimeError):
                work = self._ring.send(torch.empty(1), self._previous, _FAREWELL)
                work.wait(timedelta(seconds=_FAREWELL_SECONDS))
        self._is_closed = True
        self._ring.close_connections()
        self._thread.join(_FAREWELL_SECONDS)

    def _watch(self, on_end: Callable[[int], None]) -> None:
        try:
            self._ring.receive(torch.empty(1), self._next, _FAREWELL).wait(_FOREVER)
        except RuntimeError:
            if not self._is_closed:
                on_end(self._next)


def notices_of_ranks(timeout: timedelta | None) -> RankNotices | None:
    """Return the notices of the default group's ranks; None for a single rank. Every rank must make the same calls."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    barrier = partial(dist.barrier, device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    barrier()  # while gloo connects, it does not notice that a rank has ended: connect only when all ranks are here
    store = dist.distributed_c10d._get_default_store()
    notices = RankNotices(store, dist.get_rank(), dist.get_world_size(), timeout or dist.default_pg_timeout)
    try:
        barrier()  # no rank goes on, and can fail, before every rank receives notices
    except RuntimeError as error:
        notices.tell_or_explain(error)
        notices.close()
        raise
    return notices


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, is that of a collective with another rank that ended or is late."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and _OF_A_COLLECTIVE.search(whole_text(error))
        ):
            return True
        error = error.__cause__
    return False
