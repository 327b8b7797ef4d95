"""Functional collectives and their gradients are those of gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from tests.helpers.both_groups import SMALL, Case, Side, assert_same_as_gloo, named

FORWARD: list[Case] = []
BACKWARD: list[Case] = []


def _now(result: Any) -> Any:
    return [_now(one) for one in result] if isinstance(result, (list, tuple)) else functional.wait_tensor(result).clone()


def _splits(side: Side, rows: int) -> tuple[list[int], list[int]]:
    """Rows from and for every rank, some of them none."""
    everyone = range(side.size)
    return [rows * ((k + 2 * side.rank) % 3) for k in everyone], [rows * ((side.rank + 2 * k) % 3) for k in everyone]


@named(FORWARD)
def all_to_all(side: Side) -> Any:
    results = []
    for rows in (1, 200):
        received, sent = _splits(side, rows)
        results.append(functional.all_to_all_single(side.numbers(sum(sent), 3), received, sent, side.group))
        results.append(functional.all_to_all_single(side.numbers(rows * side.size, 3), None, None, side.group))
    return _now(results)


@named(FORWARD)
def permute(side: Side) -> Any:
    around = [(k + 1) % side.size for k in range(side.size)]
    return _now([functional.permute_tensor(side.numbers(n), around, side.group) for n in (3, 700)])


@named(FORWARD)
def gathers(side: Side) -> Any:
    results = [functional.all_gather_tensor(side.numbers(2, 300), dim, side.group) for dim in (0, 1)]
    pair = [side.numbers(4), side.numbers(300, 2)]
    results += functional.all_gather_into_tensor_coalesced(pair, side.group)
    for name in ("all_gather_single", "all_gather_single_coalesced"):
        if name == "all_gather_single" and hasattr(functional, name):
            results.append(functional.all_gather_single(side.numbers(2, 300), 0, side.group))
        elif hasattr(functional, name):
            results += functional.all_gather_single_coalesced(pair, side.group)
    out = side.blank(side.size * 300, 2)
    functional.all_gather_tensor_inplace(out, side.numbers(300, 2), side.group)
    return _now([*results, out])


@named(FORWARD)
def reductions(side: Side) -> Any:
    results = [functional.all_reduce(side.numbers(500), op, side.group) for op in ("sum", "avg", "max")]
    results += functional.all_reduce_coalesced([side.numbers(3), side.numbers(500)], "sum", side.group)
    for dim in (0, 1):
        results.append(functional.reduce_scatter_tensor(side.numbers(4 * side.size, 3 * side.size), "sum", dim, side.group))
    pair = [side.numbers(2 * side.size), side.numbers(300 * side.size)]
    results += functional.reduce_scatter_tensor_coalesced(pair, "sum", [0, 0], side.group)
    results.append(functional.broadcast(side.numbers(300), side.size - 1, side.group))
    given = side.numbers(300)
    functional.all_reduce_inplace(given, "sum", side.group)
    return _now([*results, given])


@named(FORWARD)
def by_name(side: Side) -> Any:
    """As compiled code calls them."""
    ops, name = torch.ops._c10d_functional, side.group.group_name
    gathered = ops.all_gather_into_tensor(side.numbers(300), side.size, name)
    moved = ops.all_to_all_single(side.numbers(2 * side.size), [2] * side.size, [2] * side.size, name)
    summed = ops.all_reduce(side.numbers(5), "sum", name)
    return [ops.wait_tensor(result).clone() for result in (moved, summed, gathered)]


@named(FORWARD)
def used_without_a_wait(side: Side) -> Any:
    """The first use of a result waits."""
    received, sent = _splits(side, 300)
    chained = functional.all_to_all_single(side.numbers(sum(sent)), received, sent, side.group) * 2
    back = functional.all_to_all_single(chained, sent, received, side.group) + 1
    return (functional.all_gather_tensor(back.sum().reshape(1), 0, side.group) * 1).tolist(), back.tolist()


def _gradients(side: Side, rows: int, apply: Any) -> list[Tensor]:
    """The result of a collective over two columns, and the gradient of a weighted sum of it."""
    leaf = side.numbers(rows, 2).requires_grad_()
    result = apply(leaf * 2)
    weights = side.numbers(*result.shape)
    (result * weights).sum().backward()
    assert leaf.grad is not None
    return [result.detach().clone(), leaf.grad]


@named(BACKWARD)
def gradients_of_functional(side: Side) -> Any:
    results, scatter = [], functional.reduce_scatter_tensor_autograd
    for rows in (1, 200):
        received, sent = _splits(side, rows)
        results += _gradients(
            side, sum(sent), lambda x, r=received, s=sent: functional.all_to_all_single_autograd(x, r, s, side.group)
        )
        results += _gradients(side, rows, lambda x: functional.all_gather_tensor_autograd(x, 0, side.group))
        results += _gradients(side, rows * side.size, lambda x: scatter(x, "sum", 0, side.group))
    return results


@named(BACKWARD)
def gradients_of_nn(side: Side) -> Any:
    results, group = [], side.group
    for rows in (1, 200):
        received, sent = _splits(side, rows)

        def to_all(given: Tensor, received: Any = received, sent: Any = sent) -> Tensor:
            return differentiable.all_to_all_single(side.blank(sum(received), 2), given, received, sent, group=group)

        def listed(given: Tensor, rows: int = rows) -> Tensor:
            out = [side.blank(rows, 2) for _ in range(side.size)]
            return torch.cat(differentiable.all_to_all(out, list(given.split(rows)), group=group))

        def scattered(given: Tensor, rows: int = rows) -> Tensor:
            return differentiable.reduce_scatter(side.blank(rows, 2), list(given.split(rows)), group=group)

        results += _gradients(side, sum(sent), to_all)
        results += _gradients(side, rows * side.size, listed)
        results += _gradients(side, rows * side.size, scattered)
        results += _gradients(side, rows, lambda x: torch.cat(differentiable.all_gather(x, group=group)))
        results += _gradients(side, rows, lambda x: differentiable.all_reduce(x, group=group))
        results += _gradients(side, rows, lambda x: differentiable.broadcast(x, 0, group=group))
    return results


@named(BACKWARD)
def gradients_across_both(side: Side) -> Any:
    """There and back, as embeddings go: what a rank sends comes home, and so does the gradient of its copy elsewhere."""
    received, sent = _splits(side, 200)

    def there_and_back(given: Tensor) -> Tensor:
        there = functional.all_to_all_single_autograd(given, received, sent, side.group)
        return functional.all_to_all_single_autograd(there * there, sent, received, side.group)

    result, gradient = _gradients(side, sum(sent), there_and_back)
    assert sum(sent) == 0 or gradient.abs().max() > 0
    return result, gradient


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cases", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_functional_collectives_are_those_of_gloo(cases: list[Case], size: int) -> None:
    assert_same_as_gloo(cases, size, **SMALL)
