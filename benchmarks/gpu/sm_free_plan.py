"""Plan of the benchmark: sizes, and what it skips."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
CTAS = 24  # about as many thread blocks as NCCL gives an all-to-all within a host


@dataclass(frozen=True)
class Plan:
    """Sizes of the compute, of the transfers and of the measurement.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        gemm: rows and columns of the matrices.
        histories: sequences of the attention, a multiple of eight.
        longest: items of the longest sequence.
        heads: heads of the attention.
        dim: numbers per head.
        nbytes: bytes of a transfer, whole MiB.
        ctas: thread blocks of the copy by streaming multiprocessors.
        window: seconds for which the compute runs in a turn.
        rounds: counted turns of each variant.
    """

    device: str
    gemm: int
    histories: int
    longest: int
    heads: int
    dim: int
    nbytes: int
    ctas: int
    window: float
    rounds: int

    @property
    def on_gpu(self) -> bool:
        """True if there is a GPU to measure on."""
        return self.device == "cuda"


def of_size(on_gpu: bool, quick: bool) -> Plan:
    """Return sizes that keep a GPU busy, or small ones."""
    if not on_gpu:
        return Plan("cpu", 192, 16, 128, 2, 32, MIB, CTAS, 0.02, 3)
    if quick:
        return Plan("cuda", 4096, 16, 2048, 4, 128, 16 * MIB, CTAS, 0.1, 3)
    return Plan("cuda", 8192, 64, 4096, 4, 128, 64 * MIB, CTAS, 0.3, 9)
