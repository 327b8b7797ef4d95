"""Keep Python's garbage collector off the threads that run jobs.

PyTorch changes the use counts of tensors and of autograd nodes in C++, without the GIL. A collection that runs meanwhile on
another thread can take live objects for garbage. It then clears the weak references to them: DDP's backward, for example, no
longer finds its module. A collection on the training thread is safe, because that thread is not in C++ at that time.
"""

from __future__ import annotations

import gc
import os
import threading

_OFF = (2**31 - 1,) * 3
"""Thresholds that no count reaches. ``gc.disable()`` would undo what the user has chosen with it and with ``gc.enable()``."""


class _Probe:
    """An object that is allocated only so that Python compares its counts with the thresholds."""


class _Pauses:
    """The pauses that are in effect, and the thresholds that return with the end of the last one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.thresholds = gc.get_threshold()


_pauses = _Pauses()


def pause() -> None:
    """Start no collection in any thread until :func:`resume` has been called as often as this function."""
    with _pauses.lock:
        if _pauses.count == 0:
            _pauses.thresholds = gc.get_threshold()
            gc.set_threshold(*_OFF)
        _pauses.count += 1


def resume() -> None:
    """End one pause. Thresholds that the user has set meanwhile stay."""
    with _pauses.lock:
        _pauses.count -= 1
        if _pauses.count == 0 and gc.get_threshold() == _OFF:
            gc.set_threshold(*_pauses.thresholds)


def collect_due() -> None:
    """Make the collection in this thread, now, that the pause has put off; nothing if none is due."""
    with _pauses.lock:
        if gc.get_threshold() != _OFF:
            return
        gc.set_threshold(*_pauses.thresholds)
    _Probe()  # outside the lock: a finalizer may wait for a thread that ends a pause
    with _pauses.lock:
        if _pauses.count and gc.get_threshold() == _pauses.thresholds:
            gc.set_threshold(*_OFF)


def _end_in_child() -> None:
    """End all pauses in a forked process: the threads that would end them are not there."""
    global _pauses
    thresholds, _pauses = _pauses.thresholds, _Pauses()
    if gc.get_threshold() == _OFF:
        gc.set_threshold(*thresholds)


os.register_at_fork(after_in_child=_end_in_child)
