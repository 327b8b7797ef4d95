"""The peer transport by real cuda-bindings, over ``stub_libcuda.c``: ``LD_LIBRARY_PATH=... python -m`` this module.

Torch's streams and events, which a torch without CUDA lacks, are the only stand-ins. Prints JSON: per transfer and rank the
ranks from which wrong bytes have come, and the names of the driver's functions that were called.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import torch
from cuda.bindings import driver as cuda
from torch import Tensor

from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from tests.helpers.fake_gpu import on_ranks
from tests.helpers.host_peers import lengths, transfer, transports, wrong

_DEVICE = torch.device("cpu", 0)
_called: set[str] = set()


class _Event:
    def __init__(self) -> None:
        _, self.handle = cuda.cuEventCreate(0)

    def query(self) -> bool:
        return int(cuda.cuEventQuery(self.handle)[0]) == 0


class _Stream:
    def __init__(self, handle: int, device: torch.device) -> None:
        assert device == _DEVICE
        self.cuda_stream = handle

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        assert int(cuda.cuEventRecord(event.handle, self.cuda_stream)[0]) == 0
        return event


class _Driver(CudaDriver):
    def __init__(self, seed: int) -> None:
        super().__init__(_DEVICE)

    def allocate_pinned(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32)

    def _call(self, name: str, *args: Any) -> Any:
        _called.add(name)
        return super()._call(name, *args)


def _move(size: int, chunk: int, start: int) -> list[Any]:
    ranks = transports(list(range(size)), chunk, start, make_driver=_Driver)
    tables = [lengths(size, 9 * chunk, seed) for seed in range(3)]

    def run(rank: int) -> list[list[int]]:
        found = []
        for seed, table in enumerate(tables):
            mine = transfer(rank, table, seed, late=False)
            mine.device = _DEVICE
            ranks[rank].move(mine, lambda: None)
            found.append(wrong(rank, mine, table, seed))
        ranks[rank].close()
        return found

    return [found if isinstance(found, list) else repr(found) for found in on_ranks(size, run)]


def _fail() -> list[str]:
    """Rank 1 does not come; rank 0 must get on."""
    pair = transports([0, 1], 8, make_driver=_Driver)
    mine = transfer(0, [[50, 50], [50, 50]], 1, timeout=0.3, late=False)
    mine.device = _DEVICE
    (error,) = on_ranks(1, lambda rank: pair[rank].move(mine, lambda: None))
    return [str(error), str(pair[0]._stuck)]


if __name__ == "__main__":
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.ExternalStream = _Stream
    moved = [_move(2, 64, 0), _move(3, 7, 2**32 - 5), _move(4, 1000, 2**31 - 3)]
    print(json.dumps({"wrong": moved, "failed": _fail(), "called": sorted(_called)}))
