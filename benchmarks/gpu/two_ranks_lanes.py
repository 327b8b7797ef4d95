"""Package's process group between two processes on one device: bytes, rates, and a killed rank."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from threading import Timer
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sm_free_checks import late
from torch import Tensor
from two_ranks_pair import Rank

MIB = 2**20
DIES_AFTER = 0.3  # seconds, in which some exchanges go well
LONGEST = 20.0  # seconds for which exchanges may succeed although a rank should have ended


class Sizes(NamedTuple):
    """Sizes and numbers of exchanges.

    Attributes:
        nbytes: bytes that go to the peer, by exchange.
        total: bytes that a rate is measured over.
    """

    nbytes: tuple[int, ...]
    total: int


def of_size(on_gpu: bool, quick: bool) -> Sizes:
    """Return sizes that keep a transport busy, or small ones. One is a single message, and one is no whole number of chunks."""
    if not on_gpu:
        return Sizes((4096, 2 * MIB + 40), 32 * MIB)
    large = () if quick else (256 * MIB,)
    return Sizes((4096, 2 * MIB + 40, 64 * MIB, *large), 1024 * MIB if quick else 2048 * MIB)


def lane(rank: Rank, transport: str, sizes: Sizes) -> None:
    """Compare with gloo at each size; then rank 1 is killed. Collective."""
    rank.init_gloo()
    group = rank.make_lane(transport)
    for nbytes in sizes.nbytes:
        _compare(rank, group, transport, nbytes, sizes.total)
    _survive(rank, group, transport, max(sizes.nbytes))


def _compare(rank: Rank, group: dist.ProcessGroup, transport: str, nbytes: int, total: int) -> None:
    sent = [nbytes // 4 + rank.rank, nbytes]  # own part and peer's; the ranks keep parts of other lengths
    received = [sent[0], nbytes]
    if rank.rank:
        sent, received = sent[::-1], received[::-1]
    draw = torch.Generator().manual_seed(rank.rank)
    values = torch.randint(0, 256, (sum(sent),), dtype=torch.uint8, generator=draw)
    expected = _exchange(values, sent, received, None)
    found = _exchange(late(values, torch.cuda.is_available()), sent, received, group)
    equal: list[Any] = [None, None]
    dist.all_gather_object(equal, bool(torch.equal(found.cpu(), expected)))
    repeats = max(3, min(20, total // nbytes))
    ms = _median_ms(values, sent, received, group, repeats)
    gloo_ms = _gloo_ms(rank, values, sent, received, repeats)
    gloo = {"gloo: ms": gloo_ms, "gloo: GB/s": None if isinstance(gloo_ms, str) else nbytes / gloo_ms / 1e6}
    on = "GPU" if torch.cuda.is_available() else "CPU"
    cells = {"transport": transport, "on": on, "to the peer": _length(nbytes)}
    rank.say(("row", cells | {"equal to gloo": all(equal), "ms": ms, "GB/s": nbytes / ms / 1e6} | gloo))
    rank.say(("figure", {"name": f"{transport}_{nbytes}_bytes_gbps", "value": nbytes / ms / 1e6}))
    rank.say(("figure", {"name": f"{transport}_{nbytes}_bytes_ms", "value": ms}))
    if not isinstance(gloo_ms, str):
        rank.say(("figure", {"name": f"{transport}_{nbytes}_bytes_gloo_ms", "value": gloo_ms}))
    if not all(equal):
        wrong = " and ".join(f"rank {one}" for one, same in enumerate(equal) if not same)
        rank.say(("fail", {"what": f"{transport}, {_length(nbytes)}", "error": f"{wrong} received other bytes than by gloo"}))


def _survive(rank: Rank, group: dist.ProcessGroup | None, transport: str, nbytes: int) -> None:
    """Kill rank 1 during a series of exchanges; rank 0 reports the time until it noticed."""
    values = torch.zeros(2 * nbytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    if rank.rank:
        Timer(DIES_AFTER, rank.die).start()
    begun = going_well = time.monotonic()
    noticed = None
    while noticed is None and going_well < begun + LONGEST:
        try:
            _exchange(values, [nbytes] * 2, [nbytes] * 2, group)
            _wait_for_gpu()
            going_well = time.monotonic()
        except Exception as error:  # torch's groups and ours raise different types
            noticed = error
    say_death(rank, transport, "process group", time.monotonic() - going_well, noticed)


def say_death(rank: Rank, transport: str, under: str, seconds: float, noticed: Exception | None) -> None:
    """Report the end of the surviving rank, ``seconds`` after the last successful exchange."""
    on = "GPU" if torch.cuda.is_available() else "CPU"
    said = str(noticed).strip().splitlines()[0][:300] if noticed is not None and str(noticed).strip() else repr(noticed)
    text = said if noticed is None else f"{type(noticed).__name__}: {said}"
    cells = {"a rank is killed under": under, "transport": transport, "on": on}
    rank.say(("row", cells | {"timeout s": rank.timeout, "noticed after s": seconds, "error": text}))
    rank.say(("figure", {"name": f"{transport}_{under.replace(' ', '_')}_killed_seconds", "value": seconds}))
    if noticed is None or seconds > rank.timeout + 15:  # waiting for the GPU takes seconds, too
        error = f"no error within the timeout of {rank.timeout:g} s: {said} after {seconds:.1f} s"
        rank.say(("fail", {"what": f"a killed rank, {transport}, {under}", "error": error}))


def _gloo_ms(rank: Rank, values: Tensor, sent: list[int], received: list[int], repeats: int) -> float | str:
    """Return the milliseconds of an exchange by gloo, or its error: CUDA tensors may fail on one rank alone. Collective.

    It has a separate group, so that a failing rank and a waiting one continue together. Its timeout is half as long, so that
    the failing rank still exists when the other one compares results.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=rank.timeout / 2))
    try:
        own: float | str = _median_ms(values, sent, received, group, repeats)
    except RuntimeError as error:  # the bytes were compared on the CPU, whose rate is not of interest
        own = f"rank {rank.rank}: {error}".splitlines()[0][:80]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, own)
    dist.destroy_process_group(group)
    return "; ".join(said for said in found if isinstance(said, str)) or found[0]


def _median_ms(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None, repeats: int) -> float:
    on_device = values.cuda() if torch.cuda.is_available() else values  # gloo also accepts CUDA tensors
    taken = []
    for _ in range(repeats + 1):  # the first one warms up
        begin = time.perf_counter()
        _exchange(on_device, sent, received, group)
        _wait_for_gpu()
        taken.append(1000 * (time.perf_counter() - begin))
    return statistics.median(taken[1:])


def _exchange(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    out = values.new_zeros(sum(received))
    dist.all_to_all_single(out, values, received, sent, group=group, async_op=True).wait()
    return out


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _length(nbytes: int) -> str:
    return f"{nbytes / MIB:.4g} MiB" if nbytes >= MIB else f"{nbytes // 1024} KiB"
