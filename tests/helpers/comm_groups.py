"""Groups of the backend, the outcome of a call on one, and the check that a group leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import lightning_freescale.comm  # noqa: F401 (registers the backend)
from lightning_freescale.comm import ProcessGroupFreeScaleOptions
from lightning_freescale.comm.transports.host import HostTransport

TIMEOUT = 40.0
SOON = 20.0
"""Seconds: well under the timeout, and more than a busy machine needs."""
AT_ONCE = 5.0
"""Seconds: of what waits for nothing, not even for a timeout of its own."""


def make_group(*, timeout: float = TIMEOUT, ranks: list[int] | None = None, **options: Any) -> Any:
    """A group of the lane "rows". Collective over all ranks."""
    chosen = ProcessGroupFreeScaleOptions(**{"name": "rows", **options})
    return dist.new_group(ranks, backend="freescale", timeout=timedelta(seconds=timeout), pg_options=chosen)


def everyone_sends(group: Any, rows: int = 3, async_op: bool = False) -> bool:
    """One sound collective; whether the right rows came from the right ranks."""
    given = torch.full((rows * group.size(),), float(group.rank()))
    out = torch.full_like(given, -1.0)
    work = dist.all_to_all_single(out, given, group=group, async_op=async_op)
    if work is not None:
        work.wait()
    return torch.equal(out, torch.arange(float(group.size())).repeat_interleave(rows))


SHORT, LONG = 4, 2_000_000
"""The bytes for every rank: one message, and hundreds of chunks."""
CHUNK = 16 * 1024


@dataclass(frozen=True)
class Outcome:
    """What became of a call: the kind of error and its text, if any, and when."""

    kind: str
    text: str
    seconds: float


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Call, and wait for the Work that is returned, if it is one."""
    start = time.monotonic()
    try:
        returned = call(*args, **kwargs)
        if isinstance(returned, dist.Work):
            returned.wait()
    except Exception as error:
        return Outcome(type(error).__name__, str(error), time.monotonic() - start)
    return Outcome("", "", time.monotonic() - start)


def lane_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("freescale")}


def sockets() -> set[str]:
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own, closed by now
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return {link for link in links if link.startswith("socket:")}


def pinned_in_use(transport: HostTransport) -> int:
    """Return the number of pinned buffers that a chunk is in."""
    pools = (pool for staging in transport._stagings.values() for pool in (staging._outgoing, staging._incoming))
    return sum(pool.made - len(pool.free) for pool in pools)


@contextmanager
def nothing_left(*transports: HostTransport) -> Iterator[None]:
    """The block ends, soon, with no more threads of lanes, sockets and pinned buffers in use than it began with."""
    threads, before = lane_threads(), sockets()
    gc.freeze()  # what is there already need not be looked at
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while True:
        pinned = [buffers for transport in transports if (buffers := pinned_in_use(transport))]
        left = [*(lane_threads() - threads), *(sockets() - before), *pinned]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert not left


def all_to_all(group: Any, part: int = SHORT, *, missing: int = 0, async_op: bool = False, dtype: Any = torch.uint8) -> Any:
    """Send every rank a part. Rank 1 sends rank 0 some elements less than rank 0 expects."""
    n = group.size()
    sent = [part - missing * (group.rank() == 1 and peer == 0) for peer in range(n)]
    given, out = torch.ones(sum(sent), dtype=dtype), torch.empty(part * n, dtype=dtype)
    return dist.all_to_all_single(out, given, [part] * n, sent, group, async_op)


def exchange(group: Any, part: int = SHORT, slot: int | None = None, dtype: Any = torch.uint8, **options: Any) -> None:
    rank, n = group.rank(), group.size()
    gives, gets = ([0 if peer == rank else length for peer in range(n)] for length in (part, part if slot is None else slot))
    group.exchange(torch.empty(sum(gets), dtype=dtype), torch.ones(sum(gives), dtype=dtype), gets, gives, **options)


CALLS: dict[str, Callable[..., Any]] = {
    "sync": all_to_all,
    "async": partial(all_to_all, async_op=True),
    "exchange": exchange,
}


def assert_ended(seen: list[Outcome], *words: str, late: bool = False) -> None:
    """Check that all calls fail for one reason, the later ones at once. If ``late``, the first call may have succeeded."""
    failed = seen[1:] if late and not seen[0].kind else seen
    assert all(each.kind == "DistBackendError" and each.text == failed[0].text for each in failed), seen
    assert failed[0].text.startswith("freescale ") and "lane 'rows'" in failed[0].text, failed
    assert all(word in failed[0].text for word in words), (words, failed)
    assert failed[0].seconds < SOON and all(each.seconds < AT_ONCE for each in failed[1:]), failed
