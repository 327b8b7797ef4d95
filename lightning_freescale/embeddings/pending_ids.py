"""What an id map has seen since it last let ids in: TorchRec keeps it out of the state dict, but a resumed run needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.modules.mc_modules import MCHManagedCollisionModule


def get_pending(manager: Any) -> dict[str, Any] | None:
    """What a map has seen since it last let new ids in, which its state dict leaves out; None if it keeps nothing."""
    if not isinstance(manager, MCHManagedCollisionModule) or manager._input_history_buffer_size < 0:
        return None
    used = slice(manager._current_history_buffer_offset)
    return {
        "size": manager._input_history_buffer_size,
        "last_eviction": manager._last_eviction_iter,
        "ids": manager._history_accumulator[used].cpu(),
        "metadata": {name: value[used].cpu() for name, value in manager._history_metadata.items()},
    }


def set_pending(manager: Any, pending: Mapping[str, Any] | None) -> None:
    """Put back what :func:`get_pending` returned; None to forget, as a new module does."""
    if not isinstance(manager, MCHManagedCollisionModule):
        return
    manager._input_history_buffer_size = manager._current_iter = manager._last_eviction_iter = -1
    manager._current_history_buffer_offset = 0
    if pending is None:
        return
    manager._current_iter = int(manager._current_iter_tensor)
    manager._last_eviction_iter = pending["last_eviction"]
    manager._input_history_buffer_size = pending["size"]
    manager._current_history_buffer_offset = used = len(pending["ids"])
    manager._history_accumulator = torch.zeros(pending["size"], dtype=torch.int64, device=manager.device)
    manager._history_accumulator[:used] = pending["ids"]
    for name, value in pending["metadata"].items():
        buffer = torch.zeros(pending["size"], dtype=torch.int64, device=manager.device)
        buffer[:used] = value
        manager.register_buffer(f"_history_{name}", buffer, persistent=False)
        manager._history_metadata[name] = buffer
