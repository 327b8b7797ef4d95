"""Effect of overlap on a model of realistic size on one GPU: step times with and without, in rounds that take turns.

Run it on a machine with a CUDA GPU: ``python benchmarks/gpu/part_model.py --out DIR``. One rank trains in bf16, on histories of
long-tailed lengths and a table of millions of items:

hstu     the reference model of examples/: attention history by history, in thousands of small kernels
sasrec   attention over padded histories, in few kernels

One rank exchanges no rows. Overlap adds its host work, and saves waits of the host and early copies. ``over_plain`` near 1 is
the best possible result; only more ranks can show a gain.

Figures are medians over the rounds, with the lowest and the highest. ``over_plain`` compares step times of the same round. The
bubble and its parts come from BubbleProfiler in a separate fit, which does not slow the step times. ``gpu_idle``, the share of
the time in which the GPU ran nothing, comes from three steps under torch.profiler. ``host_busy`` is the processor time of the
training thread over the wall time: near 1, a step waits for the host.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
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
    from one_rank_fit import Fit, Steps

MODELS = ("sasrec", "hstu")  # the longer one last, so a run that is cut off has the other one
WAYS = {"plain": False, "overlap": True}


def main(arguments: Sequence[str] | None = None) -> None:
    options = hour_report.options(__doc__, arguments)
    report = Report("model", options.out)
    one_rank.demand(report)
    with one_rank.one_rank() as device:
        measure(report, device, options.quick)
    report.end()


def measure(report: Report, device: torch.device, quick: bool) -> None:
    """Run rounds of all variants for each model, and profile them."""
    from one_rank_fit import Steps

    on_gpu = device.type == "cuda"
    rounds = 2 if quick else 5
    timed = Steps(warmup=6, timed=15) if on_gpu and not quick else Steps(4, 6)
    trials = _Trials(device, quick)
    if not on_gpu:
        report.skip("gpu_idle", "no CUDA device")
    for model in MODELS:
        with report.check(f"{model}, step times"):
            trials.fit(model, "overlap", Steps(1, 1))  # warm-up of the process
            found: dict[str, list[Fit]] = defaultdict(list)
            for turn in range(rounds):
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    fit = trials.fit(model, way, timed)
                    found[way].append(fit)
                    report.row(model=model, way=way, round=turn, step_ms=fit.step_ms, host_busy=_busy(fit))
            _compare(report, model, found)
        for way in WAYS:
            with report.check(f"{model}, {way}, where the time goes"):
                _explain(report, trials, model, way)


def _compare(report: Report, model: str, found: dict[str, list[Fit]]) -> None:
    """Add a row for each variant, and the figures."""
    ratios = [overlapped.step_ms / plain.step_ms for overlapped, plain in zip(found["overlap"], found["plain"])]
    for way, fits in found.items():
        times = [fit.step_ms for fit in fits]
        over = {"over_plain": median(ratios), "over_low": min(ratios), "over_high": max(ratios)}
        spread = {"step_ms": median(times), "low": min(times), "high": max(times), "rounds": len(times)}
        busy = {"host_busy": median(_busy(fit) for fit in fits), "engine_cpu_ms": median(fit.cpu_ms["engine"] for fit in fits)}
        report.row(model=model, way=way, **spread, **busy, **(over if way == "overlap" else dict.fromkeys(over)))
        report.figure(f"{model}_{way}_step_ms", median(times))
    for name, ratio in (("over_plain", median(ratios)), ("over_low", min(ratios)), ("over_high", max(ratios))):
        report.figure(f"{model}_{name}", ratio)
    known = [fit.predicted or 0.0 for fit in found["overlap"]]
    if min(known) <= 0.5:
        report.fail(
            f"{model}, overlap", f"the shares of lookups whose ids were known ahead are {known}: nothing was overlapped"
        )


def _explain(report: Report, trials: _Trials, model: str, way: str) -> None:
    from one_rank_fit import Steps

    from lightning_freescale import BubbleProfiler

    steps = Steps(warmup=5, timed=16)
    with tempfile.TemporaryDirectory(prefix="bubbles-") as folder:  # its files contain no more than the row
        profiler = BubbleProfiler(folder, every_n_steps=4, torch_profiler_steps=3, verbose=False)
        trials.fit(model, way, steps, (profiler,))
    if profiler.report is None:
        raise RuntimeError("BubbleProfiler has no report")
    seen = profiler.report.device_idle
    idle: dict[str, Any] = {"gpu_idle": None if seen is None else seen["idle"][0]}
    if idle["gpu_idle"] is not None:
        report.figure(f"{model}_{way}_gpu_idle", idle["gpu_idle"])
    elif trials.device.type == "cuda":
        report.skip(f"{model}, {way}, gpu_idle", "torch.profiler saw nothing on the GPU")
    shares = {name: float(share) for name, share in profiler.report.shares.items()}
    report.row(model=model, way=way, bubble=float(profiler.report.bubble), **shares, **idle)
    report.figure(f"{model}_{way}_bubble", float(profiler.report.bubble))
    print(profiler.report, flush=True)


def _busy(fit: Fit) -> float:
    return fit.cpu_ms["training"] / fit.step_ms


class _Trials:
    """Fits on the same batches."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        from one_rank_workload import of_size

        self.device = device
        self._load = of_size(device.type == "cuda", quick)
        self._batches: list[Any] = []

    def fit(self, model: str, way: str, steps: Steps, callbacks: tuple = ()) -> Fit:
        from one_rank_fit import fit
        from one_rank_workload import HSTU, SASRec, batches

        if len(self._batches) < steps.total:
            self._batches = batches(self._load, steps.total, self.device.type == "cuda")
        torch.manual_seed(0)
        module = {"hstu": HSTU, "sasrec": SASRec}[model](self._load)
        return fit(module, self._batches[: steps.total], steps, self.device, WAYS[way], callbacks)


if __name__ == "__main__":
    main()
