"""Messages between two ranks, over gloo's connections, with errors that name the peer."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.worker import start_daemon

ANSWER_SECONDS = 2.0
"""How long a store may take for an answer that it has."""
_FAILURE_KEY = "failure"
_UNUSED_TAG = 2**31 - 2
_MAY_KNOW_BETTER = timedelta(seconds=0.5)


class _Unprofiled:
    """Inside, torch's profiler records nothing of this thread.

    A Work ends its record when it completes. If the profiler's window has ended by then, as that of a receive posted ahead may
    have, the process ends.
    """

    def __enter__(self) -> None:
        torch._C._autograd._enable_record_function(False)

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._enable_record_function(True)


unprofiled = _Unprofiled()


class GlooP2P:
    """A gloo context of its own: TCP, or ibverbs where torch was built with it (``GLOO_DEVICE_TRANSPORT=IBVERBS``).

    Creating it is collective. Messages of one tag between two ranks arrive in the order they were sent; one is sent only once
    the peer has posted its receive, which must have its size.

    Args:
        store: that only the ranks of this group use.
        timeout: how long a peer may show no progress, by default.
        ranks: global rank of every rank in the group, for errors.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: list[int]) -> None:
        self.rank, self.size, self.ranks = rank, size, ranks
        self._store, self._store_is_silent = store, False
        self._ending = False
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("p2p", store), rank, size, timeout=timeout)
        self.peers = [(rank + shift) % size for shift in range(1, size)]
        """All other ranks, each rank's in another order, so that not all send to the same at once."""
        self.sources = [(rank - shift) % size for shift in range(1, size)]
        """All other ranks, in the order in which they send here."""

    def send(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send; keep the Work alive, dropping it cancels the transfer. Raises as :meth:`wait`."""
        try:
            return self.open().send([message], peer, tag)
        except RuntimeError as error:
            text = str(error)
        raise dist.DistBackendError(self.explain(text, peer))

    def receive(self, into: Tensor, peer: int, tag: int) -> dist.Work:
        """Post a receive for a message of just this size. Raises as :meth:`wait`."""
        try:
            with unprofiled:
                return self.open().recv([into], peer, tag)
        except RuntimeError as error:
            text = str(error)
        raise dist.DistBackendError(self.explain(text, peer))

    def wait(self, work: dist.Work, peer: int, timeout: timedelta) -> None:
        """Wait for a message to or from ``peer``.

        Raises:
            DistBackendError: the peer is gone, or shows no progress within the timeout. That it is gone is known at once, or,
                if a message was cut in the middle, after the timeout: gloo does not end the wait for such a message.
        """
        try:
            work.wait(timeout)
            return
        except RuntimeError as error:
            text = str(error)
        raise dist.DistBackendError(self.explain(text, peer, timeout))

    def abort(self, reason: str) -> None:
        """Leave the reason in the store and close the connections, so that no rank waits for this one."""
        if self._gloo is not None:
            failure = f"rank {self.ranks[self.rank]} has given up: {reason}"
            self._ask_store(lambda store: store.compare_set(_FAILURE_KEY, "", failure))
        self.close_connections()

    def refuse_more(self) -> None:
        """Let what has been posted arrive, and raise for all that comes after it."""
        self._ending = True

    def close_connections(self) -> None:
        """Close the connections; every wait here or at a peer raises."""
        gloo, self._gloo = self._gloo, None
        for peer in self.peers if gloo is not None else ():
            # Gloo's own abort does nothing, and dropping the group leaves the connections open as long as any Work lives. A
            # receive that times out closes all connections of its context.
            try:
                gloo.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def open(self) -> Any:
        """Return the group itself, whose calls are cheaper and name no peer; raise RuntimeError if it is closed."""
        if self._gloo is None or self._ending:
            raise RuntimeError("this rank has closed its connections")
        return self._gloo

    def explain(self, text: str, peer: int, timeout: timedelta = timedelta(0)) -> str:
        """Name the peer whose message failed with gloo's text; or the reason that the rank which gave up first has left."""
        if "Timed out" in text and not (text := self._why_closed_before(peer)):
            # the peer may wait in vain itself, and know for whom
            late = f"rank {self.ranks[peer]} did not come within the timeout of {timeout.total_seconds():g} s"
            return self.first_failure(_MAY_KNOW_BETTER) or late
        if known := self.first_failure():
            return known
        without_advice = text.splitlines()[0].split(". This is typically")[0]
        without_place = re.sub(r"^\[.*?\] ", "", without_advice)  # in gloo's source
        return f"rank {self.ranks[peer]} is gone: {without_place}"

    def first_failure(self, wait: timedelta = timedelta(0)) -> str:
        """Return why the first rank gave up; empty if none has."""

        def look(store: dist.Store) -> str:
            if wait:
                store.wait([_FAILURE_KEY], wait)
            return store.get(_FAILURE_KEY).decode() if store.check([_FAILURE_KEY]) else ""

        return self._ask_store(look, wait.total_seconds()) or ""

    def _ask_store(self, call: Callable[[dist.Store], Any], wait: float = 0.0) -> Any:
        """Return ``call(store)``; None if it fails, or takes seconds more than it is to ``wait`` itself.

        torch's own calls have no timeout for a store whose connection stands and that does not answer. So each runs on a thread
        of its own, which is left behind if need be: ask only after a failure.
        """
        if self._store_is_silent:
            return None
        answer: Future[Any] = Future()

        def run() -> None:
            found = None
            with suppress(RuntimeError):  # the store may have died with its process
                found = call(self._store)
            answer.set_result(found)

        start_daemon(run, "freescale store")
        try:
            return answer.result(wait + ANSWER_SECONDS)
        except NotInTime:
            self._store_is_silent = True
            return None

    def _why_closed_before(self, peer: int) -> str:
        """Return why the connection was closed before a timeout closed all; empty if it was not."""
        with suppress(RuntimeError):
            gloo = self.open()
            try:
                gloo.send([torch.empty(0)], peer, _UNUSED_TAG)
            except RuntimeError as error:
                if "Application timeout" not in str(error):
                    return str(error)
        return ""
