"""Notices of the ranks beside training, through their store: which is to stop, which has failed, where each is."""

from __future__ import annotations

import json
import sys
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

import torch.distributed as dist

from lightning_freescale._runtime.code_place import place_in_code
from lightning_freescale._runtime.worker import start_daemon

Point = tuple[int, int]
"""A place in a run where it can stop; all ranks come through the same points in the same order."""
POLL_SECONDS = 1.0
"""How often a rank looks for notices of the others: one small message to the store."""
ANSWER_SECONDS = 3.0
"""How long a rank that asks the others, or the store, waits for answers."""
_AGREE_SECONDS = 0.05
_TELL_SECONDS = 1.0
_NEVER: Point = (2**62, 0)
_OF_A_COLLECTIVE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket Timeout"),
    *("Application timeout caused pair closure", "gloo/transport", "NCCL", "ncclUnhandled", "has closed its connections"),
)
_RUNS = count()  # every rank has as many


class RankNotices:
    """A thread that asks the store for notices, on a connection of its own, and answers for this rank.

    The main thread never asks the store itself, and waits for the thread for seconds at most: the process that holds the store
    may be frozen. Create it on all ranks alike, on the main thread, and :meth:`close` it. ``timeout`` is how long a rank waits
    at a point for the others to agree where to stop.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout.total_seconds()
        self._store = dist.PrefixStore(f"freescale notices/{next(_RUNS)}", store.clone())
        self._main = threading.get_ident()
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._stop_requested = self._answered = self._alarmed = self._failed = self._lost = False
        self._failure = ""  # which rank has failed first, and why
        self._wish = ""  # why this rank wants all to stop
        self._lock = threading.Lock()
        self._reached: Point = (-1, 0)
        self._stopping = False  # from now on the main thread passes no point until all ranks agree where to stop
        self._last: Point = _NEVER  # the last point that a rank has passed; all stop at the next
        self.why = ""  # all stop, once they have agreed to
        self._agreed = threading.Event()
        self._thread: threading.Thread | None = start_daemon(self._work, "freescale notices")

    def close(self) -> None:
        """Let the others know that this rank comes to no further point, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(self._leave)
            self._jobs.put(None)
            thread.join(ANSWER_SECONDS)  # it may wait for a store that does not answer, in vain

    # -- to stop together

    def request_stop(self, why: str) -> None:
        """Have all ranks stop at the next point that none has passed, for the first reason that any of them gives.

        May be called in a signal handler.
        """
        self._wish, self._stop_requested = self._wish or why, True
        self._jobs.put(self._look)  # the one queue whose put may interrupt itself

    def stops_at(self, point: Point) -> bool:
        """Pass a point, which is greater than those before; return whether all ranks stop there instead.

        The thread says for this rank how far it is, so a rank that others wait for in a collective goes on to the point that
        the most advanced rank is at, and no further.
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

    # -- to say why

    def tell_or_explain(self, error: BaseException) -> None:
        """Let the other ranks know that this one fails; if a collective has failed, add the cause on another rank to the error.

        The first error counts. It takes seconds at most, and raises nothing.
        """
        if self._failed:
            return
        self._failed = True
        if _is_of_a_collective(error):
            text = " ".join(str(argument) for argument in error.args)
            error.args = (f"{text}\n{self._explain(place_in_code(traceback.extract_tb(error.__traceback__)))}",)
            return
        text = f"rank {self.rank} has failed first: {type(error).__name__}: {error}".strip(": ")
        with suppress(NotInTime, RuntimeError):
            self._ask(partial(self._publish, text, self.size), 2 * ANSWER_SECONDS)

    def _explain(self, place: str) -> str:
        """Return which rank was the cause and why; if that is not known, which are silent, and where the others are."""
        held = "the ranks' store, which is in rank 0 unless the launcher holds it,"
        try:
            return str(self._ask(partial(self._inquire, place), 3 * ANSWER_SECONDS))
        except NotInTime:
            return self._failure or f"{held} does not answer: its process is frozen"
        except RuntimeError:
            return self._failure or f"{held} is gone: its process has ended"

    def _inquire(self, place: str) -> str:
        self._answer(place)
        self._store.set("report", "1")
        self._store.set("alarm", "1")
        silent, began = set(range(self.size)), time.monotonic()
        # one that fails may have closed its connections before it says why
        while time.monotonic() - began < (ANSWER_SECONDS if silent else _TELL_SECONDS):
            self._hear_failure()
            if self._failure:
                self._wait_until_heard()
                return self._failure
            silent = {rank for rank in silent if not self._store.check([f"here/{rank}"])}
            time.sleep(_AGREE_SECONDS)
        gone = [f"rank {rank} does not answer: its process has ended, or is frozen" for rank in sorted(silent)]
        answered = [rank for rank in range(self.size) if rank not in silent]
        places = [f"rank {rank} in {self._store.get(f'here/{rank}').decode()}" for rank in answered]
        return self._publish("; ".join([*gone, f"where the ranks stand: {', '.join(places)}"]), len(answered))

    def _publish(self, failure: str, ranks: int) -> str:
        """Publish a failure unless another rank has, for so many ranks, this one included; return the first one."""
        self._store.set("hearers", str(ranks))
        self._store.compare_set("failure", "", failure)
        self._store.set("alarm", "1")
        self._hear_failure()
        self._wait_until_heard()
        return self._failure

    def _wait_until_heard(self) -> None:
        """Wait on rank 0, with whose process the store may end, until the other ranks know why the run fails."""
        if self.rank != 0:
            return
        began, ranks = time.monotonic(), int(self._store.get("hearers"))
        while self._store.add("heard", 0) < ranks and time.monotonic() - began < ANSWER_SECONDS:
            time.sleep(_AGREE_SECONDS)

    def _hear_failure(self) -> None:
        if not self._failure and self._store.check(["failure"]):
            self._failure = self._store.get("failure").decode()
            self._store.add("heard", 1)
            self._agreed.set()  # who waits for all ranks to agree would wait for one that does not come

    def _answer(self, place: str) -> None:
        self._answered = True
        self._store.set(f"here/{self.rank}", place)

    # -- the thread

    def _ask(self, call: Callable[[], Any], seconds: float) -> Any:
        if self._thread is None:
            raise RuntimeError("notices are closed")
        answer: Future[Any] = Future()
        self._jobs.put(partial(_resolve, answer, call))
        return answer.result(seconds)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_AGREE_SECONDS if self._stopping and not self._agreed.is_set() else POLL_SECONDS)
            except Empty:
                job = self._look
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
        self._hear_failure()
        if not self._answered and self._store.check(["report"]):
            frame = sys._current_frames().get(self._main)
            self._answer(place_in_code(traceback.extract_stack(frame)))


def notices_of_ranks(timeout: timedelta | None) -> RankNotices | None:
    """Return the notices of the default group's ranks; None for a single one. Every rank is to call this as often."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return RankNotices(store, dist.get_rank(), dist.get_world_size(), timeout or dist.default_pg_timeout)


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that of a collective whose other ranks are gone or late."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_A_COLLECTIVE)
        ):
            return True
        error = error.__cause__
    return False


def _resolve(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
