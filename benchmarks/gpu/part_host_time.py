"""What a step costs the host of a GPU, and how long the GPU waits for it.

Run it on a machine with a CUDA GPU: ``python benchmarks/gpu/part_host_time.py --out DIR``. A SASRec-like model with few
kernels, on one rank in bf16, trains with strategy "freescale" in three ways:

plain     exchange="torchrec", TorchRec's own exchange
overlap   the ids of the next batch stand in it
inline    overlap, but the ids do not stand in the batch, so the exchange of a step begins with its lookup

Wall and processor time are of steps without the profiler; what is counted, and how long the GPU ran nothing, is of steps under
torch.profiler over all threads, which slows the host down. Times and counts are per step. Without a GPU there are processor
times and torch's operators alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import hour_report
import one_rank
import torch
from hour_report import Report

if TYPE_CHECKING:
    from one_rank_fit import Fit

VARIANTS = ("plain", "overlap", "inline")
ON_GPU = "no CUDA device, so nothing waits for one"


def main(arguments: Sequence[str] | None = None) -> None:
    options = hour_report.options(__doc__, arguments)
    report = Report("host_time", options.out)
    one_rank.demand(report)
    with one_rank.one_rank() as device:
        measure(report, device, options.quick)
    report.end()


def measure(report: Report, device: torch.device, quick: bool) -> None:
    """All variants, after one another."""
    from one_rank_fit import Steps

    if device.type == "cpu":
        for what in ("GPU idle share", "kernels", "launches", "waits of the host", "blocking copies"):
            report.skip(what, ON_GPU)
    steps = Steps(warmup=10, timed=30, profiled=20) if device.type == "cuda" and not quick else Steps(4, 8, 6)
    for variant in VARIANTS:
        with report.check(variant):
            found = train(variant, steps, device, quick)
            show(report, variant, found, device.type == "cuda")
            foreseen(report, variant, found)


def train(variant: str, steps: Any, device: torch.device, quick: bool) -> Fit:
    """One fit."""
    from one_rank_fit import fit
    from one_rank_workload import SASRec, Unforeseen, batches, of_size, shifted

    load = of_size(device.type == "cuda", quick)
    data = batches(load, steps.total, device.type == "cuda")
    torch.manual_seed(0)
    if variant == "inline":
        return fit(Unforeseen(load), shifted(data), steps, device, overlap=True)
    return fit(SASRec(load), data, steps, device, overlap=variant == "overlap")


def show(report: Report, variant: str, found: Fit, on_gpu: bool) -> None:
    """A row of the step, and one for every thread."""
    from one_rank_trace import THREADS, WAITS

    assert found.trace is not None
    if on_gpu and found.trace.idle is None:
        report.skip(f"{variant}: what the GPU does", "torch.profiler saw nothing on the GPU")
    seen = on_gpu and found.trace.idle is not None
    gpu = {"gpu_idle": found.trace.idle, "kernels": found.trace.kernels} if seen else {}
    report.row(variant=variant, step_ms=found.step_ms, profiled_ms=found.trace.ms, **gpu)
    for name, value in gpu.items():
        report.figure(f"{variant}_{name}", value)
    report.figure(f"{variant}_step_ms", found.step_ms)
    names = ("operators", "launches", *WAITS, "blocking copies", "waited ms") if seen else ("operators",)
    for thread in THREADS:
        counts = {name: found.trace.threads[thread].get(name, 0.0) for name in names}
        if any(counts.values()) or found.cpu_ms[thread] > 0:
            report.row(variant=variant, thread=thread, cpu_ms=found.cpu_ms[thread], **counts)
        report.figure(f"{variant}_{thread}_cpu_ms", found.cpu_ms[thread])
        if seen:
            report.figure(f"{variant}_{thread}_waits", sum(counts[name] for name in WAITS))


def foreseen(report: Report, variant: str, found: Fit) -> None:
    """A failure if the variant is not what it is called."""
    expected = {"plain": found.predicted is None, "overlap": (found.predicted or 0) > 0.5, "inline": found.predicted == 0}
    if not expected[variant]:
        report.fail(variant, f"the share of lookups whose ids were known ahead is {found.predicted}: this is another way")


if __name__ == "__main__":
    main()
