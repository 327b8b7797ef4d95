"""One clock for all ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def offset_to_rank_zero(group: dist.ProcessGroup, rounds: int = 20) -> float:
    """Rank 0's monotonic clock minus this rank's, in seconds: half-way through the fastest of ``rounds`` ping-pongs.

    Collective on ``group``, which must take CPU tensors. Source: Cristian, Probabilistic clock synchronization (1989).
    """
    if group.rank():
        return _ask(group, rounds)
    for other in range(1, group.size()):
        for _ in range(rounds):
            _message(group, other, receive=True)
            _message(group, other, receive=False)
    return 0.0


def _ask(group: dist.ProcessGroup, rounds: int) -> float:
    best, offset = float("inf"), 0.0
    for _ in range(rounds):
        sent = time.perf_counter()
        _message(group, 0, receive=False)
        remote = _message(group, 0, receive=True)
        received = time.perf_counter()
        if received - sent < best:
            best, offset = received - sent, remote - (sent + received) / 2
    return offset


def _message(group: dist.ProcessGroup, other: int, *, receive: bool) -> float:
    value = torch.tensor([time.perf_counter()], dtype=torch.float64)
    if receive:
        dist.recv(value, group=group, group_src=other)
    else:
        dist.send(value, group=group, group_dst=other)
    return float(value)
