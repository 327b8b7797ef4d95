"""What transfers cost the compute beside them on one GPU: by streaming multiprocessors, through the host, by copy engines.

Run it on a machine with a CUDA GPU: ``python benchmarks/gpu/sm_free.py``; it needs torch, numpy and this repository, and takes
less than five minutes. Without a GPU it runs in small sizes on the CPU and says what it leaves out.

A matrix product and the jagged attention of HSTU (forward and backward) run alone and beside, in turns:

sm_copy      a kernel of --ctas thread blocks that copies on the GPU, the stand-in for a collective of NCCL
host         all-to-alls over the package's process group with a second process on the same GPU
copy_engine  copies to and from pinned memory, both directions at once
peer_copy    copies to a second GPU, if there is one
symm_mem     copies out of the other process's symmetric memory

Slowdowns are of the same round's time alone, medians over the rounds; alone against its median shows the noise. GB/s are what
the kernel copies, what goes to the peer, or what goes each way; "transfer alone" is without compute. The process group is also
compared with gloo, and the profiler lists what the GPU does in one step of every transfer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[depth]) for depth in range(3)]

import harness
import sm_free_measure
import sm_free_pair
import sm_free_plan
import torch

BESIDE = ("alone", "sm_copy", "host", "copy_engine", "peer_copy", "symm_mem")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    plan = sm_free_plan.of_size(torch.cuda.is_available(), options.quick, options.mib, options.ctas, options.rounds)
    figures, notes = sm_free_pair.run(sm_free_measure.main_pair, plan, options.timeout, timeout=options.timeout)
    more, said = symmetric_memory(plan, options.timeout)
    figures |= more
    show(plan, figures, notes + said)
    options.require.append(f"equal_cases>={figures['cases']}")  # a group that is wrong is no group
    harness.finish(figures, options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes and three rounds")
    add("--rounds", type=int, help="turns of every variant (default: 9)")
    add("--ctas", type=int, default=24, help="thread blocks of sm_copy (default: 24)")
    add("--mib", type=int, help="MiB of a transfer (default: 64; 16 if quick, 1 without a GPU)")
    add("--timeout", type=float, default=150.0, help="seconds that each of the two parts may take (default: 150)")
    options = parser.parse_args(arguments)
    for name in ("rounds", "ctas", "mib", "timeout"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name} {getattr(options, name)}: give a positive number")
    return options


def symmetric_memory(plan: sm_free_plan.Plan, timeout: float) -> tuple[sm_free_measure.Figures, list[str]]:
    """In processes of its own: where it fails, it may leave them unusable."""
    if not plan.on_gpu:
        return {}, ["skipped: symm_mem: no CUDA device, and symmetric memory is on CUDA devices only"]
    try:
        return sm_free_pair.run(sm_free_measure.symmetric_pair, plan, timeout=timeout)
    except Exception as error:  # torch refuses it for many reasons: driver, container, GPU
        return {}, [f"skipped: symm_mem: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"]


def show(plan: sm_free_plan.Plan, figures: sm_free_measure.Figures, notes: list[str]) -> None:
    device = torch.cuda.get_device_name() if plan.on_gpu else "CPU, which tells nothing about a GPU"
    print(f"{device}; torch {torch.__version__}; {plan.rounds} rounds; transfers of {plan.nbytes // 2**20} MiB")
    print(f"gemm: {plan.gemm} cubed; attention: {plan.histories} histories of up to {plan.longest} items", end=", ")
    print(f"forward and backward; both in {'bfloat16' if plan.on_gpu else 'float32'}")
    print(f"{'compute':<12}{'beside':<14}{'ms':>9}{'slowdown':>10}{'half within':>15}{'GB/s':>9}{'transfer alone':>16}")
    for compute in ("gemm", "attention"):
        for beside in BESIDE:
            if f"{compute}_{beside}_ms" in figures:
                _show_row(compute, beside, figures)
    print(*notes, sep="\n")
    print(f"cases equal to gloo: {figures['equal_cases']} of {figures['cases']}")
    if "host_kernels" in figures:
        print(f"kernels launched by the host transport: {figures['host_kernels']:.0f}")


def _show_row(compute: str, beside: str, figures: sm_free_measure.Figures) -> None:
    name = f"{compute}_{beside}"
    half = f"{figures[f'{name}_slowdown_low']:.3f} - {figures[f'{name}_slowdown_high']:.3f}"
    print(f"{compute:<12}{beside:<14}{figures[f'{name}_ms']:9.3f}{figures[f'{name}_slowdown']:10.3f}{half:>15}", end="")
    rates = f"{figures[f'{name}_gbps']:9.2f}{figures[f'{beside}_gbps']:16.2f}" if beside != "alone" else ""
    print(rates)


if __name__ == "__main__":
    main()
