"""Compute alone and beside one transfer, in turns; functions for the two processes of :mod:`two_ranks_pair`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import sm_free_checks
import sm_free_compute
import sm_free_traffic
import torch
import torch.distributed as dist
from hour_report import Skip
from sm_free_plan import MIB, Plan
from sm_free_running import Running, Step
from two_ranks_pair import Rank

Figures = dict[str, float]
Taken = dict[tuple[str, str], list[float]]
ALONE = {
    "sm_copy": sm_free_traffic.sm_copying,
    "copy_engine": sm_free_traffic.copy_engines,
    "peer_copy": sm_free_traffic.peer_copies,
}


def lane(rank: Rank, plan: Plan, transport: str, uneven: Sequence[bool] = (False,)) -> None:
    """Measure the package's process group: correctness, slow-down of compute, and work of the GPU. Collective.

    ``uneven`` states for each exchange whether its parts are uneven.
    """
    rank.init_gloo()
    group = rank.make_lane(transport)
    cases, differing = sm_free_checks.equality(plan, group)
    _say_equality(rank, transport, cases, differing)
    for parts in uneven:
        exchanges = sm_free_traffic.Exchanges(plan, group, parts)
        if rank.rank:
            exchanges.serve()
        else:
            _measure(rank, plan, f"{transport}_uneven" if parts else transport, exchanges.step)
            exchanges.stop()


def alone(rank: Rank, plan: Plan, name: str) -> None:
    """Measure a transfer that one process makes; the other one is idle."""
    if rank.rank:
        return
    try:
        step, note = ALONE[name](plan)
    except Skip as reason:
        rank.say(("skip", {"what": name, "why": str(reason)}))
    else:
        _measure(rank, plan, name, step, note)


def symmetric(rank: Rank, plan: Plan) -> None:
    """Measure copies out of the other process's symmetric memory. Collective."""
    rank.init_gloo()
    step, _alive = _symmetric(plan)
    if rank.rank == 0:
        _measure(rank, plan, "symm_mem", step)
    dist.barrier()  # the peer's memory must live until here


def communicators(rank: Rank, nbytes: int) -> None:
    """Measure all-to-alls of two lanes at once on NCCL's copy engines: on one communicator, and on one per lane. Collective."""
    from lightning_freescale.comm.transports.nccl import NcclCommunicator

    rank.init_gloo()
    made, free = [], [torch.cuda.mem_get_info()[0]]
    for lane in range(2):
        store = dist.PrefixStore(f"lane {lane}", dist.distributed_c10d._get_default_store())
        device = torch.device("cuda", rank.device)
        made.append(NcclCommunicator(rank.rank, 2, store, timedelta(seconds=rank.timeout), device))
        free.append(torch.cuda.mem_get_info()[0])
    streams = [torch.cuda.Stream() for _ in made]
    for name, of_lanes in (("one communicator", [made[0]] * 2), ("one per lane", made)):

        def exchange(of_lanes: list[NcclCommunicator] = of_lanes) -> None:
            for place, (communicator, stream) in enumerate(zip(of_lanes, streams)):
                sent, received = communicator.window[:, place * nbytes : (place + 1) * nbytes]
                communicator.all_to_all(stream, received, sent)  # in the same order on both ranks
            torch.cuda.synchronize()

        kernels, shown = sm_free_checks.kernels(exchange)
        ms = 1000 * float(np.median([_seconds(exchange) for _ in range(20)]))
        rank.say(("row", {"lanes": name, "ms": ms, "kernels in a step": kernels, "all that the GPU does": shown}))
        rank.say(("figure", {"name": f"{name.replace(' ', '_')}_ms", "value": ms}))
    window = made[1].window.nbytes
    rank.say(("figure", {"name": "communicator_mib", "value": (free[1] - free[2] - window) / MIB}))


