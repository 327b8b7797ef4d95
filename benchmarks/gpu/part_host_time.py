"""Host time of a step with a GPU, and the idle time of the GPU.

Run it on a machine with a CUDA GPU: ``python benchmarks/gpu/part_host_time.py --out DIR``. A model like SASRec with few
kernels trains on one rank in bf16 with strategy "freescale" in three ways:

plain     overlap="torchrec", TorchRec's own exchange
overlap   the batch contains the ids that are looked up
inline    overlap, but the batch does not contain the ids, so the exchange of a step begins with its lookup

Wall and processor time are those of steps without the profiler, medians over rounds in which the variants take turns. Counts
and idle times are those of steps under torch.profiler over all threads, which slows the host down. Those fits run last, because
torch's profiler of the GPU stays attached to the process. ``after_profiler_ms`` is a step of ``plain`` timed again after them.
Times and counts are per step. Without a GPU, the part reports processor times and torch's operators alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import hour_report
import one_rank
import torch
from hour_report import Report

if TYPE_CHECKING:
    from one_rank_fit import Fit
    from one_rank_trace import Trace

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
    """Measure all variants: rounds of times, then profiles."""
    from one_rank_fit import Steps

    full = device.type == "cuda" and not quick
    if device.type == "cpu":
        for what in ("GPU idle share", "kernels", "launches", "waits of the host", "blocking copies"):
            report.skip(what, ON_GPU)
    timed, profiled = (Steps(10, 30), Steps(4, 4, 20)) if full else (Steps(4, 8), Steps(2, 2, 6))
    train("overlap", Steps(1, 1), device, quick)  # warm-up of the process
    fits: dict[str, list[Fit]] = {variant: [] for variant in VARIANTS}
    for turn in range(5 if full else 2):
        for variant in VARIANTS if turn % 2 == 0 else reversed(VARIANTS):
            fits[variant].append(train(variant, timed, device, quick))
    for variant in VARIANTS:
        with report.check(variant):
            for found in fits[variant]:
                foreseen(report, variant, found)
            show(report, variant, fits[variant], train(variant, profiled, device, quick).trace, device.type == "cuda")
    report.figure("after_profiler_ms", train("plain", timed, device, quick).step_ms)


def train(variant: str, steps: Any, device: torch.device, quick: bool) -> Fit:
    """Train one fit."""
    from one_rank_fit import fit
    from one_rank_workload import SASRec, Unforeseen, batches, of_size, shifted

    load = of_size(device.type == "cuda", quick)
    data = batches(load, steps.total, device.type == "cuda")
    torch.manual_seed(0)
    if variant == "inline":
        return fit(Unforeseen(load), shifted(data), steps, device, overlap=True)
    return fit(SASRec(load), data, steps, device, overlap=variant == "overlap")


def show(report: Report, variant: str, fits: list[Fit], trace: Trace | None, on_gpu: bool) -> None:
    """Add a row of the step, and one for each thread."""
    from one_rank_trace import THREADS, WAITS

    assert trace is not None
    if on_gpu and trace.idle is None:
        report.skip(f"{variant}: what the GPU does", "torch.profiler saw nothing on the GPU")
    seen = on_gpu and trace.idle is not None
    gpu = {"gpu_idle": trace.idle, "kernels": trace.kernels} if seen else {}
    times = [found.step_ms for found in fits]
    step = {"step_ms": median(times), "low": min(times), "high": max(times), "rounds": len(times)}
    report.row(variant=variant, **step, profiled_ms=trace.ms, **gpu)
    for name, value in gpu.items():
        report.figure(f"{variant}_{name}", value)
    for name in ("step_ms", "low", "high"):
        report.figure(f"{variant}_{name}", step[name])
    names = ("operators", "launches", *WAITS, "blocking copies", "waited ms") if seen else ("operators",)
    for thread in THREADS:
        counts = {name: trace.threads[thread].get(name, 0.0) for name in names}
        cpu_ms = median(found.cpu_ms[thread] for found in fits)
        if any(counts.values()) or cpu_ms > 0:
            report.row(variant=variant, thread=thread, cpu_ms=cpu_ms, **counts)
        report.figure(f"{variant}_{thread}_cpu_ms", cpu_ms)
        if seen:
            report.figure(f"{variant}_{thread}_waits", sum(counts[name] for name in WAITS))


def foreseen(report: Report, variant: str, found: Fit) -> None:
    """Record a failure if the ids were predicted in ``inline``, or were not in ``overlap``."""
    expected = {"plain": found.predicted is None, "overlap": (found.predicted or 0) > 0.5, "inline": found.predicted == 0}
    if not expected[variant]:
        report.fail(variant, f"the share of lookups whose ids were known ahead is {found.predicted}, not that of this variant")


if __name__ == "__main__":
    main()
