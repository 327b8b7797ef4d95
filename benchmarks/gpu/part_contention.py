"""Cost of transfers for the compute beside them on one GPU: by streaming multiprocessors, through the host, by copy engines.

This part needs torch, numpy and this repository. Without a GPU it measures the host transport alone, with small sizes on the
CPU.

A matrix product and the jagged attention of HSTU (forward and backward) run alone and beside each transfer, in turns:

sm_copy      a kernel of 24 thread blocks that copies on the GPU, as a replacement for a collective of NCCL
host, peer   all-to-alls over the package's process group, by these transports, with a second process on the same GPU
copy_engine  copies to and from pinned memory, both directions at once
symm_mem     copies out of the other process's symmetric memory
peer_copy    copies to a second GPU, if there is one

A slow-down is relative to the time alone in the same round, median over the rounds. The time alone relative to its median shows
the noise. GB/s are the bytes that the kernel copies, that go to the peer, or that go in each direction. The part also compares
the process group with gloo, and the profiler lists the work of the GPU in one step of each transfer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import hour_report
import sm_free_measure
import sm_free_plan
import torch
import two_ranks_pair

SECONDS = 50.0  # limit of one transfer; if it hangs, the limit of the part leaves time for the others
NO_NCCL = (
    "NCCL supports one rank per GPU, and a group of one rank sends nothing: sm_copy, which uses as many thread blocks, "
    "replaces it"
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = hour_report.options(__doc__, arguments)
    report = hour_report.Report("contention", options.out)
    plan = sm_free_plan.of_size(torch.cuda.is_available(), options.quick)
    _lane(report, plan, "host")
    for name in ("sm_copy", "copy_engine"):
        _alone(report, plan, name)
    if (devices := torch.cuda.device_count()) < 2:  # without this check, two processes would start only to detect this
        report.skip("peer_copy", f"a copy between devices needs two devices, but torch sees {devices}")
    else:
        _alone(report, plan, "peer_copy")
    if plan.on_gpu:
        report.take("symm_mem", two_ranks_pair.run(sm_free_measure.symmetric, plan, timeout=SECONDS))
    else:
        report.skip("symm_mem", "symmetric memory requires a CUDA device")
    _lane(report, plan, "peer")  # last, because it could make the GPU unusable for the others
    report.skip("nccl", NO_NCCL if plan.on_gpu else "no CUDA device")
    report.end()


def _lane(report: hour_report.Report, plan: sm_free_plan.Plan, transport: str) -> None:
    if reason := two_ranks_pair.lacking(transport):
        report.skip(transport, reason)
    else:
        report.take(transport, two_ranks_pair.run(sm_free_measure.lane, plan, transport, timeout=SECONDS))


def _alone(report: hour_report.Report, plan: sm_free_plan.Plan, name: str) -> None:
    if plan.on_gpu:
        report.take(name, two_ranks_pair.run(sm_free_measure.alone, plan, name, timeout=SECONDS))
    else:
        report.skip(name, "no CUDA device")


if __name__ == "__main__":
    main()
