"""One asynchronous collective of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.both_groups import Side

Issued = tuple[Any, list[torch.Tensor]]


def issue_to_all(side: Side, rows: int = 300) -> Issued:
    given, out = side.numbers(rows * side.size), side.blank(rows * side.size)
    return dist.all_to_all_single(out, given, group=side.group, async_op=True), [out]


def issue_list_to_all(side: Side, rows: int = 300) -> Issued:
    out = [side.blank(rows) for _ in range(side.size)]
    return dist.all_to_all(out, [side.numbers(rows) for _ in out], group=side.group, async_op=True), out


def issue_gather(side: Side, rows: int = 300) -> Issued:
    out = side.blank(rows * side.size)
    return dist.all_gather_into_tensor(out, side.numbers(rows), group=side.group, async_op=True), [out]


def issue_list_gather(side: Side, rows: int = 300) -> Issued:
    out = [side.blank(rows) for _ in range(side.size)]
    return dist.all_gather(out, side.numbers(rows), group=side.group, async_op=True), out


def issue_reduce(side: Side, rows: int = 300) -> Issued:
    tensor = side.numbers(rows)
    return dist.all_reduce(tensor, group=side.group, async_op=True), [tensor]


def issue_broadcast(side: Side, rows: int = 300) -> Issued:
    tensor = side.numbers(rows)
    return dist.broadcast(tensor, group_src=0, group=side.group, async_op=True), [tensor]


def issue_scatter(side: Side, rows: int = 300) -> Issued:
    out = side.blank(rows)
    return dist.reduce_scatter_tensor(out, side.numbers(rows * side.size), group=side.group, async_op=True), [out]


KINDS: list[Callable[..., Issued]] = [
    *(issue_to_all, issue_list_to_all, issue_gather, issue_list_gather, issue_reduce, issue_broadcast, issue_scatter),
]
WITH_FUTURE = [kind for kind in KINDS if kind is not issue_scatter]
"""Gloo's reduce-scatter has no future, and is done when it is waited for."""
