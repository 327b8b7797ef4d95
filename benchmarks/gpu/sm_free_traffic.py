"""Transfers that run beside the compute; all but :class:`Exchanges` need a CUDA device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sm_free_kernels import sm_copy
from sm_free_plan import Plan
from sm_free_running import Step
from torch import Tensor

REPEATS = 16  # copies in one launch of the kernel, which so keeps its multiprocessors for milliseconds
AHEAD = 2  # copies that are queued before the host waits for one


class Exchanges:
    """All-to-alls between the two processes; before each, rank 0 announces whether another one follows.

    The parts are equal, or the peer's is three times the own one.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup, uneven: bool = False) -> None:
        self._group = group
        self._to_peer = plan.nbytes * 3 // 4 if uneven else plan.nbytes // 2
        own_last = dist.get_rank() == 1
        sizes = [self._to_peer, plan.nbytes - self._to_peer] if own_last else [plan.nbytes - self._to_peer, self._to_peer]
        self._sizes = sizes if uneven else None
        self._outgoing = torch.zeros(plan.nbytes, dtype=torch.uint8, device=plan.device)
        self._incoming = torch.empty_like(self._outgoing)
        self._stream = torch.cuda.Stream() if plan.on_gpu else None

    def step(self) -> int:
        """Make one exchange; return the bytes that go to the peer."""
        self._another(True)
        self._exchange()
        return self._to_peer

    def stop(self) -> None:
        """Announce to the peer that no exchange follows."""
        self._another(False)

    def serve(self) -> None:
        """Take part in exchanges as the peer."""
        while self._another():
            self._exchange()

    def _another(self, say: bool = False) -> bool:
        said = torch.tensor([say])
        dist.broadcast(said, src=0)
        return bool(said)

    def _exchange(self) -> None:
        with torch.cuda.stream(self._stream):  # None changes nothing
            all_to_all = (self._incoming, self._outgoing, self._sizes, self._sizes)
            dist.all_to_all_single(*all_to_all, group=self._group, async_op=True).wait()
        if self._stream is not None:
            self._stream.synchronize()


def queued(copies: list[tuple[torch.cuda.Stream, Callable[[], Any]]], nbytes: int) -> Step:
    """Return a step of copies on streams."""
    pending: deque[list[torch.cuda.Event]] = deque()

    def step() -> int:
        events = []
        for stream, copy in copies:
            with torch.cuda.stream(stream):
                copy()
                events.append(stream.record_event(torch.cuda.Event(blocking=True)))
        pending.append(events)
        for event in pending.popleft() if len(pending) > AHEAD else ():
            event.synchronize()
        return nbytes

    return step


def sm_copying(plan: Plan) -> tuple[Step, str]:
    """Return a kernel that copies within the GPU, and the name of its compiler."""
    compiler, launch = sm_copy(plan.ctas)
    source = torch.zeros(plan.nbytes // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # at normal priority its blocks would wait for all those of a matrix product
    stream = torch.cuda.Stream(priority=-1)
    step = queued([(stream, lambda: launch(source, target, REPEATS))], REPEATS * plan.nbytes)
    return step, f"{plan.ctas} thread blocks, compiled by {compiler}"


def copy_engines(plan: Plan) -> tuple[Step, str]:
    """Return copies to and from the host."""
    pinned = [torch.zeros(plan.nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(plan.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    down, up = torch.cuda.Stream(), torch.cuda.Stream()  # the two directions have an engine each
    step = queued([(down, _copy(device[0], pinned[0])), (up, _copy(pinned[1], device[1]))], plan.nbytes)
    return step, "pinned memory, both directions at once"


def peer_copies(plan: Plan) -> tuple[Step, str]:
    """Return copies to a second GPU."""
    source = torch.zeros(plan.nbytes, dtype=torch.uint8, device="cuda:0")
    step = queued([(torch.cuda.Stream(), _copy(source, torch.zeros_like(source, device="cuda:1")))], plan.nbytes)
    return step, f"peer access {'is on' if torch.cuda.can_device_access_peer(0, 1) else 'is off: through host memory'}"


def _copy(source: Tensor, target: Tensor) -> Callable[[], Any]:
    return lambda: target.copy_(source, non_blocking=True)
