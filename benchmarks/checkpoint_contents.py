"""Contents of checkpoints in benchmarks: compared by a checksum, and damaged on purpose."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor


def digest(content: Any) -> str:
    """Return a checksum of all values of a checkpoint, or of a part of one, with their places and types."""
    found = hashlib.sha256()

    def add(place: str, part: Any) -> None:
        if isinstance(part, Tensor):
            found.update(f"{place} {part.dtype} {tuple(part.shape)}".encode() + part.detach().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            found.update(f"{place} dict {len(part)}".encode())
            for key in sorted(part, key=repr):
                add(f"{place}.{key!r}", part[key])
        elif isinstance(part, (list, tuple)):
            found.update(f"{place} {'list' if isinstance(part, list) else 'tuple'} {len(part)}".encode())
            for index, each in enumerate(part):
                add(f"{place}.{index}", each)
        else:
            found.update(repr((place, type(part), part)).encode())

    add("", content)
    return found.hexdigest()


def alter(path: Path, place: int, mask: int) -> None:
    """Change the bits of ``mask`` in the byte at ``place`` of a file. A second call restores them."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ mask]))
