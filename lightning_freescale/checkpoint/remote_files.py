"""Checkpoints on the file systems of fsspec, such as ``s3://bucket/last.ckpt``.

A path is a ``Path`` if it is local, and otherwise a text with a scheme, its address. Files are written to temporary files of
this machine and then copied. A folder has a subfolder for each save. ``freescale.json`` is copied last and names the subfolder,
so a reader finds the files of one save.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any
from uuid import uuid4
from weakref import finalize

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning_freescale.checkpoint import partial_files
from lightning_freescale.checkpoint.held_files import MANIFEST, WHOLE, HeldFiles, close

_NEW = re.compile("[0-9a-f]{16}")

Location = Path | str


def located(path: Any) -> Location:
    """Return a local path as a Path, also if it has a scheme, and other addresses as they are."""
    if "://" not in (text := os.fspath(path)):
        return Path(path)
    system, place = url_to_fs(text)
    return Path(place) if isinstance(system, LocalFileSystem) else text


def exists(path: Location) -> bool:
    system, place = _found(path)
    return bool(system.exists(place))


def size_of(path: Location) -> int:
    system, place = _found(path)
    return int(system.size(place))


def replacing(path: Location) -> AbstractContextManager[Any]:
    """Return a context whose value is a file that replaces ``path`` if the context ends without an error."""
    return partial_files.replacing(path) if isinstance(path, Path) else _replacing(path)


@contextmanager
def _replacing(address: str) -> Iterator[Any]:
    system, place = _found(address)
    if system.isdir(place):
        raise _other_kind(address, "folder", "file")
    with partial_files.naming(address), _temporary_file() as file:
        yield file
        file.flush()
        _send(Path(file.name), address)


def files_of(path: Location) -> HeldFiles:
    return HeldFiles(path) if isinstance(path, Path) else _CopiedFiles(path)


def others_beside(path: Any) -> list[str]:
    """Return the other paths in the same folder that end with ``.ckpt``, the newest first."""
    path = located(path)
    folder, own = (path.parent, path.name) if isinstance(path, Path) else path.rpartition("/")[::2]
    found = [within(folder, name) for name in names_in(folder) - {own} if name.endswith(".ckpt") and name[0] != "."]
    return [str(each) for each in sorted(found, key=_written_at, reverse=True)]


def names_in(folder: Location) -> set[str]:
    if isinstance(folder, Path):
        return {each.name for each in folder.glob("*")}
    system, place = _found(folder)
    return {name.rstrip("/").rpartition("/")[2] for name in system.ls(place, detail=False)}


def within(folder: Location, name: str) -> Location:
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def _written_at(path: Location) -> float:
    with suppress(FileNotFoundError):  # another job has replaced or removed it
        if isinstance(path, Path):
            return path.stat().st_mtime
        system, place = _found(path)
        return float(system.modified(f"{place}/{MANIFEST}" if system.isdir(place) else place).timestamp())
    return 0.0


# -- folders


@contextmanager
def new_folder(address: str) -> Iterator[str]:
    """Yield the address of the folder for one save. It is removed after an error if the manifest does not name it."""
    system, place = _found(address)
    if system.isfile(place):
        raise _other_kind(address, "file", "folder")
    name = uuid4().hex[:16]
    try:
        yield f"{address}/{name}"
    except BaseException:
        with suppress(Exception):  # another error would hide the cause. A later save removes what is left
            if not _names(address, name):
                system.rm(f"{place}/{name}", recursive=True)
        raise


def _names(address: str, subfolder: str) -> bool:
    """Return whether the manifest of a folder names a subfolder."""
    system, place = _found(address)
    try:
        return subfolder.encode() in system.cat_file(f"{place}/{MANIFEST}")
    except FileNotFoundError:
        return False


@contextmanager
def staging(place: Location) -> Iterator[Path]:
    """Yield the local folder in which this rank writes the files for ``place``."""
    with nullcontext(place) if isinstance(place, Path) else TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def _temporary_file() -> Iterator[Any]:
    try:
        created = NamedTemporaryFile()  # noqa: SIM115 (it is closed below)
    except OSError as error:  # a FileNotFoundError would say that the checkpoint is missing
        advice = "Set TMPDIR to a folder that this rank can write"
        raise OSError(f"a temporary file cannot be created ({error}). {advice}") from error
    with created as file:
        yield file


def send(stage: Path, names: Any, place: Location) -> None:
    """Copy files of :func:`staging` to ``place``."""
    for name in names if isinstance(place, str) else ():
        _send(stage / name, f"{place}/{name}")


def publish(stage: Path, place: Location, folder: Location) -> None:
    """Make the files at ``place`` the checkpoint ``folder``. The manifest is still in ``stage``."""
    if isinstance(place, Path):
        partial_files.replace_path(place, Path(folder))
        return
    earlier = ""
    with suppress(Exception):  # what it names is removed when it is a day old
        earlier, _ = _CopiedFiles(str(folder)).listed()
    _send(stage / MANIFEST, f"{folder}/{MANIFEST}")
    with suppress(Exception):  # the checkpoint is complete, and another job may remove the same files
        system, root = _found(str(folder))
        for name in names_in(str(folder)):
            if name == earlier or (_NEW.fullmatch(name) and _is_abandoned(system, root, name)):
                system.rm(f"{root}/{name}", recursive=True)


def _is_abandoned(system: Any, root: str, name: str) -> bool:
    """Return True if all files of a subfolder are a day older than the manifest. Remote files have no locks."""
    changed = [system.modified(file) for file in system.find(f"{root}/{name}")]
    return bool(changed) and (system.modified(f"{root}/{MANIFEST}") - max(changed)).total_seconds() > partial_files.ABANDONED_S


def _other_kind(address: str, there: str, new: str) -> OSError:
    return FileExistsError(
        f"there is a {there} at {address}, which a {new} cannot replace in one step on this file system. Remove it, or use "
        "another name"
    )


def _found(path: Location) -> tuple[Any, str]:
    system, place = (LocalFileSystem(), str(path)) if isinstance(path, Path) else url_to_fs(path)
    system.invalidate_cache()  # other processes write there
    return system, place


def _send(file: Path, address: str) -> None:
    system, place = _found(address)
    system.makedirs(place.rpartition("/")[0], exist_ok=True)
    with system.transaction:
        system.put_file(str(file), place)


class _CopiedFiles(HeldFiles):
    """The files of a checkpoint on another file system, which are copied to this machine when they are used."""

    def __init__(self, address: str) -> None:
        self._system, self._place = _found(address)
        self._open: dict[str, int] = {}
        finalize(self, close, self._open)
        is_file = self._system.isfile(self._place)
        self.is_folder = self._system.isfile(f"{self._place}/{MANIFEST}") or (not is_file and self._system.isdir(self._place))
        if not is_file and not self.is_folder:
            raise FileNotFoundError(address)
        self._subfolder, _ = self.listed() if self.is_folder else ("", [])

    @override
    def __truediv__(self, name: str) -> Path:
        if name not in self._open:
            place = {WHOLE: self._place, MANIFEST: f"{self._place}/{MANIFEST}"}.get(name)
            with _temporary_file() as file, suppress(FileNotFoundError):
                self._system.get_file(place or "/".join(filter(None, (self._place, self._subfolder, name))), file.name)
                self._open[name] = os.open(file.name, os.O_RDONLY)
        return super().__truediv__(name)
