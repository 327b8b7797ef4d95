"""Refuse to write files while a trial run is under way."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from typing_extensions import Self

from lightning_freescale.strategy.preserve_state import LeavesTraceError

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"open": "writes to", "os.remove": "removes", "os.rename": "renames", "os.truncate": "truncates"}
"""What a step does to a file, by the name of Python's audit event."""
_CACHES = ("importlib.", "numba.", "torch._dynamo.", "torch._inductor.", "triton.")
"""Modules that may write: they keep what they have compiled."""


class FileWritesRefused:
    """Context in which this thread cannot open a file to write it, nor remove, rename or truncate one.

    Only what Python does is seen: not a file that is open already, and not what C++ writes, as ``torch.save`` does.

    Raises:
        LeavesTraceError: where the code does so, before it is done; names the file.
    """

    _here = threading.local()
    _hooked = False

    def __enter__(self) -> Self:
        if not FileWritesRefused._hooked:
            FileWritesRefused._hooked = True
            sys.addaudithook(_refuse)  # for good: Python has no way to remove one
        self._here.frame = sys._getframe(1)
        return self

    def __exit__(self, *error: object) -> None:
        del self._here.frame


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event not in _CHANGES:
        return
    outside = getattr(FileWritesRefused._here, "frame", None)
    if outside is None or (event == "open" and (args[0] == os.devnull or not args[2] & _WRITES)):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outside:
        if f"{frame.f_globals.get('__name__')}.".startswith(_CACHES):
            return
        frame = frame.f_back
    raise LeavesTraceError(f"training_step {_CHANGES[event]} the file {args[0]!r}")