def _seconds(exchange: Callable[[], None]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    exchange()
    return time.perf_counter() - begin


def turns(plan: Plan, works: dict[str, Callable[[], object]], beside: str, step: Step) -> Figures:
    """Return the figures of all compute alone and beside the step; both take turns, and the first round warms up."""
    stream = torch.cuda.Stream() if plan.on_gpu else None
    if plan.on_gpu:
        torch.cuda.synchronize()  # the inputs of steps and works were written on another stream
    times = {name: _count(plan, work, stream) for name, work in works.items()}
    taken: Taken = defaultdict(list)
    rates: Taken = defaultdict(list)
    for _ in range(plan.rounds + 1):
        for compute, work in works.items():
            for name in ("alone", beside):
                with Running(step) if name == beside else nullcontext() as running:
                    timing = sm_free_compute.timed(work, times[compute], stream)
                taken[compute, name].append(timing.ms)
                if running:
                    rates[f"{compute}_", name].append(running.gbps(timing.begin, timing.end))
        rates["", beside].append(_rate(step, plan.window))
    return make_figures(taken, rates)


def make_figures(taken: Taken, rates: Taken) -> Figures:
    """Return medians; a slow-down is relative to the time alone in its round, and ``alone`` to its median, which is noise."""
    figures: Figures = {f"{start}{beside}_gbps": float(np.median(rate[1:])) for (start, beside), rate in rates.items()}
    for (compute, beside), ms in taken.items():
        slowdown = np.divide(ms, taken[compute, "alone"] if beside != "alone" else np.median(ms[1:]))[1:]
        low, middle, high = (float(value) for value in np.percentile(slowdown, [25, 50, 75]))
        name = f"{compute}_{beside}"
        figures |= {f"{name}_ms": float(np.median(ms[1:])), f"{name}_slowdown": middle}
        figures |= {f"{name}_slowdown_low": low, f"{name}_slowdown_high": high}
    return figures


def _measure(rank: Rank, plan: Plan, beside: str, step: Step, note: str = "") -> None:
    works = sm_free_compute.works(plan)
    figures = turns(plan, works, beside, step)
    for compute in works:
        rank.say(("row", _row(plan, compute, beside, figures)))
    for name, value in figures.items():
        if beside in name:  # the time alone is measured again beside each transfer
            rank.say(("figure", {"name": name, "value": value}))
    _say_kernels(rank, plan, works["gemm"], beside, step, note)


def _row(plan: Plan, compute: str, beside: str, figures: Figures) -> dict[str, Any]:
    name = f"{compute}_{beside}"
    half = {
        each: f"{figures[f'{compute}_{each}_slowdown_low']:.3f} - {figures[f'{compute}_{each}_slowdown_high']:.3f}"
        for each in ("alone", beside)
    }
    return {
        "compute": compute,
        "beside": beside,
        "on": "GPU" if plan.on_gpu else "CPU",
        "MiB": plan.nbytes // MIB,
        "ms alone": figures[f"{compute}_alone_ms"],
        "half of it within": half["alone"],
        "ms beside": figures[f"{name}_ms"],
        "slow-down": round(figures[f"{name}_slowdown"], 4),
        "half within": half[beside],
        "GB/s": figures[f"{name}_gbps"],
        "GB/s without compute": figures[f"{beside}_gbps"],
    }


def _say_equality(rank: Rank, transport: str, cases: int, differing: list[str]) -> None:
    rank.say(("row", {"transport": transport, "collectives": cases, "equal to gloo": cases - len(differing)}))
    rank.say(("figure", {"name": f"{transport}_equal_share", "value": 1 - len(differing) / cases}))
    if differing:
        rank.say(("fail", {"what": f"{transport} equal to gloo", "error": "differs in " + ", ".join(differing)}))


def _say_kernels(rank: Rank, plan: Plan, work: Callable[[], object], beside: str, step: Step, note: str) -> None:
    try:
        count, shown = sm_free_checks.proof(plan, work, beside, step)
    except Skip as reason:
        rank.say(("skip", {"what": f"profile of {beside}", "why": str(reason)}))
        return
    rank.say(("row", {"transfer": beside, "kernels in a step": count, "all that the GPU does": shown, "note": note}))
    rank.say(("figure", {"name": f"{beside}_kernels", "value": float(count)}))


def _count(plan: Plan, work: Callable[[], object], stream: torch.cuda.Stream | None) -> int:
    """Return the number of pieces of work that fill the window."""
    sm_free_compute.timed(work, 1, stream)
    return max(1, round(1000 * plan.window / sm_free_compute.timed(work, 2, stream).ms))


def _rate(step: Step, window: float) -> float:
    with Running(step) as running:
        begin = time.perf_counter()
        time.sleep(window)
        end = time.perf_counter()
    return running.gbps(begin, end)


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
    copies = [(torch.cuda.Stream(), lambda: target.copy_(peer, non_blocking=True))]
    return sm_free_traffic.queued(copies, plan.nbytes), (own, memory)
