"""Write, check and read a checkpoint in one file that ``torch.load`` can read.

Writing is atomic. The tables are written one by one and mapped into memory for reading. So no rank holds all of them.
"""

from __future__ import annotations

import errno
import pickle
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from lightning_freescale._runtime.error_text import error_text
from lightning_freescale.checkpoint import remote_files
from lightning_freescale.checkpoint.held_files import CONVERTED, VERSION
from lightning_freescale.checkpoint.remote_files import Location
from lightning_freescale.checkpoint.spread_tensors import Deferral, DeferredTensors

_READ_AT_ONCE = 1 << 20
_IS_FOLDER = 16  # an attribute of a record; torch does not read a record with it
_PART_BYTES = 1 << 26
_OF_DAMAGE = {None, errno.EINVAL, errno.ENOENT}
"""``errno`` of an OSError by damage: None from a decompressor, EINVAL for offsets outside the file, ENOENT for a lost file."""
_SHARED = ("state_dict", "optimizer_states", "current_model_state", CONVERTED)
"""The entries of a checkpoint that stay in the mapped file, because loading copies them."""


def write(checkpoint: dict[str, Any], path: Location, deferred: DeferredTensors) -> None:
    """Write a checkpoint with the values of its deferred tensors on rank 0. Collective.

    The file is written beside ``path`` and renamed to ``path`` after it is complete and on the disk. If rank 0 cannot write, or
    a rank has too little memory, all ranks raise a RuntimeError.
    """
    if dist.get_rank():
        deferred.serve()
        return
    try:
        with remote_files.replacing(path) as file:
            save(checkpoint, file, deferred)
    except Exception as error:
        deferred.finish(error)
        raise
    deferred.finish()


def save(checkpoint: Mapping[str, Any], file: Any, deferred: Deferral) -> None:
    """Save like ``torch.save``, but fetch the values of each deferred tensor when it is written."""
    in_parts: Any = _InParts(file, deferred)
    with torch.serialization._open_zipfile_writer(in_parts) as archive:
        filling = _Filling(archive, deferred)
        torch.serialization._save(checkpoint, filling, pickle, torch.serialization.DEFAULT_PROTOCOL, False)


def read(path: Path, weights_only: bool | None) -> Any:
    """Read a checkpoint; weights and optimizer states stay in the mapped file, other entries of the Trainer are in memory."""
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    if not isinstance(found, dict) or VERSION not in found:
        return found
    # a callback may keep its entries while the file is overwritten
    cloned = partial(pytree.tree_map_only, torch.Tensor, torch.Tensor.clone)
    return {name: value if name in _SHARED else cloned(value) for name, value in found.items()}


def damage(path: Path, rank: int, ranks: int) -> str:
    """Return a description of the damage to this rank's share of the records; empty if there is none.

    Raises:
        OSError: the file could not be read.
    """
    try:
        if not path.stat().st_size:
            return "it is empty"
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                return "it was not written by torch.save, or its end is missing"
        with zipfile.ZipFile(path) as archive:
            largest_first = sorted(archive.infolist(), key=lambda record: -record.file_size)
            for record in largest_first[rank::ranks]:
                with archive.open(record) as values:
                    while values.read(_READ_AT_ONCE):
                        pass
            if rank == 0:
                _compare_readers(path, archive)
    except MemoryError:
        raise
    except Exception as error:  # damage makes zipfile, its decompressors and torch raise errors of many types
        if isinstance(error, OSError) and error.errno not in _OF_DAMAGE:
            raise
        return error_text(error)
    return ""


def _compare_readers(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise a ValueError if torch reads other records than Python: they use different fields of the directory."""
    with open(path, "rb") as file:
        reader: Any = torch._C.PyTorchFileReader(file)
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        sizes = {name: reader.get_record_size(name) for name in reader.get_all_records()}
        if sizes != {name: record.file_size for name, record in records.items()}:
            raise ValueError("the directory does not list all records")
        for name, record in records.items():
            if record.external_attr & _IS_FOLDER:
                raise ValueError(f"the directory lists the record {name} as a folder")
            reader.get_record_offset(name)
            if not name.startswith("data/") and reader.get_record(name) != archive.read(record):
                raise ValueError(f"the directory has other places for the record {name}")


class _InParts:
    """A file that is written and flushed in parts of 64 MB, so a call takes seconds at most.

    Between parts, Python handles signals, and rank 0 restarts the timeout of the others.
    """

    def __init__(self, file: Any, deferred: Deferral) -> None:
        self._file, self._deferred, self._bytes = file, deferred, 0

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _PART_BYTES):
            self._bytes += self._file.write(data[start : start + _PART_BYTES])
            if self._bytes >= _PART_BYTES:
                self._file.flush()
                self._bytes = 0
                self._deferred.wait_longer()
        return len(data)

    def flush(self) -> None:
        pass  # torch calls this at the end, and closing the file flushes it once more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Filling:
    """An archive writer of torch that fetches the values of each deferred tensor when it is written."""

    def __init__(self, archive: Any, deferred: Deferral) -> None:
        self._archive, self._deferred, self._numbers = archive, deferred, deferred.numbers_by_storage()

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage) and data._cdata in self._numbers:
            data = self._deferred.fetch(self._numbers[data._cdata]).untyped_storage()
        self._archive.write_record(name, data, size)
