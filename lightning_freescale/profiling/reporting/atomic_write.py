"""Write a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: str | Path, chunks: Iterable[str]) -> Path:
    """Write text to ``path`` so that a reader finds the old file or the whole new one; make the folder if there is none.

    Raises:
        OSError: the file cannot be written; the old one stays, and nothing is left beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(chunks)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
