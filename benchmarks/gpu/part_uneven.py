"""Exchanges of equal and of uneven parts beside compute, on one GPU and between two.

An exchange sends half of its bytes to the peer, or three quarters. A transport that pads all parts to the length of the largest
one takes longer in the second case. The columns are those of the part ``contention``, and each transport has both exchanges.

Between two GPUs, the part compares ``host``, ``peer``, ``nccl-zero-cta`` and NCCL's kernels (``native``). The profiler counts
the kernels of one step. Two lanes then exchange at once, on one communicator of NCCL with the zero-CTA policy and on one each.
Not tested on several GPUs.

This part needs torch, numpy and this repository. Without a GPU it measures the host transport, with small sizes on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import hour_report
import sm_free_measure
import sm_free_plan
import torch
import two_ranks_pair

SECONDS = 40.0  # limit of one transport
BOTH = (False, True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = hour_report.options(__doc__, arguments)
    report = hour_report.Report("uneven", options.out)
    plan = sm_free_plan.of_size(torch.cuda.is_available(), options.quick)
    if plan.on_gpu:
        plan = replace(plan, window=0.1, rounds=5)
    together = min(torch.cuda.device_count(), 2) if plan.on_gpu else 1
    for transport in ("nccl-zero-cta", "native", "host", "peer"):  # peer last, as in the other parts
        if transport == "native" and together == 1:
            report.skip(transport, "ranks that share a device use gloo")
        elif reason := two_ranks_pair.lacking(transport, together):
            report.skip(transport, reason)
        else:
            measured = two_ranks_pair.run(sm_free_measure.lane, plan, transport, BOTH, timeout=SECONDS, devices=together)
            report.take(transport, measured)
    if reason := two_ranks_pair.lacking("nccl-zero-cta", together):
        report.skip("communicators", reason)
    else:
        measured = two_ranks_pair.run(sm_free_measure.communicators, 32 * sm_free_plan.MIB, timeout=SECONDS, devices=2)
        report.take("communicators", measured)
    report.end()


if __name__ == "__main__":
    main()
