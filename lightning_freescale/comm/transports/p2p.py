"""Messages between two ranks over gloo's connections, with errors that name the peer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.worker import call_on_daemon
from lightning_freescale.comm.waits import until_another_fails

ANSWER_SECONDS = 2.0
"""The longest time that the store may take for an immediate answer."""
_FAILURE_KEY = "failure"
_UNUSED_TAG, _GATHER_TAG = 2**31 - 2, 2**31 - 4  # even, and above the tags of users
_MAY_KNOW_BETTER = timedelta(seconds=0.5)


class _Unprofiled:
    """A context in which torch's profiler records nothing of this thread.

    A Work ends its record when it completes. A receive posted ahead may complete after the profiler's window has ended, and the
    process would crash then.
    """

    def __enter__(self) -> None:
        torch._C._autograd._enable_record_function(False)

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._enable_record_function(True)


unprofiled = _Unprofiled()


class GlooP2P:
    """A separate gloo context over TCP, or ibverbs if torch was built with it (``GLOO_DEVICE_TRANSPORT=IBVERBS``).

    The constructor is collective. Messages of one tag between two ranks arrive in the order of sending. A message is sent
    once the peer has posted a receive, which must have the size of the message.

    Args:
        store: a store that only the ranks of this group use.
        timeout: how long a peer may show no progress, by default.
        ranks: the global ranks of the group, for errors.

    Attributes:
        peers: all other ranks. The order differs between ranks, so that not all send to the same rank at once.
        sources: all other ranks, in the order in which they send to this rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: list[int]) -> None:
        self.rank, self.size, self.ranks, self._timeout = rank, size, ranks, timeout
        self._store, self._store_is_silent = store, False
        self._ending = False
        connect = partial(dist.ProcessGroupGloo, dist.PrefixStore("p2p", store), rank, size, timeout=timeout)
        self._gloo: Any = until_another_fails(connect)
        self.peers = [(rank + shift) % size for shift in range(1, size)]
        self.sources = [(rank - shift) % size for shift in range(1, size)]

    def send(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send. Raise as :meth:`wait`. Keep the Work alive: its deletion cancels the transfer."""
        return self._explained(lambda: self.open().send([message], peer, tag), peer)

    def receive(self, into: Tensor, peer: int, tag: int) -> dist.Work:
        """Post a receive for a message of exactly this size. Raise as :meth:`wait`."""
        with unprofiled:
            return self._explained(lambda: self.open().recv([into], peer, tag), peer)

    def wait(self, work: dist.Work, peer: int, timeout: timedelta) -> None:
        """Wait for a message to or from ``peer``.

        Raises:
            DistBackendError: the connection to the peer is lost, or the peer shows no progress within the timeout. A lost
                connection is reported at once, or after the timeout if a message was cut in the middle, because gloo does not
                end the wait for such a message.
        """
        self._explained(lambda: work.wait(timeout), peer, timeout)

    def _explained(self, call: Callable[[], Any], peer: int, timeout: timedelta = timedelta(0)) -> Any:
        try:
            return call()
        except RuntimeError as error:
            text = str(error)
        raise dist.DistBackendError(self.explain(text, peer, timeout))  # not above: the context would keep the message alive

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks. Raise as :meth:`wait`, on all ranks. Collective."""
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.tensor([len(content)]) for _ in range(self.size)]
        try:
            self._gather(lengths)
            parts = [content if rank == self.rank else content.new_empty(int(n)) for rank, n in enumerate(lengths)]
            self._gather(parts)
        except BaseException as error:
            self.abort(str(error) or type(error).__name__)
            raise
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def _gather(self, parts: list[Tensor]) -> None:
        """Fill the part of each rank with that of the rank itself."""
        receives = [self.receive(parts[peer], peer, _GATHER_TAG) for peer in self.sources]
        sends = [self.send(parts[self.rank], peer, _GATHER_TAG) for peer in self.peers]
        for work, peer in zip(receives + sends, self.sources + self.peers):
            self.wait(work, peer, self._timeout)

    def abort(self, reason: str) -> None:
        """Write the reason to the store and close the connections, so that no rank waits for this one."""
        if self._gloo is not None:
            failure = f"rank {self.ranks[self.rank]} has given up: {reason}"
            self._ask_store(lambda store: store.compare_set(_FAILURE_KEY, "", failure))
        self.close_connections()

    def refuse_more(self) -> None:
        """Let posted messages arrive, and raise for later ones."""
        self._ending = True

    def close_connections(self) -> None:
        """Close the connections, so that every wait on this rank or a peer raises."""
        gloo, self._gloo = self._gloo, None
        for peer in self.peers if gloo is not None else ():
            # Gloo's own abort does nothing, and deleting the group leaves the connections open while any Work is alive. A
            # receive that times out closes all connections of its context.
            try:
                gloo.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def open(self) -> Any:
        """Return gloo's group, whose calls are cheaper and whose errors name no peer. Raise RuntimeError if it is closed."""
        if self._gloo is None or self._ending:
            raise RuntimeError("this rank has closed its connections")
        return self._gloo

    def explain(self, text: str, peer: int, timeout: timedelta = timedelta(0)) -> str:
        """Return an error text that names the peer, or the reason of the first rank that has given up.

        ``text`` is gloo's error for a message to or from the peer.
        """
        if "Timed out" in text and not (text := self._why_closed_before(peer)):
            # the peer may itself wait for a third rank, and name it
            late = f"rank {self.ranks[peer]} did not respond within the timeout of {timeout.total_seconds():g} s"
            return self.first_failure(_MAY_KNOW_BETTER) or late
        if known := self.first_failure():
            return known
        without_advice = text.splitlines()[0].split(". This is typically")[0]
        without_place = re.sub(r"^\[.*?\] ", "", without_advice)  # a line of gloo's source
        return f"rank {self.ranks[peer]} has disconnected: {without_place}"

    def first_failure(self, wait: timedelta = timedelta(0)) -> str:
        """Return why the first rank gave up; empty if none has."""

        def look(store: dist.Store) -> str:
            if wait:
                store.wait([_FAILURE_KEY], wait)
            return store.get(_FAILURE_KEY).decode() if store.check([_FAILURE_KEY]) else ""

        return self._ask_store(look, wait.total_seconds()) or ""

    def _ask_store(self, call: Callable[[dist.Store], Any], wait: float = 0.0) -> Any:
        """Return ``call(store)``; None if it fails, or takes seconds longer than the ``wait`` of the call itself.

        torch has no timeout for a connected store that does not answer. Each call therefore runs on a new thread, which
        may never end. Use this method only after a failure.
        """
        if self._store_is_silent:
            return None
        answer = call_on_daemon(partial(call, self._store), "freescale store")
        with suppress(RuntimeError):  # the store may have ended with its process
            try:
                return answer.result(wait + ANSWER_SECONDS)
            except NotInTime:
                self._store_is_silent = True
        return None

    def _why_closed_before(self, peer: int) -> str:
        """Return why the connection was closed before the timeout closed all connections; empty if it was open."""
        with suppress(RuntimeError):
            gloo = self.open()
            try:
                gloo.send([torch.empty(0)], peer, _UNUSED_TAG)
            except RuntimeError as error:
                if "Application timeout" not in str(error):
                    return str(error)
        return ""
