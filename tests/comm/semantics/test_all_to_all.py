"""An all-to-all brings every rank what the others have for it, whatever the sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.testing import run_distributed
from tests.helpers.both_groups import SMALL, Side, assert_same_as_gloo, make_group

ROWS: dict[str, Callable[[int, int, int], int]] = {
    "even": lambda source, target, size: 2,
    "uneven": lambda source, target, size: (3 * source + 2 * target) % 4 + 1,
    "pairs_without": lambda source, target, size: (source + 2 * target) % 3,
    "silent_rank": lambda source, target, size: 0 if source == 0 else target + 1,
    "deaf_rank": lambda source, target, size: 0 if target == size - 1 else source + 1,
    "own_only": lambda source, target, size: 3 if source == target else 0,
    "one_way": lambda source, target, size: 4 if source < target else 0,
    "nothing": lambda source, target, size: 0,
    "one_large": lambda source, target, size: 3000 if (source, target) == (0, size - 1) else 1,
}
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 1, 5), (0,)]


def _split(side: Side, rows: Callable[[int, int, int], int]) -> tuple[list[int], list[int]]:
    """Rows that this rank gets from and has for every other."""
    everyone = range(side.size)
    return [rows(k, side.rank, side.size) for k in everyone], [rows(side.rank, k, side.size) for k in everyone]


def _explicit(side: Side, pattern: str, shape: tuple[int, ...], async_op: bool) -> Any:
    received, sent = _split(side, ROWS[pattern])
    given, out = side.numbers(sum(sent), *shape), side.blank(sum(received), *shape)
    work = dist.all_to_all_single(out, given, received, sent, group=side.group, async_op=async_op)
    if async_op:
        work.wait()
    return out, given


def _implicit(side: Side, splits: Any, rows: int, shape: tuple[int, ...]) -> Any:
    given, out = side.numbers(rows * side.size, *shape), side.blank(rows * side.size, *shape)
    dist.all_to_all_single(out, given, splits, splits, group=side.group)
    return out, given


def _one_split_implicit(side: Side) -> Any:
    """Equal parts in one direction may stay unsaid while the other's sizes are told."""
    given, out = side.numbers(2 * side.size), side.blank(2 * side.size)
    dist.all_to_all_single(out, given, input_split_sizes=[2] * side.size, group=side.group)
    again = side.blank(2 * side.size)
    dist.all_to_all_single(again, given, output_split_sizes=[2] * side.size, group=side.group)
    return out, again


def _list(side: Side, shape: tuple[int, ...], async_op: bool) -> Any:
    given = [side.numbers(*shape) for _ in range(side.size)]
    out = [side.blank(*shape) for _ in range(side.size)]
    work = dist.all_to_all(out, given, group=side.group, async_op=async_op)
    if async_op:
        work.wait()
    return out, given


def _named(function: Callable[..., Any], *arguments: Any) -> Any:
    case = partial(function, **dict(zip(function.__code__.co_varnames[1:], arguments)))
    case.__name__ = f"{function.__name__}{arguments}"
    return case


CASES = [_named(_explicit, name, shape, later) for name in ROWS for shape in SHAPES for later in (False, True)]
CASES += [_named(_implicit, splits, rows, shape) for splits in (None, []) for rows in (1, 300) for shape in SHAPES]
CASES += [_one_split_implicit]
CASES += [_named(_list, shape, later) for shape in [(), (5,), (300, 2), (0,)] for later in (False, True)]


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "chunks"])
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_to_all_is_that_of_gloo(size: int, options: dict[str, Any]) -> None:
    assert_same_as_gloo(CASES, size, **options)


def _lengths(options: dict[str, Any], lengths: list[int]) -> list[int]:
    """Lengths in bytes at which something else arrives than was sent; both parts are checked against what they must be."""
    group, rank, size = make_group(**options), dist.get_rank(), dist.get_world_size()
    content = (torch.arange(max(lengths) + size) * 7 % 251).to(torch.uint8)
    wrong = []
    for length in lengths:
        sent = [length + target for target in range(size)]
        received = [length + rank] * size
        given = torch.cat([content[:n] + 10 * rank + target for target, n in enumerate(sent)])
        out = torch.full((sum(received),), 77, dtype=torch.uint8)
        dist.all_to_all_single(out, given, received, sent, group=group)
        if not torch.equal(out, torch.cat([content[:n] + 10 * source + rank for source, n in enumerate(received)])):
            wrong.append(length)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [1, 64, 4096])
def test_every_length_arrives_whole(chunk_bytes: int) -> None:
    """Also those at which a part just fits into a chunk, or into the first message, or just does not."""
    around = [k * chunk_bytes + d for k in (1, 2, 3, 5) for d in (-3, -2, -1, 0, 1) if chunk_bytes > 1]
    lengths = sorted({*range(40), *around, *(range(880, 1030) if chunk_bytes > 1 else [1500])})
    assert run_distributed(_lengths, 3, {"chunk_bytes": chunk_bytes}, lengths, timeout=60) == [[]] * 3


def _uneven_lists(options: dict[str, Any]) -> list[str]:
    """Patterns at which something else arrives in lists than in one tensor, over gloo."""
    side, wrong = Side(make_group(**options)), []
    for pattern, rows in ROWS.items():
        for async_op in (False, True):
            received, sent = _split(side, rows)
            given, out = side.numbers(sum(sent), 3), [side.blank(n, 3) for n in received]
            expected = side.blank(sum(received), 3)
            work = dist.all_to_all(out, list(given.split(sent)), group=side.group, async_op=async_op)
            if async_op:
                assert work.wait() and work.get_future().wait()[0] is out[0]
            dist.all_to_all_single(expected, given, received, sent)
            if not torch.equal(torch.cat(out), expected):
                wrong.append(pattern)
    return wrong


@pytest.mark.parametrize("options", [SMALL, {"transport": "native"}], ids=["chunks", "native"])
@pytest.mark.parametrize("size", [2, 3])
def test_lists_of_unequal_tensors_arrive(size: int, options: dict[str, Any]) -> None:
    """Gloo refuses them; the same rows in one tensor are the reference."""
    assert run_distributed(_uneven_lists, size, options) == [[]] * size
