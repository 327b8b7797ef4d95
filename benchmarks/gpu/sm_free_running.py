"""A transfer that goes on while something else is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Step = Callable[[], int]  # starts a transfer, waits until it or an earlier one is done, and returns its bytes


class Running:
    """Repeats a step in a thread of its own while the block runs."""

    def __init__(self, step: Step) -> None:
        self._step, self._error = step, None
        self._marks = [(time.perf_counter(), 0)]
        self._first, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        self._first.wait()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def gbps(self, begin: float, end: float) -> float:
        """Bytes per nanosecond between two moments."""
        times, sent = np.transpose(self._marks)
        return float(np.diff(np.interp([begin, end], times, sent))[0] / (end - begin) / 1e9)

    def _repeat(self) -> None:
        try:
            while not self._stop.is_set():
                sent = self._step()
                self._marks.append((time.perf_counter(), self._marks[-1][1] + sent))
                self._first.set()
        except BaseException as error:
            self._error = error
        finally:
            self._first.set()
