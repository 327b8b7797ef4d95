"""Read a checkpoint, in one file or in a folder, and find one that is complete."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lightning_freescale._runtime.object_gather import gather_objects
from lightning_freescale.checkpoint import sharded_folder, single_file

_MISSING = "it is not there"


def read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint; large tensors are read when they are used.

    Raises:
        ValueError: it is no checkpoint of the Trainer, or holds more than tensors and numbers, and ``weights_only``.
    """
    try:
        found = _format(path).read(path, weights_only)
    except UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} holds more than tensors and numbers ({reason}), and to read that may run code. If you trust who wrote it: "
            "trainer.fit(..., weights_only=False), or torch.serialization.add_safe_globals with its classes; --trust for the "
            "command line"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: pass a checkpoint that the Trainer has saved")
    if "state_dict" not in found:
        kind = (
            "a bare state dict: module.load_state_dict(torch.load(path)) loads it" if _is_state_dict(found) else "no state_dict"
        )
        raise ValueError(f"{path} is no checkpoint of the Trainer, and has {kind}")
    return found


def check(path: Path, *, together: bool) -> None:
    """Check by its checksums that a checkpoint is complete.

    Args:
        path: the file or folder.
        together: all ranks call the function, and each reads a share. Collective.

    Raises:
        FileNotFoundError: no rank finds it.
        ValueError: it is not complete on some rank.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if together and dist.is_initialized() else (1, 0)
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
    """Return the newest other complete checkpoint beside a checkpoint; None if there is none. Collective."""
    others = [other for other in path.parent.glob("*.ckpt") if other != path and not other.name.startswith(".")]
    named = [str(other) for other in sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)]
    for name in gather_objects(named)[0] if dist.is_initialized() else named:
        try:
            check(Path(name), together=True)
        except ValueError:
            continue
        return Path(name)
    return None


def _is_state_dict(found: dict[str, Any]) -> bool:
    return bool(found) and all(isinstance(value, torch.Tensor) for value in found.values())


def _format(path: Path) -> ModuleType:
    return sharded_folder if path.is_dir() else single_file
