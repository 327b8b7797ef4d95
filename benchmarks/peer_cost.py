"""Cost of the peer transport's Python code beside the copies that it starts. Needs no GPU.

The benchmark runs whole transfers with the real ``CudaDriver``. Stand-ins for the module ``cuda.bindings.driver`` and for
torch's streams and events return at once. It therefore counts the Python code of the package alone, without cuda-bindings,
torch's events, the driver, and polling while the GPU works. Figures are processor time of the process, the minimum over some
runs. ``python benchmarks/peer_cost.py --require "8_ranks_share_of_a_tenth<=1"`` checks the goal: the Python code of a chunk
takes at most a tenth of the time of its copy.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from ctypes import c_void_p
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import harness
import torch
from torch import Tensor

from lightning_freescale.comm.transports.cuda_driver import CudaDriver
from lightning_freescale.comm.transports.peer import TransferProgress
from lightning_freescale.comm.transports.peer_link import PEER_BYTES, Link, SymmetricBuffer
from lightning_freescale.comm.transports.transport import Transfer

RANKS = (2, 4, 8)
_DEVICE = torch.device("cuda", 0)


class _Event:
    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream = handle

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Cuda:
    """The names of ``cuda.bindings.driver`` that ``CudaDriver`` uses."""

    CUDA_VERSION = 13000
    CUdeviceptr = c_void_p  # as with cuda-bindings, an object of a type that is written in C
    CUmemcpyAttributes = SimpleNamespace
    CUmemcpyFlags = SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)
    CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_32=1)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        self._streams = 0
        self.calls = 0

    def CUstreamBatchMemOpParams(self) -> Any:  # noqa: N802 (its name)
        return SimpleNamespace(waitValue=SimpleNamespace())

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.CUDA_VERSION

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:  # noqa: N802
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:  # noqa: N802
        return 0, "context"

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:  # noqa: N802
        self._streams += 1
        return 0, self._streams

    def cuMemcpyBatchAsync(self, *args: Any) -> tuple[int]:  # noqa: N802
        self.calls += 1
        return (0,)

    def cuStreamBatchMemOp(self, *args: Any) -> tuple[int]:  # noqa: N802
        self.calls += 1
        return (0,)


class _Driver(CudaDriver):
    def allocate_pinned(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--peer-bytes", type=int, default=PEER_BYTES, help="memory for chunks (default: the lane's)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of a transfer (default: 200)")
    parser.add_argument("--runs", type=int, default=15, help="number of runs; the fastest counts (default: 15)")
    parser.add_argument("--gigabytes-per-second", type=float, default=400.0, help="rate of a GPU's NVLinks (default: 400)")
    options = parser.parse_args()
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.ExternalStream = _Stream
    figures: dict[str, float] = {}
    print("ranks  chunk MiB  calls/round  us/round  us/chunk  a tenth of the chunk's copy, us")
    for size in RANKS:
        chunk = SymmetricBuffer.largest_chunk(size, options.peer_bytes)
        seconds, calls = _cost(size, chunk, options.rounds, options.runs)
        per_round = 1e6 * seconds / options.rounds
        per_chunk, tenth = per_round / (size - 1), 1e5 * chunk / (1e9 * options.gigabytes_per_second)
        print(f"{size:5}{chunk / 2**20:11.1f}{calls / options.rounds:13.1f}{per_round:10.1f}{per_chunk:10.2f}{tenth:10.2f}")
        figures |= {
            f"{size}_ranks_us_per_round": per_round,
            f"{size}_ranks_us_per_chunk": per_chunk,
            f"{size}_ranks_share_of_a_tenth": per_chunk / tenth,
        }
    harness.finish(figures, options)


def _cost(size: int, chunk: int, rounds: int, runs: int) -> tuple[float, int]:
    """Return the seconds of a transfer of this many full rounds, including the own part, and its number of driver calls."""
    # these are only addresses: parts of a byte that seem long, and one buffer for all ranks
    outgoing, incoming = (torch.empty(1, dtype=torch.uint8).expand(rounds * chunk) for _ in range(2))
    transfer = Transfer("all_to_all", [outgoing] * size, [incoming] * size, 0, _DEVICE, timedelta(0), 0)
    buffers = [torch.empty(SymmetricBuffer.size_bytes(size, chunk), dtype=torch.uint8)] * size
    cuda = _Cuda()
    link = Link(_Driver(_DEVICE, cuda), SymmetricBuffer(0, buffers, chunk), list(range(size)))
    least = float("inf")
    gc.disable()
    for _ in range(runs):
        cuda.calls = 0
        begun = time.process_time()
        progress = TransferProgress(link, transfer)
        while not progress.is_done:
            progress.advance()
        least = min(least, time.process_time() - begun)
    gc.enable()
    return least, cuda.calls


if __name__ == "__main__":
    main()
