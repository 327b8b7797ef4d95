"""A new file or folder takes the place of an old one, in one step where the system can do it."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def take_place(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, be it a file or a folder before; what it was is removed afterwards.

    Raises:
        OSError: they cannot be renamed.
    """
    if not path.is_dir() and not (new.is_dir() and path.exists()):
        os.replace(new, path)
        return
    exchange_names(new, path)
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new, ignore_errors=True)
    else:
        new.unlink()


def exchange_names(new: Path, old: Path) -> None:
    """Give ``new`` the name of ``old`` and the other way round.

    A rename takes the place of an empty folder only. Linux exchanges names in one step on most file systems; elsewhere ``old``
    is away for a moment, and stays under the name of ``new`` with ``.old`` behind it if the process dies in it.

    Raises:
        OSError: they cannot be renamed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    away = new.with_name(f"{new.name}.old")
    os.rename(old, away)
    os.rename(new, old)
    os.rename(away, new)
