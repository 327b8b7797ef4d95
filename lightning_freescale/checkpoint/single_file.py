"""A checkpoint in one file, as ``torch.load`` reads it: whole or not there, and checked before it is read.

Its tables are written one after the other, and mapped into memory where they are read, so that nobody holds them all.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from lightning_freescale.checkpoint.deferred_tensors import Deferral, DeferredTensors

_READ_AT_ONCE = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SHARED = ("state_dict", "optimizer_states", "current_model_state")
"""What of a checkpoint stays in the mapped file, because whoever takes it makes a copy."""


def write(checkpoint: dict[str, Any], path: Path, deferred: DeferredTensors) -> None:
    """Write a checkpoint, with the values of what is deferred in it, on rank 0. Collective.

    It is written beside ``path``, and takes its place when it is whole and on the disk.

    Raises:
        RuntimeError: rank 0 could not write it; raised on the others.
        OSError: on rank 0, the disk is full say.
    """
    if dist.get_rank():
        deferred.serve()
        return
    failed = True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            save(checkpoint, file, deferred)
        failed = False
    finally:
        deferred.finish(failed)


def save(checkpoint: Mapping[str, Any], file: IO[bytes], deferred: Deferral) -> None:
    """Do as ``torch.save``, and fetch what is deferred when its turn comes."""
    with torch.serialization._open_zipfile_writer(file) as archive:
        filling = _Filling(archive, deferred)
        torch.serialization._save(checkpoint, filling, pickle, torch.serialization.DEFAULT_PROTOCOL, False)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path`` that takes its place when the context ends without an error."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        take_place(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def take_place(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, be it a file or a folder before; what it was is removed afterwards.

    Raises:
        OSError: they cannot be renamed.
    """
    if not path.is_dir() and not (new.is_dir() and path.exists()):
        os.replace(new, path)
        return
    _exchange_names(new, path)
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new, ignore_errors=True)
    else:
        new.unlink()


def _exchange_names(new: Path, old: Path) -> None:
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


def sync_folder(folder: Path) -> None:
    """Wait until the folder's names are on the disk."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def read(path: Path, weights_only: bool | None) -> Any:
    """Read a checkpoint: weights and optimizer states stay in the file, mapped, all else is in memory.

    Raises:
        UnpicklingError: it holds more than tensors and numbers, and ``weights_only``.
    """
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    if not isinstance(found, dict):
        return found
    # somebody may keep what he gets of it, and the file may be written anew meanwhile
    kept = {name: value for name, value in found.items() if name in _SHARED}
    rest = {name: value for name, value in found.items() if name not in _SHARED}
    return {**kept, **pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, rest)}


def damage(path: Path, rank: int, ranks: int) -> str:
    """Return what is wrong with a file, as far as this rank's share of its records tells; empty if nothing is."""
    if not path.stat().st_size:
        return "it is empty"
    if not zipfile.is_zipfile(path):
        return "it is no file of torch.save, or its end is missing"
    try:
        with zipfile.ZipFile(path) as archive:
            largest_first = sorted(archive.infolist(), key=lambda record: -record.file_size)
            for record in largest_first[rank::ranks]:
                with archive.open(record) as values:
                    while values.read(_READ_AT_ONCE):
                        pass
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Filling:
    """torch's writer of archives, that gets what is deferred when its turn comes."""

    def __init__(self, archive: Any, deferred: Deferral) -> None:
        self._archive, self._deferred, self._numbers = archive, deferred, deferred.numbers_by_storage()

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage) and data._cdata in self._numbers:
            data = self._deferred.fetch(self._numbers[data._cdata]).untyped_storage()
        self._archive.write_record(name, data, size)
