"""Random collectives for ``comm_stress.py``, and their expected results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

LARGEST = 200_000
"""Bytes that a rank sends and receives at most."""
DTYPES = (torch.uint8, torch.float32, torch.int64, torch.bfloat16)
_PATTERN = torch.arange(1009, dtype=torch.float64).sin().mul(100).round()


@dataclass
class Plan:
    """One collective, equal on all ranks: ``rows[source][target]`` elements of ``dtype``."""

    kind: str
    rows: np.ndarray
    dtype: torch.dtype
    waits_later: bool
    number: int


@dataclass
class Lane:
    """A group and the results of the thread that uses it."""

    group: Any
    rank: int
    size: int
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    moved: int = 0


def draw_plan(draw: np.random.RandomState, number: int, size: int) -> Plan:
    """Draw a collective: most are small, some are large, and one part in five is empty."""
    kind = list(KINDS)[int(draw.randint(len(KINDS)))]
    dtype = DTYPES[int(draw.randint(len(DTYPES)))]
    largest = LARGEST // dtype.itemsize // max(1, size)
    rows = (largest * draw.rand(size, size) ** 4).astype(int) * (draw.rand(size, size) > 0.2)
    return Plan(kind, rows, dtype, bool(draw.rand() < 0.6), number)


def _content(plan: Plan, source: int, target: int, rows: int) -> Tensor:
    """Return the elements that ``source`` sends to ``target``."""
    start = (31 * plan.number + 7 * source + 3 * target) % 500
    return _PATTERN.roll(-start).repeat(rows // len(_PATTERN) + 1)[:rows].abs().to(plan.dtype)


def _for_all(lane: Lane, plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """Return what this rank sends to each rank and must receive from it."""
    everyone = range(lane.size)
    sent = [_content(plan, lane.rank, k, plan.rows[lane.rank, k]) for k in everyone]
    received = [_content(plan, k, lane.rank, plan.rows[k, lane.rank]) for k in everyone]
    lane.moved += sum(part.nbytes for k, part in enumerate(received) if k != lane.rank)
    return sent, received


def _all_to_all_single(lane: Lane, plan: Plan) -> tuple[Any, Callable[[], bool]]:
    sent, received = _for_all(lane, plan)
    expected = torch.cat(received)
    out = torch.full_like(expected, 77)
    splits = [list(map(len, received)), list(map(len, sent))]
    work = dist.all_to_all_single(out, torch.cat(sent), *splits, group=lane.group, async_op=plan.waits_later)
    return work, lambda: torch.equal(out, expected)


def _all_to_all(lane: Lane, plan: Plan) -> tuple[Any, Callable[[], bool]]:
    sent, received = _for_all(lane, plan)
    out = [torch.full_like(part, 77) for part in received]
    work = dist.all_to_all(out, sent, group=lane.group, async_op=plan.waits_later)
    return work, lambda: all(torch.equal(*pair) for pair in zip(out, received))


def _parts(lane: Lane, plan: Plan) -> list[Tensor]:
    """Return parts of equal length, one for each rank."""
    rows = int(plan.rows[0, -1])
    lane.moved += (lane.size - 1) * rows * plan.dtype.itemsize
    return [_content(plan, source, 0, rows) for source in range(lane.size)]


def _all_gather(lane: Lane, plan: Plan) -> tuple[Any, Callable[[], bool]]:
    parts = _parts(lane, plan)
    out = [torch.full_like(part, 77) for part in parts]
    work = dist.all_gather(out, parts[lane.rank], group=lane.group, async_op=plan.waits_later)
    return work, lambda: all(torch.equal(*pair) for pair in zip(out, parts))


def _all_gather_single(lane: Lane, plan: Plan) -> tuple[Any, Callable[[], bool]]:
    expected = torch.cat(parts := _parts(lane, plan))
    out = torch.full_like(expected, 77)
    work = dist.all_gather_single(out, parts[lane.rank], group=lane.group, async_op=plan.waits_later)
    return work, lambda: torch.equal(out, expected)


def _all_reduce(lane: Lane, plan: Plan) -> tuple[Any, Callable[[], bool]]:
    expected = torch.stack(parts := [part.double() for part in _parts(lane, plan)]).sum(0)  # whole numbers: any order
    mine = parts[lane.rank].clone()
    work = dist.all_reduce(mine, group=lane.group, async_op=plan.waits_later)
    return work, lambda: torch.equal(mine, expected)


KINDS: dict[str, Callable[[Lane, Plan], tuple[Any, Callable[[], bool]]]] = {
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_reduce": _all_reduce,
}
