"""A copy by a few thread blocks on streaming multiprocessors, which affects compute as a collective of NCCL does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hour_report import Skip
from torch import Tensor

Launch = Callable[[Tensor, Tensor, int], None]  # copies the first tensor to the second, so many times
THREADS = 512
SOURCE = """
extern "C" __global__ void __launch_bounds__(512) sm_copy(const uint4* source, uint4* target, int count, int repeats) {
    for (int repeat = 0; repeat < repeats; ++repeat)
        for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
            target[at] = source[at];
}
"""


def sm_copy(ctas: int) -> tuple[str, Launch]:
    """Return a kernel of ``ctas`` thread blocks, and the name of the compiler that built it. It takes int32 of whole MiB.

    Raises:
        Skip: neither Triton nor NVRTC can build it.
    """
    failures = []
    for compiler, build in (("Triton", _triton), ("NVRTC", _nvrtc)):
        try:
            launch = build(ctas)
            _try(launch)
        except Exception as error:
            failures.append(f"{compiler}: {type(error).__name__}: {str(error).strip()[:200]}")
        else:
            return compiler, launch
    raise Skip("no kernel could be built; " + "; ".join(failures))


def _triton(ctas: int) -> Launch:
    import sm_free_triton

    def launch(source: Tensor, target: Tensor, repeats: int) -> None:
        sm_free_triton.sm_copy[(ctas,)](source, target, source.numel(), repeats, BLOCK=8 * THREADS, num_warps=THREADS // 32)

    return launch


def _nvrtc(ctas: int) -> Launch:
    kernel = torch.cuda._compile_kernel(SOURCE, "sm_copy")

    def launch(source: Tensor, target: Tensor, repeats: int) -> None:
        kernel(grid=(ctas, 1, 1), block=(THREADS, 1, 1), args=[source, target, source.numel() // 4, repeats])

    return launch


def _try(launch: Launch) -> None:
    source = torch.arange(2**18, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    launch(source, target, 2)
    if not torch.equal(source, target):
        raise RuntimeError("the kernel ran but did not copy")
