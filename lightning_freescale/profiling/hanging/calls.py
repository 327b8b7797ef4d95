"""Calls of one rank to all others to say where they stand, by the store that they met at, and the answers."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import TimeoutError as NotInTime
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_freescale._worker import WorkerThread
from lightning_freescale.profiling.hanging.standing import why_silent

ANSWER_SECONDS = 3.0
"""How long a rank that reports waits for the others' answers, and all wait for their store."""
_ASK_EVERY = 0.05
_RUNS = count()  # every rank has as many


class StoreSilent(RuntimeError):  # noqa: N818 (says what happened)
    """The store has not answered in time, or is gone."""


class RankCalls:
    """This rank's end of the calls. No collective: ranks may be gone, or stand in one.

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
            StoreSilent: nobody can be called.
        """
        return self._ask(lambda: self._heed(why))

    def answer(self, standing: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Say where this rank stands; return where all do, by rank, on the one that is to report it, None on the others.

        A rank that does not answer has ``silent``, which says why, and one whose training has ended ``ended``. Rank 0 is the
        one that reports, or the lowest of those that answer.

        Raises:
            StoreSilent: nobody can be called.
        """
        number, self._number = self._number, self._number + 1
        return self._ask(lambda: self._answer(number, standing), 2 * ANSWER_SECONDS)

    def close(self) -> None:
        """Tell the others that this rank's training has ended, and end the thread."""
        try:
            self._ask(lambda: self._store.set(f"ended/{self.rank}", ""))
        except StoreSilent:
            if not self._asked.done():
                return  # the thread waits for a store that does not answer, in vain
        self._asker.stop(ANSWER_SECONDS)

    def _ask(self, question: Any, seconds: float = 0.0) -> Any:
        if self._given_up and not self._asked.done():
            raise StoreSilent("does not answer: its process is frozen")
        self._asked = self._asker.submit(question)
        try:
            return self._asked.result(seconds + ANSWER_SECONDS)
        except NotInTime:
            self._given_up = True
            raise StoreSilent("does not answer: its process is frozen") from None
        except RuntimeError as error:
            raise StoreSilent("is gone: its process has ended") from error

    def _heed(self, why: str | None) -> str | None:
        call = f"call/{self._number}"
        if why is not None:
            return str(self._store.compare_set(call, "", why).decode())
        return str(self._store.get(call).decode()) if self._store.check([call]) else None

    def _answer(self, number: int, standing: dict[str, Any]) -> list[dict[str, Any]] | None:
        answers = [f"stands/{number}/{rank}" for rank in range(self.size)]
        ended = [f"ended/{rank}" for rank in range(self.size)]
        self._store.set(answers[self.rank], json.dumps(standing))
        if not self._reports(number, answers):
            return None
        silent, until = set(range(self.size)), time.monotonic() + ANSWER_SECONDS
        while silent and time.monotonic() < until:
            time.sleep(_ASK_EVERY)
            silent = {rank for rank in silent if not self._store.check([answers[rank]])}
            silent = {rank for rank in silent if not self._store.check([ended[rank]])}
        return [
            {"rank": rank, "silent": self._why_silent(rank)}
            if rank in silent
            else json.loads(self._store.get(answers[rank]))
            if self._store.check([answers[rank]])
            else {"rank": rank, "ended": True}
            for rank in range(self.size)
        ]

    def _why_silent(self, rank: int) -> str:
        process = f"process/{rank}"
        return (
            why_silent(*json.loads(self._store.get(process))) if self._store.check([process]) else "it has not begun to train"
        )

    def _reports(self, number: int, answers: list[str]) -> bool:
        reporter, until = f"reporter/{number}", time.monotonic() + ANSWER_SECONDS
        while self.rank > 0 and time.monotonic() < until:
            if self._store.check([reporter]):
                return False
            time.sleep(_ASK_EVERY)
        # rank 0 does not answer, nor may those behind it
        if any(self._store.check([answer]) for answer in answers[: self.rank]):
            return False
        return self._store.compare_set(reporter, "", str(self.rank)) == str(self.rank).encode()
