"""The notices of ranks that stop or fail to the other ranks.

The ranks exchange notices through their store, beside training: which rank wants to stop, which has failed, and where each is.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
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
from lightning_freescale._runtime.error_text import error_text, sendable
from lightning_freescale._runtime.worker import start_daemon
from lightning_freescale.comm.transports.p2p import HAS_FAILED, GlooP2P, resolve

Point = tuple[int, int]
"""A place in a run where it can stop. All ranks pass the same points in the same order."""
POLL_SECONDS = 1.0
"""The interval at which a rank reads the notices of the others: one small message to the store."""
ANSWER_SECONDS = 3.0
"""The longest time for which a rank waits for answers of the other ranks or of the store."""
_AGREE_SECONDS = 0.05
_TELL_SECONDS = 1.0
_BLOCKED_SECONDS = 0.25
_FOREVER = timedelta(days=3650)
_FAREWELL = 0  # the tag
_NEVER: Point = (2**62, 0)
_OF_A_COLLECTIVE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket Timeout"),
    *("Application timeout caused pair closure", "gloo/transport", "NCCL", "ncclUnhandled", "has closed its connections"),
)
_RUNS = count()  # all ranks count the same runs


class RankNotices:
    """A thread that reads and writes notices in the store over a separate connection.

    The main thread waits for the thread, which uses the store, for a few seconds at most: the process that holds the store may
    be frozen. Create an object on the main thread of every rank, and :meth:`close` it. ``timeout`` is how long a rank
    waits at a point for the others to agree where to stop.

    A second thread waits for the farewell of the next rank. Without one, the end of the connection is the end of that process,
    which the thread reports. If another rank has failed while the main thread is in a call of torch.distributed that does not
    return, the notices close the other connections of this process to the store: a new process group would wait there for all
    ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self._process = rank, size, os.getpid()
        self._timeout = timeout.total_seconds()
        others = {connection.getsockname() for connection in _connections(store)}
        self._shared_store = store
        self._store = dist.PrefixStore(f"freescale notices/{next(_RUNS)}", store.clone())
        self._own = {connection.getsockname() for connection in _connections(store)} - others
        self._ring = GlooP2P(self._store, rank, size, timeout, list(range(size)))
        self._main = threading.get_ident()
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._stop_requested = self._answered = self._alarmed = self._failed = self._lost = self._hung_up = False
        self._silent = False  # whether the store did not answer
        self._pause = (0.0, 0.0)  # the last time for which this process did not run, in seconds, and when it ended
        self._main_at: Any = None  # the place of the main thread at the last look after another rank failed
        self._failure = ""  # the rank that failed first, and why
        self._wish = ""  # why this rank wants all ranks to stop
        self._lock = threading.Lock()
        self._reached: Point = (-1, 0)
        self._stopping = False  # if True, the main thread passes no point until all ranks agree where to stop
        self._last: Point = _NEVER  # the last point that any rank has passed; all ranks stop at the next one
        self.why = ""  # why all ranks stop, once they have agreed
        self._agreed = threading.Event()
        self._thread: threading.Thread | None = start_daemon(self._work, "freescale notices")
        self._watch = start_daemon(self._watch_next, "freescale watch")
        HAS_FAILED.append(self._has_failed)
        atexit.register(self._exit)  # a thread that waits for a peer while the interpreter exits would crash it

    def close(self) -> None:
        """Notify the other ranks that this rank passes no further point and may end, and end the threads."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(self._leave)
            self._jobs.put(None)
            thread.join(0.0 if self._silent else ANSWER_SECONDS)  # a store that does not answer blocks the thread
            if not (self._silent or self._lost):
                with suppress(RuntimeError):
                    previous = (self.rank - 1) % self.size
                    self._ring.send(torch.empty(1), previous, _FAREWELL).wait(timedelta(seconds=_TELL_SECONDS))
            self._hang_up()

    def _exit(self) -> None:
        """Close at the end of a program that does not, or if it has failed, end without a farewell."""
        if os.getpid() != self._process:  # a forked process
            return
        if not self._failed:
            self._jobs.put(partial(self._store.set, f"exited/{self.rank}", ""))
            self.close()
            return
        self._hang_up()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_TELL_SECONDS)

    def _hang_up(self) -> None:
        atexit.unregister(self._exit)
        if not self._hung_up:
            HAS_FAILED.remove(self._has_failed)
        self._hung_up = True
        if self._watch.is_alive():  # not in a forked process
            self._ring.close_connections()
            self._watch.join(_TELL_SECONDS)

    # -- stop together

    def request_stop(self, why: str) -> None:
        """Make all ranks stop at the next point that no rank has passed. The first reason of any rank counts.

        A signal handler may call this method.
        """
        self._wish, self._stop_requested = self._wish or why, True
        self._jobs.put(self._look)  # SimpleQueue.put is reentrant, unlike that of Queue

    def stops_at(self, point: Point) -> bool:
        """Pass a point, which is greater than all before, or return True if all ranks stop there.

        The thread publishes the position of this rank. A rank on which others wait in a collective continues to the point of
        the most advanced rank, and no further.
        """
        with self._lock:
            if not (self._stopping or self._stop_requested):
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
        if self._failed or self._hung_up:
            return ""
        self._failed, during = True, getattr(error, "during", "")
        if _is_of_a_collective(error):
            text = " ".join(str(argument) for argument in error.args)
            cause = self._explain(place_in_code(traceback.extract_tb(error.__traceback__)))
            error.args = (f"{text}\n{cause}{during and f' (rank {self.rank} noticed it{during})'}",)
            return cause
        text = f"rank {self.rank} has failed first{during}: {error_text(error)}"
        with suppress(NotInTime, RuntimeError):
            self._ask(partial(self._publish, text, self.size), 2 * ANSWER_SECONDS)
        return ""

    def _explain(self, place: str) -> str:
        """Return the rank that failed first and its error, or the silent ranks and the locations of the others."""
        held = "the ranks' store, which is in rank 0 unless the launcher holds it,"
        try:
            self._ask(partial(self._answer, place), ANSWER_SECONDS)
            return str(self._ask(partial(self._inquire, place), 3 * ANSWER_SECONDS))
        except NotInTime:
            self._silent = True
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

    def _publish(self, failure: str, readers: int) -> str:
        """Publish a failure unless another rank has published one, and return the first one.

        ``readers`` is the number of ranks that read it, this one included.
        """
        self._announce(failure, readers)
        self._read_failure()
        self._wait_until_read()
        return self._failure

    def _announce(self, failure: str, readers: int) -> None:
        self._store.compare_set("failure", "", json.dumps([failure, readers]))
        self._store.set("alarm", "1")

    def _wait_until_read(self) -> None:
        if self.rank != 0:  # the store may end with the process of rank 0
            return
        began, ranks = time.monotonic(), json.loads(self._store.get("failure"))[1]
        while self._store.add("heard", 0) < ranks and time.monotonic() - began < ANSWER_SECONDS:
            time.sleep(_AGREE_SECONDS)

    def _read_failure(self) -> None:
        if not self._failure and self._store.check(["failure"]):
            self._failure = json.loads(self._store.get("failure"))[0]
            self._store.add("heard", 1)
            self._agreed.set()  # a failed rank never agrees where to stop

    def _answer(self, place: str) -> None:
        self._answered = True
        self._store.set(f"here/{self.rank}", sendable(place))

    # -- the end of a process

    def _watch_next(self) -> None:
        following = (self.rank + 1) % self.size
        try:
            self._ring.receive(torch.empty(1), following, _FAREWELL).wait(_FOREVER)
        except RuntimeError:
            if not self._hung_up:
                with suppress(RuntimeError):  # the store has ended with that process
                    self._announce(f"rank {following} has ended: it was killed, or exited without an error", self.size - 1)
                self._jobs.put(self._look)

    def _has_failed(self) -> bool:
        return not self._failed and (self._failure != "" or self._lost)

    def _end_wait(self) -> None:
        """End a wait of the main thread in the store, if it has not left torch.distributed since the last call."""
        frame = sys._current_frames().get(self._main)
        inside = frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed.")
        place = (id(frame), frame.f_lasti) if frame is not None and inside else None
        if place is not None and place == self._main_at:
            for connection in _connections(self._shared_store):
                if connection.getsockname() not in self._own:
                    with suppress(OSError):  # it has ended meanwhile
                        connection.shutdown(socket.SHUT_RDWR)
        self._main_at = place

    # -- the thread

    def _ask(self, call: Callable[[], Any], seconds: float) -> Any:
        if self._thread is None:
            raise RuntimeError("notices are closed")
        answer: Future[Any] = Future()
        self._jobs.put(partial(resolve, answer, call))
        return answer.result(seconds)

    def _work(self) -> None:
        while True:
            began, agrees = time.monotonic(), self._stopping and not self._agreed.is_set()
            wait = _AGREE_SECONDS if agrees else _BLOCKED_SECONDS if self._failure and not self._failed else POLL_SECONDS
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

    def _look(self) -> None:
        if self._lost:
            return
        self._alarmed = self._alarmed or self._stop_requested or self._store.check(["alarm"])
        if not self._alarmed:
            return
        if not self._agreed.is_set() and (self._stop_requested or self._stopping or self._store.check(["stop"])):
            self._agree()
        self._read_failure()
        if self._failure and not self._failed:
            self._end_wait()
        if not self._answered and self._store.check(["report"]):
            frame = sys._current_frames().get(self._main)
            self._answer(place_in_code(traceback.extract_stack(frame)))


def notices_of_ranks(timeout: timedelta | None) -> RankNotices | None:
    """Return the notices of the default group's ranks; None for a single rank. Every rank must make the same calls."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    barrier = partial(dist.barrier, device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    barrier()  # gloo, while it connects, does not notice that a rank has ended
    store = dist.distributed_c10d._get_default_store()
    notices = RankNotices(store, dist.get_rank(), dist.get_world_size(), timeout or dist.default_pg_timeout)
    try:
        barrier()  # no rank can fail before all can learn why
    except RuntimeError as error:
        notices.tell_or_explain(error)
        notices.close()
        raise
    return notices


def _connections(store: dist.Store) -> Iterator[socket.socket]:
    """Yield the connections of this process to the store. torch has no other way to end a wait in the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or not os.path.isdir("/dev/fd"):
        return
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # of other files, and of sockets without a connection
            blocking = os.get_blocking(int(name))
            connection = socket.socket(fileno=int(name))
            os.set_blocking(int(name), blocking)  # socket.setdefaulttimeout makes new sockets non-blocking
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == store.port:
                    yield connection
            finally:
                connection.detach()


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, is that of a collective with another rank that ended or is late."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(words in error_text(error) for words in _OF_A_COLLECTIVE)
        ):
            return True
        error = error.__cause__
    return False
