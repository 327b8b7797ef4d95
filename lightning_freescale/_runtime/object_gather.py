"""Collectives of Python values: tensors, numbers, text, NumPy arrays and containers of them.

Unlike an ordinary pickle, the received data cannot run code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pickle import UnpicklingError
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale._runtime.error_text import error_text

_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"},
    np.zeros(1).__reduce__()[0],  # constructors of an array and a number; NumPy 1 and 2 have different names for them
    np.float64(0).__reduce__()[0],
]
_READING = Lock()
"""Held while a value is read: torch has one list of additional safe types for the process."""


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective on ``group``, by default the default group.

    Raises:
        ValueError: a value holds an object of another type; raised on every rank.
    """
    return [_read(rank, content) for rank, content in enumerate(gather_bytes(_write(value), group))]


def together(do: Callable[[], Any] | None, what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the results of ``do`` on all ranks, None for a rank without it. If it fails on one rank, all ranks raise.

    Collective on ``group``; None is this rank alone. The results are JSON values.

    Raises:
        RuntimeError: the text is ``what``, followed by the failed ranks and their errors.
    """
    done, error = None, None
    try:
        done = None if do is None else do()
    except Exception as raised:
        error = raised
    mine = done, error and error_text(error)
    found = [mine] if group is None else [json.loads(each) for each in gather_bytes(json.dumps(mine).encode(), group)]
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    if failed:
        raise RuntimeError(f"{what}: {'; '.join(failed)}") from error
    return [done for done, _ in found]


def gather_on_first_rank(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on rank 0; an empty list on the others. Collective on the default group.

    Rank 0 receives one value at a time, because NCCL passes each through the memory of the GPU.

    Raises:
        ValueError: a value holds an object of another type; raised on rank 0.
    """
    device = _device(None)
    if dist.get_rank():
        mine = _tensor(_write(value), device)
        dist.send(torch.tensor([len(mine)], device=device), dst=0)
        dist.send(mine, dst=0)
        return []
    values = [value]
    for source in range(1, dist.get_world_size()):
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, src=source)
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.recv(content, src=source)
        values.append(_read(source, _bytes(content)))
    return values


def gather_bytes(content: bytes, group: dist.ProcessGroup | None = None, only_first: bool = False) -> list[bytes]:
    """Return the bytes of all ranks, by rank, or an empty list on all ranks but rank 0 of the group if ``only_first``.

    Collective on ``group``, by default the default group. ``content`` must not be empty.
    """
    ranks, device = dist.get_world_size(group), _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    most = max(map(int, sizes))
    mine, gets = _tensor(content.ljust(most, b"\0"), device), not only_first or dist.get_rank(group) == 0
    parts = list(torch.empty(ranks if gets else 0, most, dtype=torch.uint8, device=device).unbind())
    if only_first:
        dist.gather(mine, parts if gets else None, group=group, group_dst=0)
    else:
        dist.all_gather(parts, mine, group=group)
    return [_bytes(part[: int(size)]) for part, size in zip(parts, sizes)]


def _write(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _read(rank: int, content: bytes) -> Any:
    try:
        with _READING, torch.serialization.safe_globals(_NUMPY):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        # torch's text also advises to read without weights_only, which the user must not do
        named = (line for line in str(error).splitlines() if "WeightsUnpickler error" in line or "GLOBAL" in line)
        reason = next(named, type(error).__name__)
        raise ValueError(
            f"rank {rank} sends a value that may run code when it is read ({reason.strip()}). Only tensors, numbers, text and "
            "containers of them are allowed: remove all other objects from the state_dict() of the stream"
        ) from error


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU if the group moves CPU tensors, else the current CUDA device."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tensor(content: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
