"""Plans made before they are needed, in a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Plan = TypeVar("Plan")
Key = tuple[int, int]


class PlanPrefetcher(Generic[Plan]):
    """Keeps the plans of recent steps; while :meth:`running`, a thread makes those of the next ones.

    Args:
        make: the plan of a step, a pure function of (epoch, step).
        steps: how many steps ahead.
        keep: how many plans to keep; those that are asked for later are made again.
    """

    def __init__(self, make: Callable[[int, int], Plan], steps: int = 4, keep: int = 64) -> None:
        self._make, self._steps, self._keep = make, steps, keep
        self._plans: dict[Key, Future[Plan]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def get(self, epoch: int, step: int) -> Plan:
        """The plan of a step, waiting for the thread if it is at it."""
        key = (epoch, step)
        if key not in self._plans:
            self._plans[key] = self._start(key)
        plan = self._plans[key]
        while len(self._plans) > self._keep:
            self._plans.pop(next(iter(self._plans)))
        return plan.result()

    def prepare(self, epoch: int, step: int, end: int) -> None:
        """Start on the steps from ``step`` on, ``end`` at most."""
        for key in ((epoch, later) for later in range(step, min(step + self._steps, end))):
            if key not in self._plans:
                self._plans[key] = self._start(key)

    def forget(self) -> None:
        """What the plans depend on has changed."""
        self._plans.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Plan ahead within the block."""
        with ThreadPoolExecutor(1, "freescale-plan") as mine:
            self._thread = mine
            try:
                yield
            finally:
                if self._thread is mine:  # else somebody iterates anew
                    self._thread = None

    def __getstate__(self) -> dict[str, Any]:
        """Without plans and thread, which cannot be copied."""
        return {**self.__dict__, "_plans": {}, "_thread": None}

    def _start(self, key: Key) -> Future[Plan]:
        if self._thread is not None:
            return self._thread.submit(self._make, *key)
        done: Future[Plan] = Future()
        done.set_result(self._make(*key))
        return done
