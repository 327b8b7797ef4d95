"""Write, check and read a checkpoint in one file that ``torch.load`` can read.

Writing is atomic. The tables are written one by one and mapped into memory for reading. So no rank holds all of them.
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

from lightning_freescale.checkpoint.spread_tensors import Deferral, DeferredTensors

_READ_AT_ONCE = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SHARED = ("state_dict", "optimizer_states", "current_model_state")
"""The entries of a checkpoint that stay in the mapped file, because loading copies them."""


def write(checkpoint: dict[str, Any], path: Path, deferred: DeferredTensors) -> None:
    """Write a checkpoint with the values of its deferred tensors on rank 0. Collective.

    The file is written beside ``path`` and renamed to ``path`` after it is complete and on the disk. If rank 0 raises an
    OSError, for example because the disk is full, the other ranks raise a RuntimeError.
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
    """Save like ``torch.save``, but fetch the values of each deferred tensor when it is written."""
    with torch.serialization._open_zipfile_writer(file) as archive:
        filling = _Filling(archive, deferred)
        torch.serialization._save(checkpoint, filling, pickle, torch.serialization.DEFAULT_PROTOCOL, False)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path`` that replaces ``path`` if the context ends without an error."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_path(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_path(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, then remove the earlier file or folder at ``path``."""
    if not path.is_dir() and not (new.is_dir() and path.exists()):
        os.replace(new, path)
        return
    # a rename can only replace an empty folder. Linux exchanges two names in one step on most file systems. Elsewhere ``path``
    # is missing for a moment; if the process ends then, it remains under the name of ``new`` with the suffix ``.old``
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(new), os.fsencode(path)
    if rename is None or rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        away = new.with_name(f"{new.name}.old")
        os.rename(path, away)
        os.rename(new, path)
        os.rename(away, new)
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new, ignore_errors=True)
    else:
        new.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the file names of the folder are on the disk."""
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def read(path: Path, weights_only: bool | None) -> Any:
    """Read a checkpoint; weights and optimizer states stay in the mapped file, other entries are in memory."""
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    if not isinstance(found, dict):
        return found
    # a callback may keep its entries while the file is overwritten
    kept = {name: value for name, value in found.items() if name in _SHARED}
    rest = {name: value for name, value in found.items() if name not in _SHARED}
    return {**kept, **pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, rest)}


def damage(path: Path, rank: int, ranks: int) -> str:
    """Return a description of the damage to this rank's share of the records; empty if there is none."""
    if not path.stat().st_size:
        return "it is empty"
    if not zipfile.is_zipfile(path):
        return "it was not written by torch.save, or its end is missing"
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
    """An archive writer of torch that fetches the values of each deferred tensor when it is written."""

    def __init__(self, archive: Any, deferred: Deferral) -> None:
        self._archive, self._deferred, self._numbers = archive, deferred, deferred.numbers_by_storage()

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage) and data._cdata in self._numbers:
            data = self._deferred.fetch(self._numbers[data._cdata]).untyped_storage()
        self._archive.write_record(name, data, size)
