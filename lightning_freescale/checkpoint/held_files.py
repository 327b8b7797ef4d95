"""Open files of a checkpoint. Reads stay consistent while another job replaces the checkpoint.

On NFS, this does not hold if the other job runs on another host: reading may then end with 'Stale file handle'.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override

MANIFEST = "freescale.json"
"""The file of a folder that lists its files."""
OF_TORCH = ".metadata"
"""The file of a folder of torch.distributed.checkpoint (DCP) that lists its tensors."""
VERSION = "pytorch-lightning_version"
"""An entry that every checkpoint of the Trainer has."""
CONVERTED = "freescale_converted"
"""The entry of a converted checkpoint with its former format, the optimizer states by parameter, and what is left out."""
WHOLE = ""
"""The name of a checkpoint in one file."""
_TAIL_BYTES = 1 << 20
_ATTEMPTS = 20


class HeldFiles(FileSystem):
    """The open files of a checkpoint, by name. They are closed when nothing refers to this object.

    ``held / name`` is a path of a file, valid in this process. If the folder has no such file, the path does not exist.
    """

    def __init__(self, path: Path) -> None:
        for _ in range(_ATTEMPTS):
            self._open = {WHOLE: os.open(path, os.O_RDONLY)}
            end = finalize(self, close, self._open)
            self.is_folder = stat.S_ISDIR(os.fstat(self._open[WHOLE]).st_mode)
            if not self.is_folder or self._has_all() or self._is_at(path):
                return
            end()  # another job has replaced the folder, and removed a file before this process could open it
        raise OSError(errno.EBUSY, f"another job has replaced it during each of {_ATTEMPTS} attempts to open it", str(path))

    def _has_all(self) -> bool:
        """Open the files of the folder, and return whether it has all that the manifest lists."""
        self._hold(MANIFEST, MANIFEST)
        subfolder, names = self.listed()
        for name in names:
            self._hold(name, os.path.join(subfolder, name))
        return all(name in self._open for name in (MANIFEST, *names))

    def _hold(self, name: str, place: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            self._open[name] = os.open(place, os.O_RDONLY, dir_fd=self._open[WHOLE])

    def listed(self) -> tuple[str, list[str]]:
        """Return the subfolder and file names of the manifest; without a readable one, the files of a DCP folder."""
        with suppress(ValueError, LookupError, TypeError, AttributeError, FileNotFoundError, IsADirectoryError):
            content = json.loads((self / MANIFEST).read_bytes())
            return content.get("folder", ""), [*content["files"]]
        names = os.listdir(self._open[WHOLE]) if WHOLE in self._open else []
        return "", names if OF_TORCH in names else []

    def _is_at(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self._open[WHOLE]))
        return False

    def __truediv__(self, name: str) -> Path:
        return Path(f"/dev/fd/{self._open.get(name, 'none')}")

    @property
    def identity(self) -> tuple[int, int]:
        """Numbers that differ between checkpoints with different contents."""
        names = (MANIFEST, OF_TORCH) if self.is_folder else (WHOLE,)
        path = next((self / name for name in names if (self / name).exists()), None)
        if path is None:
            return 0, 0
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))  # the end has checksums of all contents
            return size, zlib.crc32(file.read())

    @override
    def concat_path(self, path: Any, suffix: str) -> Path:
        return self / suffix


def close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()
