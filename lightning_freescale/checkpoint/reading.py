"""Read a checkpoint, in one file or in a folder, and find one that is whole."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from lightning_freescale._objects import gather_objects
from lightning_freescale.checkpoint import sharded_folder, single_file

_MISSING = "it is not there"


def read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint; large tensors stay where they are until they are used.

    Raises:
        UnpicklingError: it holds more than tensors and numbers, and ``weights_only``.
    """
    return dict(_format(path).read(path, weights_only))


def check(path: Path) -> None:
    """Find out whether a checkpoint is whole, by its checksums: each rank reads some of it. Collective.

    Raises:
        FileNotFoundError: it is not there, on no rank.
        ValueError: it is not whole, on some rank.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    reason = _format(path).damage(path, rank, ranks) if path.exists() else _MISSING
    reasons = [reason] if ranks == 1 else gather_objects(reason)
    if set(reasons) == {_MISSING}:
        raise FileNotFoundError(f"there is no checkpoint {path}")
    found = {reason: rank for rank, reason in reversed(list(enumerate(reasons))) if reason}
    if found:
        listed = "; ".join(f"rank {rank}: {reason}" for reason, rank in found.items())
        raise ValueError(
            f"the checkpoint {path} is damaged or incomplete ({listed}): nothing of it was loaded. Resume from an earlier one"
        )


def newest_whole_beside(path: Path) -> Path | None:
    """Return the newest other checkpoint of a checkpoint's folder that is whole; None if there is none. Collective."""
    others = [other for other in path.parent.glob("*.ckpt") if other != path and not other.name.startswith(".")]
    named = [str(other) for other in sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)]
    for name in gather_objects(named)[0] if dist.is_initialized() else named:
        try:
            check(Path(name))
        except ValueError:
            continue
        return Path(name)
    return None


def _format(path: Path) -> ModuleType:
    return sharded_folder if path.is_dir() else single_file
