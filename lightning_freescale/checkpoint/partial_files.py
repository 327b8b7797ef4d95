"""Temporary files and folders beside a checkpoint, which replace it when they are complete.

Each save uses a unique name and holds a lock on it. A later save removes those without a lock, because their process has ended.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from typing_extensions import override

_PREFIX, _SUFFIX = ".freescale-", ".part"
_UNKNOWN = "00000000"
ABANDONED_S = 24 * 3600
"""Partial files of another machine are removed at this age, in seconds. Machines may not share locks."""
_OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_ATTEMPTS = 20


class SummedFile:
    """A file that counts the bytes that are written to it, and computes their checksum."""

    def __init__(self, file: Any) -> None:
        self._file, self._bytes, self._crc32 = file, 0, 0

    def write(self, data: Any) -> int:
        self._bytes += len(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        return int(self._file.write(data))

    def sums(self) -> dict[str, int]:
        return {"bytes": self._bytes, "crc32": self._crc32}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SyncedFile(BufferedWriter):
    """A new file. Its contents are on the disk after it is flushed or closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "w"))

    @override
    def flush(self) -> None:
        super().flush()
        os.fsync(self.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[SyncedFile]:
    """Yield a file beside ``path`` that replaces ``path`` if the context ends without an error."""
    with naming(path), claimed(path) as beside:
        with SyncedFile(beside) as file:
            yield file
        replace_path(beside, path)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add ``path`` to an OSError without a file name. If torch's zip writer replaced an error, raise the original one."""
    try:
        yield
    except BaseException as raised:
        error = raised
        while error.__context__ is not None and "inline_container" in str(error):
            error = error.__context__
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        if error is raised:
            raise
        raise error from error.__cause__


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """Yield the path of a new empty file beside ``path``, locked by this process.

    Use it, or a folder with the name :func:`folder_of`, for a checkpoint that replaces ``path``. The context removes what is
    left of both. Partial files in the same folder are removed first if their processes have ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, lock = _new_beside(path, _machine())
    with lock:
        try:
            _remove_abandoned(beside)
            yield beside
        finally:
            _remove_both(beside)


def _new_beside(path: Path, machine: str) -> tuple[Path, FileIO]:
    """Return the path of a new file beside ``path``, and the open file, which holds the lock."""
    while True:
        beside = path.with_name(f"{_PREFIX}{machine}-{uuid4().hex[:16]}{_SUFFIX}")
        file = FileIO(beside, "x")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return beside, file
        except BlockingIOError:
            pass
        except OSError:  # without a lock, another process must not remove the file before it is a day old
            return beside.rename(path.with_name(beside.name.replace(machine, _UNKNOWN, 1))), file
        file.close()  # another process has found it before it was locked, and removes it


def folder_of(beside: Path) -> Path:
    """Return the path of the folder for a result of :func:`claimed`."""
    return beside.with_suffix(".folder")


def _machine() -> str:
    """Return the start of this machine's boot ID. Processes with the same ID see each other's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return _UNKNOWN


def _remove_abandoned(mine: Path) -> None:
    """Remove the partial files beside ``mine`` of processes that have ended."""
    for beside in mine.parent.glob(f"{_PREFIX}{'?' * 8}-{'?' * 16}{_SUFFIX}"):
        with suppress(OSError):  # the file is locked, another process removes it, or locks do not exist
            held = os.open(beside, os.O_RDONLY if beside.is_dir() else os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_abandoned(beside, mine):
                    _remove_both(beside)
            finally:
                os.close(held)


def _remove_both(beside: Path) -> None:
    """Remove the folder, then the file. The file stays if the folder does, so that a later save finds the folder."""
    _remove(folder_of(beside))
    if not folder_of(beside).exists():
        _remove(beside)


def _is_abandoned(beside: Path, mine: Path) -> bool:
    """Return True if no process writes the partial files ``beside``, which this process has locked."""
    machine = _machine()
    if machine != _UNKNOWN and beside.name.startswith(f"{_PREFIX}{machine}-"):
        return True
    entries = beside, folder_of(beside), *folder_of(beside).glob("*")
    changed = max(entry.lstat().st_mtime for entry in entries if entry.exists())
    return mine.stat().st_mtime - changed > ABANDONED_S  # both are times of the file system's clock


def replace_path(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, then remove the earlier file or folder at ``path``."""
    if new.is_dir():
        _sync_folder(new)  # the names of its files
    earlier = []
    for attempt in range(_ATTEMPTS):  # another job may create or remove ``path`` at any moment
        if _renamed(new, path):
            break
        if not (failed := _exchange(new, path)):
            earlier.append(new)
            break
        if failed != errno.ENOENT:
            # this file system cannot exchange two names in one step, so ``path`` is missing for a moment. If the process ends
            # then, the earlier checkpoint remains under this name
            earlier.append(new.with_suffix(f".old{attempt}"))
            with suppress(FileNotFoundError):
                os.rename(path, earlier[-1])
    else:
        raise OSError(errno.EBUSY, "other processes replaced the checkpoint at every attempt", str(path))
    _sync_folder(path.parent)
    for old in earlier:
        _remove(old)


def _renamed(new: Path, path: Path) -> bool:
    """Rename ``new`` to ``path``; return False if a folder is in the way, or if a folder cannot replace a file."""
    try:
        os.replace(new, path)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        return False
    return True


def _exchange(new: Path, path: Path) -> int:
    """Exchange two names in one step; return the number of the error, 0 for none."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return errno.ENOSYS
    failed = rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE)
    return ctypes.get_errno() if failed else 0


def _sync_folder(folder: Path) -> None:
    """Wait until the file names of the folder are on the disk."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
