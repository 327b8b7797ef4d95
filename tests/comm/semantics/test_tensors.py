"""Tensors of every kind: parts of buffers, parameters, inference tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.both_groups import SMALL, UNTOUCHED, Case, Side, assert_same_as_gloo, named

CASES: list[Case] = []


def _all(side: Side, given: Any, out: Any, gathered: Any, listed: Any, async_op: bool) -> None:
    """One collective of each of the three kinds."""
    works = [
        dist.all_to_all_single(out, given, group=side.group, async_op=async_op),
        dist.all_gather_into_tensor(gathered, given, group=side.group, async_op=async_op),
        dist.all_gather(listed, given, group=side.group, async_op=async_op),
    ]
    for work in works if async_op else []:
        work.wait()


@named(CASES)
def parts_of_buffers(side: Side) -> Any:
    """What lies around the output stays as it was."""
    results, n = [], side.size
    for async_op in (False, True):
        buffers = [side.blank(300 * n * n + 20, 2) for _ in range(3)]
        given = side.numbers(300 * n + 20, 2)[7 : 300 * n + 7]
        out, gathered = buffers[0][3 : 300 * n + 3], buffers[1][5 : 300 * n * n + 5]
        listed = list(buffers[2][11 : 300 * n * n + 11].split(300 * n))
        _all(side, given, out, gathered, listed, async_op)
        assert (buffers[0][:3] == UNTOUCHED).all() and (buffers[0][300 * n + 3 :] == UNTOUCHED).all()
        results += buffers
    return results


@named(CASES)
def odd_addresses(side: Side) -> Any:
    """Bytes that begin anywhere."""
    results = []
    for offset in (1, 2, 3, 5):
        out, given = side.blank(2000 * side.size, dtype=torch.uint8), side.numbers(2000 * side.size, dtype=torch.uint8)
        part = slice(offset, offset + 1500 * side.size)
        dist.all_to_all_single(out[part], given[part], group=side.group)
        results += [out, given]
    return results


@named(CASES)
def parameters(side: Side) -> Any:
    """Leaves that require grad are read and written without a gradient."""
    results, n = [], side.size
    for rows in (1, 300):
        for async_op in (False, True):
            given = torch.nn.Parameter(side.numbers(rows * n, 2))
            out, gathered = (torch.nn.Parameter(side.blank(rows * n * k, 2)) for k in (1, n))
            listed = [torch.nn.Parameter(side.blank(rows * n, 2)) for _ in range(n)]
            with torch.no_grad():  # gloo's all-gather asks for it
                _all(side, given, out, gathered, listed, async_op)
            assert all(tensor.grad_fn is None and tensor.requires_grad for tensor in (given, out, gathered, *listed))
            results += [given, out, gathered, *listed]
    return results


@named(CASES)
def results_of_a_graph(side: Side) -> Any:
    """The input may be in the middle of a graph, and the graph goes on as if nothing had been."""
    leaf, n = torch.nn.Parameter(side.numbers(300 * side.size, 2)), side.size
    given = leaf * 2
    out, gathered, listed = side.blank(300 * n, 2), side.blank(300 * n * n, 2), [side.blank(300 * n, 2) for _ in range(n)]
    dist.all_to_all_single(out, given, group=side.group)
    with torch.no_grad():
        _all(side, given, out, gathered, listed, True)
    assert not any(tensor.requires_grad for tensor in (out, gathered, *listed))
    given.square().sum().backward()
    return out, gathered, listed, leaf.grad


@named(CASES)
def in_inference_mode(side: Side) -> Any:
    """Lightning validates in it; the mode belongs to a thread."""
    results, n = [], side.size
    for rows in (1, 300):
        for async_op in (False, True):
            with torch.inference_mode():
                given, out, gathered = side.numbers(rows * n, 2), side.blank(rows * n, 2), side.blank(rows * n * n, 2)
                listed = [side.blank(rows * n, 2) for _ in range(n)]
                assert out.is_inference()
                _all(side, given, out, gathered, listed, async_op)
                results += [tensor.clone() for tensor in (given, out, gathered, *listed)]
    return [tensor.tolist() for tensor in results]


@named(CASES)
def without_grad_mode(side: Side) -> Any:
    results, n = [], side.size
    with torch.no_grad():
        given, out, gathered = side.numbers(300 * n), side.blank(300 * n), side.blank(300 * n * n)
        listed = [side.blank(300 * n) for _ in range(n)]
        _all(side, given, out, gathered, listed, True)
    results += [given, out, gathered, *listed]
    return results


@named(CASES)
def transposed(side: Side) -> Any:
    """Gloo takes tensors whose elements do not lie next to each other."""
    told, summed = side.numbers(3, 4).t(), side.numbers(3, 4).t()
    dist.broadcast(told, group_src=side.size - 1, group=side.group)
    dist.all_reduce(summed, group=side.group)
    return told, summed


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_tensors_that_gloo_takes(case: Case, options: dict[str, Any]) -> None:
    assert_same_as_gloo([case], 3, **options)
