"""Compute alone and beside each transfer, in turns."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import sm_free_checks
import sm_free_compute
import torch
import torch.distributed as dist
from sm_free_pair import make_group
from sm_free_plan import Plan, Skipped
from sm_free_running import Running, Step
from sm_free_traffic import Host, queued, transfers

Figures = dict[str, float]
Taken = dict[tuple[str, str], list[float]]


def main_pair(rank: int, plan: Plan, timeout: float) -> tuple[Figures, list[str]] | None:
    """Everything that the package's process group takes part in. Collective."""
    group = make_group(timeout)
    cases, differing = sm_free_checks.equality(plan, group)
    host = Host(plan, group)
    if rank:
        host.serve()
        return None
    steps, notes = transfers(plan, host)
    works = sm_free_compute.works(plan)
    figures = turns(plan, works, steps) | {"cases": cases, "equal_cases": cases - len(differing)}
    proven, said = _prove(plan, works["gemm"], steps)
    host.stop()
    return figures | proven, notes + said + [f"differs from gloo: {name}" for name in differing]


def symmetric_pair(rank: int, plan: Plan) -> tuple[Figures, list[str]] | None:
    """Copies out of the other process's symmetric memory. Collective."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # both processes are on one GPU
    step, _alive = _symmetric(plan)
    answer = None
    if rank == 0:
        works = sm_free_compute.works(plan)
        figures = turns(plan, works, {"symm_mem": step})
        proven, said = _prove(plan, works["gemm"], {"symm_mem": step})
        answer = ({name: value for name, value in (figures | proven).items() if "symm_mem" in name}, said)
    dist.barrier()  # the peer's memory must live until here
    return answer


def turns(plan: Plan, works: dict[str, Callable[[], object]], steps: dict[str, Step]) -> Figures:
    """The figures of every compute beside every step; the variants take turns, and the first round warms up."""
    stream = torch.cuda.Stream() if plan.on_gpu else None
    if plan.on_gpu:
        torch.cuda.synchronize()  # what the steps and the works read was written on another stream
    times = {name: _count(plan, work, stream) for name, work in works.items()}
    taken: Taken = defaultdict(list)
    rates: Taken = defaultdict(list)
    for _ in range(plan.rounds + 1):
        for compute, work in works.items():
            for beside, step in {"alone": None, **steps}.items():
                with Running(step) if step else nullcontext() as running:
                    timing = sm_free_compute.timed(work, times[compute], stream)
                taken[compute, beside].append(timing.ms)
                if running:
                    rates[f"{compute}_", beside].append(running.gbps(timing.begin, timing.end))
        for beside, step in steps.items():
            rates["", beside].append(_rate(step, plan.window))
    return _figures(taken, rates)


def _figures(taken: Taken, rates: Taken) -> Figures:
    figures: Figures = {f"{start}{beside}_gbps": float(np.median(rate[1:])) for (start, beside), rate in rates.items()}
    for (compute, beside), ms in taken.items():
        slowdown = np.divide(ms, taken[compute, "alone"] if beside != "alone" else np.median(ms[1:]))[1:]
        low, middle, high = (float(value) for value in np.percentile(slowdown, [25, 50, 75]))
        name = f"{compute}_{beside}"
        figures |= {f"{name}_ms": float(np.median(ms[1:])), f"{name}_slowdown": middle}
        figures |= {f"{name}_slowdown_low": low, f"{name}_slowdown_high": high}
    return figures


def _count(plan: Plan, work: Callable[[], object], stream: torch.cuda.Stream | None) -> int:
    """How many pieces of work fill the window."""
    sm_free_compute.timed(work, 1, stream)
    return max(1, round(1000 * plan.window / sm_free_compute.timed(work, 2, stream).ms))


def _rate(step: Step, window: float) -> float:
    with Running(step) as running:
        begin = time.perf_counter()
        time.sleep(window)
        end = time.perf_counter()
    return running.gbps(begin, end)


def _prove(plan: Plan, work: Callable[[], object], steps: dict[str, Step]) -> tuple[Figures, list[str]]:
    try:
        found = sm_free_checks.proof(plan, work, steps)
    except Skipped as reason:
        return {}, [f"skipped: profiler: {reason}"]
    figures = {f"{name}_kernels": float(count) for name, (count, _) in found.items()}
    return figures, [f"the GPU does in one step of {name}: {shown}" for name, (_, shown) in found.items()]


def _symmetric(plan: Plan) -> tuple[Step, Any]:
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(plan.nbytes, dtype=torch.uint8, device="cuda:0").fill_(dist.get_rank())
    memory = symmetric.rendezvous(own, dist.group.WORLD.group_name)
    peer = memory.get_buffer(1 - dist.get_rank(), own.shape, own.dtype)
    torch.cuda.synchronize()
    dist.barrier()
    target = torch.empty_like(peer)
    target.copy_(peer)
    if not bool((target == 1 - dist.get_rank()).all()):
        raise RuntimeError("the peer's symmetric memory does not hold what the peer wrote")
    return queued([(torch.cuda.Stream(), lambda: target.copy_(peer, non_blocking=True))], plan.nbytes), (own, memory)
