"""A terminal of this process's own, for what draws on one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def terminal(columns: int = 200) -> Iterator[list[str]]:
    """Have stdout and stderr be a terminal meanwhile; what was written there is in the list afterwards, in one piece."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    pieces: list[bytes] = []
    shown: list[str] = []

    def drain() -> None:
        with suppress(OSError):  # that is how a terminal ends
            while piece := os.read(ours, 4096):
                pieces.append(piece)

    reader = threading.Thread(target=drain)
    reader.start()
    before = sys.stdout, sys.stderr
    os.environ["COLUMNS"] = str(columns)  # rich asks descriptors 0 to 2 otherwise
    with os.fdopen(theirs, "w") as screen:
        sys.stdout = sys.stderr = screen
        try:
            yield shown
        finally:
            sys.stdout, sys.stderr = before
            del os.environ["COLUMNS"]
    reader.join()
    os.close(ours)
    shown.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(pieces).decode()))  # without colours
