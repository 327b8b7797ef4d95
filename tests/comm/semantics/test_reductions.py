"""Reductions are those of gloo, bit by bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.both_groups import Case, Side, assert_same_as_gloo, named

CASES: list[Case] = []
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _operand(side: Side, op: str, *shape: int) -> torch.Tensor:
    return side.numbers(*shape, dtype=torch.int64 if op.startswith("B") else torch.float32)


@named(CASES)
def all_reduce(side: Side) -> Any:
    results = []
    for op in OPS:
        for shape in [(5,), (), (2, 3), (3000,)]:
            for async_op in (False, True):
                tensor = _operand(side, op, *shape)
                work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=side.group, async_op=async_op)
                if async_op:
                    work.wait()
                results.append(tensor)
    return results


@named(CASES)
def reduce(side: Side) -> Any:
    """What other ranks than the root hold afterwards is nobody's business."""
    results = []
    for op in OPS:
        for root in range(side.size):
            tensor = _operand(side, op, 7)
            dist.reduce(tensor, group_dst=root, op=getattr(dist.ReduceOp, op), group=side.group)
            results.append(tensor if side.rank == root else None)
    return results


@named(CASES)
def all_reduce_coalesced(side: Side) -> Any:
    results = []
    for async_op in (False, True):
        tensors = [side.numbers(5), side.numbers(2, 300)]
        with warnings.catch_warnings(action="ignore"):
            work = dist.all_reduce_coalesced(tensors, group=side.group, async_op=async_op)
        if async_op:
            work.wait()  # a future
        results += tensors
    return results


@named(CASES)
def all_reduce_sparse(side: Side) -> Any:
    """Gradients of ``nn.Embedding(sparse=True)``."""
    rows = torch.tensor([[side.rank, side.rank + 1]])
    tensor = torch.sparse_coo_tensor(rows, side.numbers(2, 3), (6, 3)).coalesce()
    dist.all_reduce(tensor, group=side.group)
    return tensor.coalesce().indices(), tensor.coalesce().values()


@named(CASES)
def reduce_scatter(side: Side) -> Any:
    results = []
    for shapes in ([(4,)] * side.size, [(k + 1, 2) for k in range(side.size)]):
        for async_op in (False, True):
            given, out = [side.numbers(*shape) for shape in shapes], side.blank(*shapes[side.rank])
            work = dist.reduce_scatter(out, given, group=side.group, async_op=async_op)
            if async_op:
                work.wait()
            results += [out, *given]
    return results


@named(CASES)
def reduce_scatter_tensor(side: Side) -> Any:
    results = []
    for scatter in (dist.reduce_scatter_tensor, getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)):
        for op in ("SUM", "AVG", "MAX"):
            for async_op in (False, True):
                given, out = side.numbers(300 * side.size, 2), side.blank(300, 2)
                work = scatter(out, given, op=getattr(dist.ReduceOp, op), group=side.group, async_op=async_op)
                if async_op:
                    work.wait()
                results += [out, given]
    return results


@named(CASES)
def coalescing_manager(side: Side) -> Any:
    """As FSDP issues several at once."""
    gathered = [(side.blank(side.size * n), side.numbers(n)) for n in (1, 3, 400)]
    with dist.distributed_c10d._coalescing_manager(group=side.group, async_ops=True) as gathering:
        for out, given in gathered:
            dist.all_gather_into_tensor(out, given, group=side.group)
    gathering.wait()
    scattered = [(side.blank(n), side.numbers(side.size * n)) for n in (1, 3, 400)]
    with dist.distributed_c10d._coalescing_manager(group=side.group, async_ops=True) as scattering:
        for out, given in scattered:
            dist.reduce_scatter_tensor(out, given, group=side.group)
    scattering.wait()
    return gathered, scattered


@named(CASES)
def unsupported_reductions_are_refused(side: Side) -> Any:
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0), group=side.group)
    tensor = side.numbers(3)
    dist.all_reduce(tensor, group=side.group)
    return tensor


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_reductions_are_those_of_gloo(size: int) -> None:
    assert_same_as_gloo(CASES, size)
