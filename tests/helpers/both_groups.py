"""The same collectives on a freescale group and on a gloo group, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.testing import run_distributed
from tests.helpers.comm_groups import make_group

TIMEOUT = timedelta(seconds=30)
UNTOUCHED = 77
SMALL = {"chunk_bytes": 1000}
"""Options with which small tensors travel in many chunks, whose ends are not those of elements."""


@dataclass
class Side:
    """A group and tensors for it, the same for a freescale and a gloo group."""

    group: Any
    draws: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
        """Random, other on every rank; or those of one rank."""
        self.draws += 1
        draw = torch.Generator().manual_seed(1000 * self.draws + (self.rank if rank is None else rank))
        if dtype == torch.bool:
            return torch.rand(shape, generator=draw) < 0.5
        if dtype.is_complex:
            return torch.randn(shape, generator=draw, dtype=dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=draw).to(dtype)
        return torch.randint(0, 100, shape, generator=draw).to(dtype)

    def blank(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """To be written by a collective; what it does not write shows."""
        return torch.full(shape, UNTOUCHED).to(dtype)


Case = Callable[[Side], Any]


def named(cases: list[Case]) -> Callable[[Case], Case]:
    def append(case: Case) -> Case:
        cases.append(case)
        return case

    return append


def assert_same_as_gloo(cases: Sequence[Case], size: int, **options: Any) -> None:
    """Every case has the same result on both kinds of group, on all ranks."""
    found = run_distributed(_differences, size, cases, options, timeout=60)
    told = [f"rank {rank}: {name}: {text}" for rank, one in enumerate(found) for name, text in one.items()]
    if told or not cases:
        pytest.fail("\n".join(told), pytrace=False)


def _differences(cases: Sequence[Case], options: dict[str, Any]) -> dict[str, str]:
    group, gloo = make_group(**options), dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert dist.get_backend(group) == "freescale"
    found = {}
    for case in cases:
        expected, raised = case(Side(gloo)), torch.zeros(1)
        try:
            difference = differs(case(Side(group)), expected)
        except Exception as error:
            difference, raised = f"{type(error).__name__}: {error}", torch.ones(1)
        if difference:
            found[case.__name__] = difference
        dist.all_reduce(raised)
        if raised.item() not in (0, dist.get_world_size()):
            break  # the ranks may not be at the same collective any more
    return found


def differs(one: Any, other: Any, where: str = "result") -> str:
    """What differs between two nested results, bit by bit; empty if nothing does."""
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} for {type(other).__name__}"
    if isinstance(one, dict):
        one, other = list(one.items()), list(other.items())
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: length {len(one)} for {len(other)}"
        return next(filter(None, (differs(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other)))), "")
    if isinstance(one, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{where}: {one.dtype} {tuple(one.shape)} for {other.dtype} {tuple(other.shape)}"
        return "" if torch.equal(bits(one), bits(other)) else f"{where}: {one} for {other}"
    return "" if one == other else f"{where}: {one!r} for {other!r}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
